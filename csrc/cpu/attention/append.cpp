// Norm and RoPE of heads, and the append of k and v to the row's slot of the cache. Rows over threads.
#include "common/row_place.h"
#include "cpu/attention/norm_rope.h"
#include "cpu/base/parallel.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
static void qkv_row(const QkvNormRopeAppendParams& p, int64_t index) {
  const int64_t b = index / p.rows, row = index % p.rows, d = p.head_dim, q_row = row - (p.rows - p.q_rows);
  const RowPlace place = place_of(p, b, row);
  const int64_t q_stride = p.gated ? 2 * d : d;
  const T* x = static_cast<const T*>(p.qkv) + index * (p.num_heads * q_stride + 2 * p.num_kv_heads * d);
  NormRope<T> norm_rope(p, p.q_norm_weight, place.angle, p.zero_centered);
  if (q_row >= 0) {
    T* out = static_cast<T*>(p.q_out) + (b * p.q_rows + q_row) * p.num_heads * d;
    for (int64_t h = 0; h < p.num_heads; ++h) norm_rope(x + h * q_stride, out + h * d);
  }
  norm_rope.weight = static_cast<const T*>(p.k_norm_weight);
  const T* k = x + p.num_heads * q_stride;
  append_row(p, k, k + p.num_kv_heads * d, norm_rope, p.k_cache, p.v_cache, b, place.slot);
}

template <typename T>
static void context_row(const AppendContextKvParams& p, int64_t index) {
  const int64_t layer = index / (p.batch * p.rows), row = index % (p.batch * p.rows), d = p.head_dim;
  const T* weight = static_cast<const T*>(p.k_norm_weight);
  const NormRope<T> norm_rope(p, weight ? weight + layer * d : nullptr, row, false);
  const T* k = static_cast<const T*>(p.kv) + index * 2 * p.num_kv_heads * d;
  append_row(p, k, k + p.num_kv_heads * d, norm_rope, p.k_caches[layer], p.v_caches[layer], row / p.rows,
             p.positions[row]);
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::qkv_norm_rope_append(const QkvNormRopeAppendParams& p) {
  const int64_t n = p.batch * p.rows, heads = p.num_heads + 2 * p.num_kv_heads;
  parallel_rows(p, n, n * heads * p.head_dim, [&](auto type, int64_t row) { qkv_row<decltype(type)>(p, row); });
}

void dflash::DFLASH_ISA::append_context_kv(const AppendContextKvParams& p) {
  const int64_t n = p.num_layers * p.batch * p.rows;
  parallel_rows(p, n, n * 2 * p.num_kv_heads * p.head_dim,
                [&](auto type, int64_t row) { context_row<decltype(type)>(p, row); });
}

void dflash::DFLASH_ISA::append_kv(const AppendKvParams& p) {
  const int64_t size = p.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t k_bytes = p.head_dim * size, v_bytes = p.v_head_dim * size;
  const auto append = [&](int64_t index) {
    const int64_t b = index / p.rows, row = index % p.rows, position = p.positions[index];
    if (position < 0 || position >= p.capacity) return;
    for (int64_t h = 0; h < p.num_kv_heads; ++h) {
      const int64_t slot = (b * p.num_kv_heads + h) * p.capacity + position;
      const int64_t k = b * p.k_stride_batch + h * p.k_stride_head + row * p.k_stride_row;
      const int64_t v = b * p.v_stride_batch + h * p.v_stride_head + row * p.v_stride_row;
      std::memcpy(static_cast<char*>(p.k_cache) + slot * k_bytes, static_cast<const char*>(p.key) + k * size, k_bytes);
      std::memcpy(static_cast<char*>(p.v_cache) + slot * v_bytes, static_cast<const char*>(p.value) + v * size,
                  v_bytes);
    }
  };
  const int64_t n = p.batch * p.rows;
  parallel_for(n, n * p.num_kv_heads * (p.head_dim + p.v_head_dim), p.threads, append);
}
