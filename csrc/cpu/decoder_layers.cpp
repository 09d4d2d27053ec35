// The pre-norm decoder layer, for every layer in turn, and the final norm:
//   n = rms_norm(h); h += mixer(n); m = rms_norm(h); h += (silu(m W_gate) * (m W_up)) W_down
// What a sublayer adds may go through a norm of its own, and the gate may be GELU (Gemma 3).
// The mixer is attention, which may have an output gate, or a Gated DeltaNet (arXiv 2412.06464). A sublayer f (mixer or
// MLP) may have convolutions over the block's rows in front of it and after it: d = n P; h += conv(f(conv(n, d)), d)
//
// Composes the other kernels over buffers that stay in the cache of one core: a small model's forward pass is one call.
// The live context rows come before the block's in the buffer that k and v are projected from; each layer overwrites
// the block's rows and finds the context's as they were.
#include <algorithm>

#include "cpu/attention/norm_rope.h"
#include "cpu/base/parallel.h"
#include "cpu/linear/linear.h"
#include "cpu/tree/tree.h"

DFLASH_NAMESPACE_BEGIN

struct Row {
  int64_t sequence, slot, position;
};

// Cuts arrays out of one piece of memory: once to learn its size, once to hand them out.
template <typename T>
class Arrays {
 public:
  T* take(int64_t count) {
    T* array = memory_ ? memory_ + total_ : nullptr;
    total_ += (count + 63) / 64 * 64;
    return array;
  }
  template <typename Take>
  void allocate(Buffer<T>& buffer, const Take& take_all) {
    take_all();
    memory_ = buffer.reserve(total_);
    total_ = 0;
    take_all();
  }

 private:
  T* memory_ = nullptr;
  int64_t total_ = 0;
};

// One call: its rows, and the arrays that pass from kernel to kernel.
template <typename T>
class Pass {
 public:
  explicit Pass(const DecoderLayersParams& params) : p(params) {}

  void run() {
    find_rows();
    allocate();
    copy_inputs();
    norm(residual, nullptr, p.layers[0].input_norm, input_of(p.layers[0].attention_conv), nullptr);
    int64_t num_attention = 0, num_recurrent = 0;
    for (int64_t index = 0; index < p.num_layers; ++index) {
      const DecoderLayer& layer = p.layers[index];
      convolve(layer.attention_conv);
      if (layer.delta_net.qkv.values)
        run_delta_net(layer.delta_net, num_recurrent++);
      else
        run_attention(layer.attention, num_attention++);
      norm_output(layer.attention_out_norm);
      add_norm(layer.attention_conv, residual, layer.post_norm, input_of(layer.mlp_conv), other);
      convolve(layer.mlp_conv);
      run_mlp(layer);
      norm_output(layer.mlp_out_norm);
      const bool last = index + 1 == p.num_layers;
      T* out = last ? static_cast<T*>(p.out) : input_of(p.layers[index + 1].attention_conv);
      add_norm(layer.mlp_conv, other, last ? p.norm : p.layers[index + 1].input_norm, out, residual);
      if (layer.tap >= 0) copy_tap(layer.tap, last ? out : residual);
    }
  }

 private:
  const DecoderLayersParams& p;
  const int64_t d = p.head_dim, n = p.batch * p.rows, hidden = p.hidden_size;
  const int64_t q_size = p.num_heads * d, kv_size = p.num_kv_heads * d;
  const int64_t key_size = p.key_heads * p.key_dim, value_size = p.delta_heads * p.value_dim;
  const int64_t channels = 2 * key_size + value_size;
  int64_t context = 0;                       // live context rows
  int64_t* sequences = nullptr;              // [batch], places in the caches
  Row* rows = nullptr;                       // [context + n]
  T *x, *normed, *residual, *other, *delta;  // [context + n, hidden], then [n, hidden]
  T *plain, *dynamic;                        // [n, hidden], [n, 2, width, groups] of convolutions
  T *raw_q, *attended, *q, *k, *v;           // [n, q_size], twice that for raw_q; [context + n, kv_size]
  T *gate_up, *activated;                    // [n, 2 * width], [n, width]
  T *mixed, *convolved, *z, *b, *a, *gated;  // [n, channels], [n, value_size], [n, delta_heads]
  float *delta_q, *delta_k, *delta_v, *log_decay, *beta, *read;  // as GatedRecurrenceParams has them

