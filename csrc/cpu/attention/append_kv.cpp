// cache[b, h, positions[b, r]] = new[b, h, r] for keys and values. (Sequence, row) pairs over threads.
#include "cpu/base/parallel.h"
#include "params.h"

namespace dflash::DFLASH_ISA {

void append_kv(const AppendKvParams& p) {
  const int64_t size = p.dtype == DType::kFloat32 ? 4 : 2;
  const int64_t k_bytes = p.head_dim * size, v_bytes = p.v_head_dim * size;
  const auto append = [&](int64_t index) {
    const int64_t b = index / p.rows, row = index % p.rows, position = p.positions[index];
    if (position < 0 || position >= p.capacity) return;
    for (int64_t h = 0; h < p.num_kv_heads; ++h) {
      const int64_t slot = (b * p.num_kv_heads + h) * p.capacity + position;
      const int64_t k = b * p.k_stride_batch + h * p.k_stride_head + row * p.k_stride_row;
      const int64_t v = b * p.v_stride_batch + h * p.v_stride_head + row * p.v_stride_row;
      std::memcpy(static_cast<char*>(p.k_cache) + slot * k_bytes, static_cast<const char*>(p.key) + k * size,
                  k_bytes);
      std::memcpy(static_cast<char*>(p.v_cache) + slot * v_bytes,
                  static_cast<const char*>(p.value) + v * size, v_bytes);
    }
  };
  const int64_t n = p.batch * p.rows;
  parallel_for(n, n * p.num_kv_heads * (p.head_dim + p.v_head_dim), p.threads, append);
}

}  // namespace dflash::DFLASH_ISA
