// What Python hands over, addresses and sizes, packed into the ops' parameters; and the two ways to bind an
// op: on the CPU it takes a number of threads last, on CUDA a device and a stream. ops.py has checked and
// allocated everything.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <vector>

#include "params.h"

namespace dflash {

using Address = uintptr_t;

template <typename T>
T* ptr(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline RmsNormParams pack_rms_norm(Address x, Address residual, Address weight, Address counts, Address out,
                                   Address residual_out, Address tap, int64_t tap_stride, int64_t rows,
                                   int64_t hidden, int64_t rows_per_sequence, float eps, int dtype) {
  RmsNormParams p{};
  p.x = ptr<void>(x);
  p.residual = ptr<void>(residual);
  p.weight = ptr<void>(weight);
  p.counts = ptr<int64_t>(counts);
  p.out = ptr<void>(out);
  p.residual_out = ptr<void>(residual_out);
  p.tap = ptr<void>(tap);
  p.tap_stride = tap_stride;
  p.rows = rows;
  p.hidden = hidden;
  p.rows_per_sequence = rows_per_sequence;
  p.eps = eps;
  p.dtype = DType(dtype);
  return p;
}

inline SiluMulParams pack_silu_mul(Address gate_up, Address out, int64_t rows, int64_t width, int dtype) {
  SiluMulParams p{};
  p.gate_up = ptr<void>(gate_up);
  p.out = ptr<void>(out);
  p.rows = rows;
  p.width = width;
  p.dtype = DType(dtype);
  return p;
}

inline QkvNormRopeAppendParams pack_qkv_norm_rope_append(Address qkv, Address positions, Address cos,
                                                         Address sin, Address q_norm_weight,
                                                         Address k_norm_weight, Address q_out,
                                                         Address k_cache, Address v_cache, int64_t batch,
                                                         int64_t rows, int64_t q_rows, int64_t num_heads,
                                                         int64_t num_kv_heads, int64_t head_dim, int64_t half,
                                                         int64_t capacity, float eps, int dtype) {
  QkvNormRopeAppendParams p{};
  p.qkv = ptr<void>(qkv);
  p.positions = ptr<int64_t>(positions);
  p.cos = ptr<float>(cos);
  p.sin = ptr<float>(sin);
  p.q_norm_weight = ptr<void>(q_norm_weight);
  p.k_norm_weight = ptr<void>(k_norm_weight);
  p.q_out = ptr<void>(q_out);
  p.k_cache = ptr<void>(k_cache);
  p.v_cache = ptr<void>(v_cache);
  p.batch = batch;
  p.rows = rows;
  p.q_rows = q_rows;
  p.num_heads = num_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_dim = head_dim;
  p.half = half;
  p.capacity = capacity;
  p.eps = eps;
  p.dtype = DType(dtype);
  return p;
}

// The result points into k_caches and v_caches.
inline AppendContextKvParams pack_append_context_kv(Address kv, Address positions, Address cos, Address sin,
                                                    Address k_norm_weight,
                                                    const std::vector<Address>& k_caches,
                                                    const std::vector<Address>& v_caches, int64_t batch,
                                                    int64_t rows, int64_t num_kv_heads, int64_t head_dim,
                                                    int64_t half, int64_t capacity, float eps, int dtype) {
  AppendContextKvParams p{};
  p.kv = ptr<void>(kv);
  p.positions = ptr<int64_t>(positions);
  p.cos = ptr<float>(cos);
  p.sin = ptr<float>(sin);
  p.k_norm_weight = ptr<void>(k_norm_weight);
  p.k_caches = reinterpret_cast<void* const*>(k_caches.data());
  p.v_caches = reinterpret_cast<void* const*>(v_caches.data());
  p.num_layers = int64_t(k_caches.size());
  p.batch = batch;
  p.rows = rows;
  p.num_kv_heads = num_kv_heads;
  p.head_dim = head_dim;
  p.half = half;
  p.capacity = capacity;
  p.eps = eps;
  p.dtype = DType(dtype);
  return p;
}

inline AppendKvParams pack_append_kv(Address key, Address value, Address positions, Address k_cache,
                                     Address v_cache, const std::array<int64_t, 3>& k_strides,
                                     const std::array<int64_t, 3>& v_strides, int64_t batch, int64_t rows,
                                     int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim,
                                     int64_t capacity, int dtype) {
  AppendKvParams p{};
  p.key = ptr<void>(key);
  p.value = ptr<void>(value);
  p.positions = ptr<int64_t>(positions);
  p.k_cache = ptr<void>(k_cache);
  p.v_cache = ptr<void>(v_cache);
  p.k_stride_batch = k_strides[0];
  p.k_stride_head = k_strides[1];
  p.k_stride_row = k_strides[2];
  p.v_stride_batch = v_strides[0];
  p.v_stride_head = v_strides[1];
  p.v_stride_row = v_strides[2];
  p.batch = batch;
  p.rows = rows;
  p.num_kv_heads = num_kv_heads;
  p.head_dim = head_dim;
  p.v_head_dim = v_head_dim;
  p.capacity = capacity;
  p.dtype = DType(dtype);
  return p;
}

inline BlockAttentionParams pack_block_attention(Address q, Address k_cache, Address v_cache, Address lengths,
                                                 Address sinks, Address out,
                                                 const std::array<int64_t, 3>& q_strides, int64_t batch,
                                                 int64_t rows, int64_t num_heads, int64_t num_kv_heads,
                                                 int64_t head_dim, int64_t v_head_dim, int64_t capacity,
                                                 int64_t window, float scale, float softcap, bool causal,
                                                 Address ancestors, Address workspace, Address counters,
                                                 int64_t splits, int dtype) {
  BlockAttentionParams p{};
  p.q = ptr<void>(q);
  p.k_cache = ptr<void>(k_cache);
  p.v_cache = ptr<void>(v_cache);
  p.lengths = ptr<int64_t>(lengths);
  p.sinks = ptr<float>(sinks);
  p.out = ptr<void>(out);
  p.q_stride_batch = q_strides[0];
  p.q_stride_row = q_strides[1];
  p.q_stride_head = q_strides[2];
  p.batch = batch;
  p.rows = rows;
  p.num_heads = num_heads;
  p.num_kv_heads = num_kv_heads;
  p.head_dim = head_dim;
  p.v_head_dim = v_head_dim;
  p.capacity = capacity;
  p.window = window;
  p.scale = scale;
  p.softcap = softcap;
  p.causal = causal;
  p.dtype = DType(dtype);
  p.ancestors = ptr<int64_t>(ancestors);
  p.workspace = ptr<float>(workspace);
  p.counters = ptr<unsigned>(counters);
  p.splits = splits;
  return p;
}

inline SelectTokensParams pack_select_tokens(Address logits, Address positions, Address seeds,
                                             Address temperature, Address top_k, Address top_p, Address min_p,
                                             Address sharpness, Address ids, Address partial, int64_t batch,
                                             int64_t rows, int64_t vocab, int dtype) {
  SelectTokensParams p{};
  p.logits = ptr<void>(logits);
  p.positions = ptr<int64_t>(positions);
  p.seeds = ptr<int64_t>(seeds);
  p.temperature = ptr<float>(temperature);
  p.top_k = ptr<int64_t>(top_k);
  p.top_p = ptr<float>(top_p);
  p.min_p = ptr<float>(min_p);
  p.sharpness = ptr<float>(sharpness);
  p.ids = ptr<int64_t>(ids);
  p.partial = ptr<void>(partial);
  p.batch = batch;
  p.rows = rows;
  p.vocab = vocab;
  p.dtype = DType(dtype);
  return p;
}

inline AcceptPrefixParams pack_accept_prefix(Address block_ids, Address posterior, Address stop_token_ids,
                                             Address limits, Address tokens, Address length,
                                             Address num_context, Address done, int64_t batch, int64_t rows,
                                             int64_t num_stop_tokens, int64_t capacity) {
  AcceptPrefixParams p{};
  p.block_ids = ptr<int64_t>(block_ids);
  p.posterior = ptr<int64_t>(posterior);
  p.stop_token_ids = ptr<int64_t>(stop_token_ids);
  p.limits = ptr<int64_t>(limits);
  p.tokens = ptr<int64_t>(tokens);
  p.length = ptr<int64_t>(length);
  p.num_context = ptr<int64_t>(num_context);
  p.done = ptr<int64_t>(done);
  p.batch = batch;
  p.rows = rows;
  p.num_stop_tokens = num_stop_tokens;
  p.capacity = capacity;
  return p;
}

// weights: for each the addresses of weight and bias and its features, as one flat list.
inline LinearParams pack_linear(Address x, const std::vector<int64_t>& weights, Address out, int64_t rows,
                                int64_t in, Address workspace, Address counters, int64_t splits,
                                bool prefetch, int dtype) {
  LinearParams p{};
  p.x = ptr<void>(x);
  p.num_weights = int(weights.size() / 3);
  for (int i = 0; i < p.num_weights; ++i) {
    p.weights[i] = ptr<void>(weights[3 * i]);
    p.biases[i] = ptr<void>(weights[3 * i + 1]);
    p.features[i] = weights[3 * i + 2];
    p.out_features += p.features[i];
  }
  p.out = ptr<void>(out);
  p.rows = rows;
  p.in = in;
  p.dtype = DType(dtype);
  p.workspace = ptr<float>(workspace);
  p.counters = ptr<unsigned>(counters);
  p.splits = splits;
  p.prefetch = prefetch;
  return p;
}

// layers: per layer the fields of DecoderLayer in their order, as one flat list; the result points into it.
inline DecoderLayersParams pack_decoder_layers(const std::vector<int64_t>& layers, Address hidden,
                                               Address context, Address num_context, Address lengths,
                                               Address cos, Address sin, Address norm, Address out,
                                               Address taps, const std::array<int64_t, 13>& sizes,
                                               float scale, float eps, int dtype) {
  static_assert(sizeof(DecoderLayer) == 21 * sizeof(int64_t), "one word a field");
  DecoderLayersParams p{};
  p.layers = reinterpret_cast<const DecoderLayer*>(layers.data());
  p.hidden = ptr<void>(hidden);
  p.context = ptr<void>(context);
  p.num_context = ptr<int64_t>(num_context);
  p.lengths = ptr<int64_t>(lengths);
  p.cos = ptr<float>(cos);
  p.sin = ptr<float>(sin);
  p.norm = ptr<void>(norm);
  p.out = ptr<void>(out);
  p.taps = ptr<void>(taps);
  p.batch = sizes[0];
  p.rows = sizes[1];
  p.context_rows = sizes[2];
  p.hidden_size = sizes[3];
  p.width = sizes[4];
  p.num_heads = sizes[5];
  p.num_kv_heads = sizes[6];
  p.head_dim = sizes[7];
  p.half = sizes[8];
  p.positions = sizes[9];
  p.capacity = sizes[10];
  p.num_taps = sizes[11];
  p.num_layers = sizes[12];
  p.scale = scale;
  p.eps = eps;
  p.dtype = DType(dtype);
  return p;
}

// module.name(what pack takes, threads) calls run(params).
template <typename Params, typename... Arguments, typename Run>
void bind_cpu(pybind11::module_& m, const char* name, Params (*pack)(Arguments...), Run run) {
  m.def(name, [pack, run](Arguments... arguments, int threads) {
    Params p = pack(arguments...);
    p.threads = threads;
    pybind11::gil_scoped_release release;
    run(p);
  });
}

// module.name(what pack takes, device, stream) calls launch(params, stream).
template <typename Params, typename... Arguments, typename Launch>
void bind_cuda(pybind11::module_& m, const char* name, Params (*pack)(Arguments...), Launch launch) {
  m.def(name, [pack, launch](Arguments... arguments, int device, Address stream) {
    Params p = pack(arguments...);
    p.device = device;
    pybind11::gil_scoped_release release;
    launch(p, stream);
  });
}

}  // namespace dflash