  int64_t live(int64_t sequence) const { return p.context ? clamped(p.num_context[sequence], p.context_rows) : 0; }

  int64_t origin(int64_t sequence) const { return p.origin ? clamped(p.origin[sequence], p.positions) : 0; }

  // The live context rows, then the block's.
  void find_rows() {
    static thread_local Buffer<Row> buffer;
    static thread_local Buffer<int64_t> places;
    rows = buffer.reserve(p.batch * (p.context_rows + p.rows));
    sequences = places.reserve(p.batch);
    for (int64_t s = 0; s < p.batch; ++s) sequences[s] = p.sequences ? clamped(p.sequences[s], p.held - 1) : s;
    for (int64_t s = 0; s < p.batch; ++s)
      for (int64_t i = 0; i < live(s); ++i) {
        const int64_t slot = length_of(p, s) - live(s) + i;
        rows[context++] = {sequences[s], slot, origin(s) + slot};
      }
    for (int64_t i = 0; i < n; ++i) {
      const int64_t s = i / p.rows, row = i % p.rows, slot = length_of(p, s) + row;
      const int64_t depth = p.ancestors ? depth_of(p.ancestors, p.rows, i) : row;
      rows[context + i] = {sequences[s], slot, origin(s) + slot - row + depth};
    }
  }

  void allocate() {
    static thread_local Buffer<T> buffer;
    static thread_local Buffer<float> wide_buffer;
    bool is_gated = false;
    int64_t kernels = 0;  // the most that a convolution has for a row
    for (int64_t i = 0; i < p.num_layers; ++i) {
      is_gated |= p.layers[i].attention.gated;
      for (const BlockConvWeights& w : {p.layers[i].attention_conv, p.layers[i].mlp_conv})
        kernels = std::max(kernels, 2 * w.width * w.groups);
    }
    const int64_t all = context + n;
    Arrays<T> arrays;
    arrays.allocate(buffer, [&] {
      x = arrays.take(all * hidden), residual = arrays.take(n * hidden), other = arrays.take(n * hidden);
      plain = arrays.take(kernels ? n * hidden : 0), dynamic = arrays.take(n * kernels);
      delta = arrays.take(n * hidden), raw_q = arrays.take(n * q_size * (is_gated ? 2 : 1));
      attended = arrays.take(is_gated ? n * q_size : 0), q = arrays.take(n * q_size);
      k = arrays.take(all * kv_size), v = arrays.take(all * kv_size);
      gate_up = arrays.take(n * 2 * p.width), activated = arrays.take(n * p.width);
      mixed = arrays.take(n * channels), convolved = arrays.take(n * channels);
      z = arrays.take(n * value_size), gated = arrays.take(n * value_size);
      b = arrays.take(n * p.delta_heads), a = arrays.take(n * p.delta_heads);
    });
    Arrays<float> wide;
    wide.allocate(wide_buffer, [&] {
      delta_q = wide.take(n * key_size), delta_k = wide.take(n * key_size);
      delta_v = wide.take(n * value_size), read = wide.take(n * value_size);
      log_decay = wide.take(n * p.delta_heads), beta = wide.take(n * p.delta_heads);
    });
    normed = x + context * hidden;
  }

  void copy_inputs() {
    const T* source = static_cast<const T*>(p.context);
    T* to = x;
    for (int64_t s = 0; p.context && s < p.batch; ++s, source += p.context_rows * hidden) {
      std::memcpy(to, source, sizeof(T) * live(s) * hidden);
      to += live(s) * hidden;
    }
    std::memcpy(residual, p.hidden, sizeof(T) * n * hidden);
  }

  void norm(const T* in, const T* add, const void* weight, T* out, T* sum) const {
    rms_norm(
        {in, add, weight, nullptr, out, sum, n, hidden, n, p.eps, p.dtype, p.threads, 0, nullptr, 0, p.zero_centered});
  }

  void norm_output(const void* weight) const {
    if (weight) norm(delta, nullptr, weight, delta, nullptr);
  }

  // Where a norm in front of a sublayer goes: to `normed`, by way of the convolution if there is one.
  T* input_of(const BlockConvWeights& w) const { return w.base ? plain : normed; }

