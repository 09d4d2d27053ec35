// The pre-norm decoder layer, for every layer in turn, and the final norm:
//   n = rms_norm(h); q, k, v = n W; append rope(norm(k)), v; h += attention(rope(norm(q))) W_o
//   m = rms_norm(h); h += (silu(m W_gate) * (m W_up)) W_down
// Composes the other kernels over buffers that stay in the cache of one core: a small model's forward pass is
// one call. The live context rows come before the block's rows in the buffer that k and v are projected from;
// each layer overwrites the block's rows and finds the context's as they were.
#include "cpu/buffer.h"
#include "cpu/linear.h"
#include "cpu/norm_rope.h"
#include "cpu/parallel.h"

namespace dflash::DFLASH_ISA {

void rms_norm(const RmsNormParams&);
void silu_mul(const SiluMulParams&);
void block_attention(const BlockAttentionParams&);

}  // namespace dflash::DFLASH_ISA

DFLASH_NAMESPACE_BEGIN

struct Row {
  int64_t sequence, position;
};

// As in block_attention.cpp.
static inline int64_t length_of(const DecoderLayersParams& p, int64_t b) {
  const int64_t most = 2 * p.capacity + p.rows, length = p.lengths[b] < most ? p.lengths[b] : most;
  return length > -p.rows ? length : -p.rows;
}