  // plain -> normed, dynamic
  void convolve(const BlockConvWeights& w) const {
    if (!w.base) return;
    const int64_t kernels = 2 * w.width * w.groups;
    const LinearPart project{{w.projection, nullptr, Format::kDense}, nullptr, dynamic, kernels, kernels, 0};
    linear_parts(plain, n, hidden, &project, 1, p.dtype, p.threads);
    dynamic_conv({plain, w.base, dynamic, normed, p.rows * kernels, kernels, n, p.rows, hidden, w.width, w.groups,
                  p.dtype, p.threads});
  }

  // Adds `delta` to a residual, convolved if the sublayer has convolutions.
  void add_norm(const BlockConvWeights& w, const T* add, const void* weight, T* out, T* sum) const {
    if (!w.base) return norm(delta, add, weight, out, sum);
    const int64_t side = w.width * w.groups, row = 2 * side;
    const T *base = static_cast<const T*>(w.base) + w.width * hidden, *kernels = dynamic + side;
    conv_add_rms_norm({delta, base, kernels, add,    weight,  out,      sum,   nullptr,         0,       p.rows * row,
                       row,   n,    p.rows,  hidden, w.width, w.groups, p.eps, p.zero_centered, p.dtype, p.threads});
  }

  // normed -> delta
  void run_attention(const AttentionWeights& w, int64_t index) const {
    const int64_t all = context + n, q_stride = w.gated ? 2 * d : d, raw_size = p.num_heads * q_stride;
    const LinearPart qkv[] = {{w.q, w.q_bias, raw_q, raw_size, raw_size, context},
                              {w.k, w.k_bias, k, kv_size, kv_size, 0},
                              {w.v, w.v_bias, v, kv_size, kv_size, 0}};
    const int skipped = n == 0;  // without a block nothing has a query
    linear_parts(x, all, hidden, qkv + skipped, 3 - skipped, p.dtype, p.threads);
    void *k_cache = p.k_caches[index], *v_cache = p.v_caches[index];
    parallel_for(all, all * (q_size + 2 * kv_size), p.threads, [&](int64_t i) {
      const Row row = rows[i];
      const int64_t angle = clamped(row.position, p.positions - 1);
      NormRope<T> norm_rope(p, w.q_norm, angle, p.zero_centered);
      if (w.window && p.local_cos)
        norm_rope.cos = p.local_cos + angle * p.half, norm_rope.sin = p.local_sin + angle * p.half;
      if (i >= context)
        for (int64_t h = 0; h < p.num_heads; ++h)
          norm_rope(raw_q + (i - context) * raw_size + h * q_stride, q + (i - context) * q_size + h * d);
      norm_rope.weight = static_cast<const T*>(w.k_norm);
      append_row(p, k + i * kv_size, v + i * kv_size, norm_rope, k_cache, v_cache, row.sequence, row.slot);
    });
    T* out = w.gated ? attended : raw_q;  // without gates it takes the place of the raw queries
    const int64_t window = least(w.window, p.capacity + p.rows);
    BlockAttentionParams attention{
        q,       k_cache,  v_cache,     p.lengths,      w.sinks, out, p.rows * q_size, q_size, d,
        p.batch, p.rows,   p.num_heads, p.num_kv_heads, d,       d,   p.capacity,      window, p.scale,
        0.0f,    w.causal, p.dtype,     p.threads};
    attention.ancestors = p.ancestors;
    attention.sequences = sequences;
    block_attention(attention);
    if (w.gated) sigmoid_mul({out, raw_q + d, out, raw_size, q_stride, n, p.num_heads, d, p.dtype, p.threads});
    const LinearPart o{w.o, w.o_bias, delta, hidden, hidden, 0};
    linear_parts(out, n, q_size, &o, 1, p.dtype, p.threads);
  }

  // normed -> mixed [q heads, k heads, v heads], z, b and a
  void project_delta_net(const DeltaNetWeights& w) const {
    static thread_local Buffer<LinearPart> buffer;
    LinearPart* parts = buffer.reserve(6 * p.key_heads + 4);
    int count = 0;
    const auto project = [&](LinearWeight& weight, T* to, int64_t features, int64_t stride) {
      if (features) parts[count++] = {weight, nullptr, to, features, stride, 0};
      weight.values = static_cast<const T*>(weight.values) + features * hidden;
    };
    const int64_t served = p.delta_heads / p.key_heads, values = served * p.value_dim;
    LinearWeight qkv = w.qkv, bs = w.b;
    const bool together = w.z.values && w.a.values;
    if (together) {
      LinearWeight zs = w.z, as = w.a;
      project(qkv, mixed, channels, channels);
      project(zs, z, value_size, value_size);
      project(bs, b, p.delta_heads, p.delta_heads);
      project(as, a, p.delta_heads, p.delta_heads);
    }
    for (int64_t h = 0; !together && h < p.key_heads; ++h) {
      project(qkv, mixed + h * p.key_dim, p.key_dim, channels);
      project(qkv, mixed + key_size + h * p.key_dim, p.key_dim, channels);
      project(qkv, mixed + 2 * key_size + h * values, values, channels);
      project(qkv, z + h * values, values, value_size);
      project(bs, b + h * served, served, p.delta_heads);
      project(bs, a + h * served, served, p.delta_heads);
    }
    linear_parts(normed, n, hidden, parts, count, p.dtype, p.threads);
  }

  // normed -> delta
  void run_delta_net(const DeltaNetWeights& w, int64_t index) const {
    project_delta_net(w);
    causal_conv({mixed, w.conv, nullptr, p.windows[index], p.pending, p.keep, convolved, p.rows * channels, channels,
                 p.batch, p.rows, channels, p.conv_width, p.block, true, p.dtype, p.threads});
    delta_net_inputs({convolved, b, a, w.a_log, w.dt_bias, delta_q, delta_k, delta_v, log_decay, beta, p.delta_heads,
                      p.delta_heads, n, p.key_heads, p.delta_heads, p.key_dim, p.value_dim, p.dtype, p.threads});
    gated_recurrence(
        {delta_q,          delta_k,          delta_v,   log_decay,   beta, p.states[index], p.saved_k[index],
         p.saved_d[index], p.saved_a[index], p.pending, p.keep,      read, p.batch,         p.rows,
         p.key_heads,      p.delta_heads,    p.key_dim, p.value_dim, 1,    p.block,         p.threads});
    gated_rms_norm({read, z, w.norm, gated, value_size, n, p.delta_heads, p.value_dim, p.eps, p.dtype, p.threads});
    const LinearPart out{w.out, nullptr, delta, hidden, hidden, 0};
    linear_parts(gated, n, value_size, &out, 1, p.dtype, p.threads);
  }

  // normed -> delta
  void run_mlp(const DecoderLayer& layer) const {
    const LinearPart up[] = {{layer.gate, nullptr, gate_up, p.width, 2 * p.width, 0},
                             {layer.up, nullptr, gate_up + p.width, p.width, 2 * p.width, 0}};
    linear_parts(normed, n, hidden, up, 2, p.dtype, p.threads);
    silu_mul({gate_up, activated, n, p.width, layer.gate_kind, p.dtype, p.threads});
    const LinearPart down{layer.down, nullptr, delta, hidden, hidden, 0};
    linear_parts(activated, n, p.width, &down, 1, p.dtype, p.threads);
  }

  void copy_tap(int64_t index, const T* tapped) const {
    T* tap = static_cast<T*>(p.taps) + index * hidden;
    for (int64_t i = 0; i < n; ++i) std::memcpy(tap + i * p.num_taps * hidden, tapped + i * hidden, sizeof(T) * hidden);
  }
};

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::decoder_layers(const DecoderLayersParams& p) {
  if (p.batch * (p.rows + p.context_rows) == 0) return;  // context rows are appended even without a block
  const auto run = [](const void* params) {
    const DecoderLayersParams& p = *static_cast<const DecoderLayersParams*>(params);
    p.dtype == DType::kFloat32 ? Pass<float>(p).run() : Pass<bf16>(p).run();
  };
  // Helpers that find nothing to do would only slow down the thread that does all the work.
  int64_t keys = 0;
  for (int64_t b = 0; b < p.batch; ++b) keys += length_of(p, b) + p.rows;
  const bool attention_is_shared = p.num_heads * p.rows * keys * p.head_dim / 8 >= kParallelElements;
  const bool recurrence_is_shared = p.batch * p.rows * p.delta_heads * p.key_dim * p.value_dim >= kParallelElements;
  if (attention_is_shared || recurrence_is_shared ||
      linear_is_shared(p.batch * (p.rows + p.context_rows), p.hidden_size, 2 * p.width))
    with_team(p.threads, run, &p);
  else
    run(&p);
}