template <typename T>
static void run_layers(const DecoderLayersParams& p) {
  const int64_t d = p.head_dim, n = p.batch * p.rows, hidden = p.hidden_size;
  const int64_t q_size = p.num_heads * d, kv_size = p.num_kv_heads * d;
  static thread_local Buffer<Row> row_buffer;
  static thread_local Buffer<T> memory;
  // The live context rows, then the block's.
  Row* rows = row_buffer.reserve(p.batch * (p.context_rows + p.rows));
  const auto live = [&](int64_t b) {
    const int64_t count = p.num_context[b] < p.context_rows ? p.num_context[b] : p.context_rows;
    return count > 0 ? count : 0;
  };
  int64_t context = 0;
  for (int64_t b = 0; p.context && b < p.batch; ++b)
    for (int64_t i = 0; i < live(b); ++i) rows[context++] = {b, length_of(p, b) - p.num_context[b] + i};
  const int64_t all = context + n;
  for (int64_t i = 0; i < n; ++i) rows[context + i] = {i / p.rows, length_of(p, i / p.rows) + i % p.rows};

  const int64_t sizes[] = {all * hidden, n * hidden,    n * hidden,    n * hidden,      all * q_size,
                           n * q_size,   all * kv_size, all * kv_size, n * 2 * p.width, n * p.width};
  int64_t total = 0;
  for (int64_t size : sizes) total += (size + 63) / 64 * 64;
  T* at = memory.reserve(total);
  T* buffers[10];
  for (int i = 0; i < 10; ++i) buffers[i] = at, at += (sizes[i] + 63) / 64 * 64;
  T *x = buffers[0], *normed = x + context * hidden, *residual = buffers[1], *other = buffers[2],
    *delta = buffers[3];
  T *raw_q = buffers[4], *q = buffers[5], *k = buffers[6], *v = buffers[7], *gate_up = buffers[8],
    *activated = buffers[9];

  const auto norm = [&](const T* in, const T* add, const void* weight, T* out, T* sum) {
    rms_norm({in, add, weight, nullptr, out, sum, n, hidden, n, p.eps, p.dtype, p.threads});
  };
  const T* source = static_cast<const T*>(p.context);
  T* to = x;
  for (int64_t b = 0; p.context && b < p.batch; ++b, source += p.context_rows * hidden) {
    std::memcpy(to, source, sizeof(T) * live(b) * hidden);
    to += live(b) * hidden;
  }
  std::memcpy(residual, p.hidden, sizeof(T) * n * hidden);
  norm(residual, nullptr, p.layers[0].input_norm, normed, nullptr);
  for (int64_t index = 0; index < p.num_layers; ++index) {
    const DecoderLayer& layer = p.layers[index];
    const LinearPart qkv[] = {{layer.q, layer.q_bias, raw_q, q_size, q_size, context},
                              {layer.k, layer.k_bias, k, kv_size, kv_size, 0},
                              {layer.v, layer.v_bias, v, kv_size, kv_size, 0}};
    linear_parts(x, all, hidden, qkv, 3, p.dtype, p.threads);
    parallel_for(all, all * (q_size + 2 * kv_size), p.threads, [&](int64_t i) {
      const Row row = rows[i];
      const int64_t angle = row.position < 0             ? 0
                            : row.position < p.positions ? row.position
                                                         : p.positions - 1;
      NormRope<T> norm_rope{static_cast<const T*>(layer.q_norm),
                            p.cos + angle * p.half,
                            p.sin + angle * p.half,
                            p.half,
                            d,
                            p.eps};
      if (i >= context)
        for (int64_t h = 0; h < p.num_heads; ++h)
          norm_rope(raw_q + (i - context) * q_size + h * d, q + (i - context) * q_size + h * d);
      if (row.position < 0 || row.position >= p.capacity) return;
      norm_rope.weight = static_cast<const T*>(layer.k_norm);
      const int64_t sequence = row.sequence * p.num_kv_heads * p.capacity * d;
      append_row(k + i * kv_size, v + i * kv_size, norm_rope, static_cast<T*>(p.k_caches[index]) + sequence,
                 static_cast<T*>(p.v_caches[index]) + sequence, p.num_kv_heads, p.capacity, row.position);
    });
    // The attention's output takes the place of the raw queries.
    void *k_cache = p.k_caches[index], *v_cache = p.v_caches[index];
    const int64_t farthest = p.capacity + p.rows, window = layer.window < farthest ? layer.window : farthest;
    block_attention({q,        k_cache,    v_cache, p.lengths, layer.sinks, raw_q,          p.rows * q_size,
                     q_size,   d,          p.batch, p.rows,    p.num_heads, p.num_kv_heads, d,
                     d,        p.capacity, window,  p.scale,   0.0f,        layer.causal,   p.dtype,
                     p.threads});
    const LinearPart o{layer.o, layer.o_bias, delta, hidden, hidden, 0};
    linear_parts(raw_q, n, q_size, &o, 1, p.dtype, p.threads);
    norm(delta, residual, layer.post_norm, normed, other);
    const LinearPart up[] = {{layer.gate, nullptr, gate_up, p.width, 2 * p.width, 0},
                             {layer.up, nullptr, gate_up + p.width, p.width, 2 * p.width, 0}};
    linear_parts(normed, n, hidden, up, 2, p.dtype, p.threads);
    silu_mul({gate_up, activated, n, p.width, p.dtype, p.threads});
    const LinearPart down{layer.down, nullptr, delta, hidden, hidden, 0};
    linear_parts(activated, n, p.width, &down, 1, p.dtype, p.threads);
    const bool last = index + 1 == p.num_layers;
    T* out = last ? static_cast<T*>(p.out) : normed;
    norm(delta, other, last ? p.norm : p.layers[index + 1].input_norm, out, residual);
    if (layer.tap >= 0) {
      const T* tapped = last ? out : residual;
      T* tap = static_cast<T*>(p.taps) + layer.tap * hidden;
      for (int64_t i = 0; i < n; ++i)
        std::memcpy(tap + i * p.num_taps * hidden, tapped + i * hidden, sizeof(T) * hidden);
    }
  }
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void decoder_layers(const DecoderLayersParams& p) {
  if (p.batch * (p.rows + p.context_rows) == 0) return;  // context rows are appended even without a block
  const auto run = [](const void* params) {
    const DecoderLayersParams& p = *static_cast<const DecoderLayersParams*>(params);
    p.dtype == DType::kFloat32 ? run_layers<float>(p) : run_layers<bf16>(p);
  };
  // Helpers that find nothing to do would only slow down the thread that does all the work.
  int64_t keys = 0;
  for (int64_t b = 0; b < p.batch; ++b) keys += length_of(p, b) + p.rows;
  const bool attention_is_shared = p.num_heads * p.rows * keys * p.head_dim / 8 >= kParallelElements;
  if (attention_is_shared ||
      linear_is_shared(p.batch * (p.rows + p.context_rows), p.hidden_size, 2 * p.width))
    with_team(p.threads, run, &p);
  else
    run(&p);
}

}  // namespace dflash::DFLASH_ISA
