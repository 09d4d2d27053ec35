// Addresses, sizes and (for CUDA) a stream in; a kernel call out. ops.py has checked and allocated
// everything.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "cpu/table.h"
#include "params.h"
#if DFLASH_WITH_CUDA
#include "cuda/launch.h"
#endif

namespace py = pybind11;
using namespace dflash;

namespace {

template <typename T>
T* ptr(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

using Address = uintptr_t;

AcceptPrefixParams accept_prefix_params(Address block_ids, Address posterior, Address stop_token_ids,
                                        Address limits, Address tokens, Address length, Address num_context,
                                        Address done, int64_t batch, int64_t rows, int64_t num_stop_tokens,
                                        int64_t capacity, int device) {
  return {ptr<int64_t>(block_ids),
          ptr<int64_t>(posterior),
          ptr<int64_t>(stop_token_ids),
          ptr<int64_t>(limits),
          ptr<int64_t>(tokens),
          ptr<int64_t>(length),
          ptr<int64_t>(num_context),
          ptr<int64_t>(done),
          batch,
          rows,
          num_stop_tokens,
          capacity,
          device};
}

bool with_cuda() {
#if DFLASH_WITH_CUDA
  return true;
#else
  return false;
#endif
}

// Why this build's CUDA kernels cannot run on the device; empty if they can.
std::string cuda_status([[maybe_unused]] int device) {
#if DFLASH_WITH_CUDA
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no CUDA driver was found";
  cudaRuntimeGetVersion(&runtime);
  if (driver / 1000 < runtime / 1000)
    return "the driver is made for CUDA " + std::to_string(driver / 1000) +
           ", the kernels need one for CUDA " + std::to_string(runtime / 1000);
  const cudaError_t error = probe_kernels(device);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
#else
  return "this build has no CUDA kernels";
#endif
}

#if DFLASH_WITH_CUDA
void throw_on(cudaError_t error, const char* op) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(op) + ": CUDA error: " + cudaGetErrorString(error));
}
#endif

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("isa", [] { return cpu_kernels().isa; });
  m.def("with_cuda", &with_cuda);
  m.def("cuda_status", &cuda_status);

  m.def("rms_norm",
        [](Address x, Address residual, Address weight, Address counts, Address out, Address residual_out,
           int64_t rows, int64_t hidden, int64_t rows_per_sequence, float eps, int dtype, int threads) {
          const RmsNormParams p{ptr<void>(x),
                                ptr<void>(residual),
                                ptr<void>(weight),
                                ptr<int64_t>(counts),
                                ptr<void>(out),
                                ptr<void>(residual_out),
                                rows,
                                hidden,
                                rows_per_sequence,
                                eps,
                                DType(dtype),
                                threads};
          py::gil_scoped_release release;
          cpu_kernels().rms_norm(p);
        });

  m.def("silu_mul", [](Address gate_up, Address out, int64_t rows, int64_t width, int dtype, int threads) {
    const SiluMulParams p{ptr<void>(gate_up), ptr<void>(out), rows, width, DType(dtype), threads};
    py::gil_scoped_release release;
    cpu_kernels().silu_mul(p);
  });

  m.def("qkv_norm_rope_append",
        [](Address qkv, Address positions, Address cos, Address sin, Address q_norm_weight,
           Address k_norm_weight, Address q_out, Address k_cache, Address v_cache, int64_t batch,
           int64_t rows, int64_t q_rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
           int64_t half, int64_t capacity, float eps, int dtype, int threads) {
          const QkvNormRopeAppendParams p{ptr<void>(qkv),
                                          ptr<int64_t>(positions),
                                          ptr<float>(cos),
                                          ptr<float>(sin),
                                          ptr<void>(q_norm_weight),
                                          ptr<void>(k_norm_weight),
                                          ptr<void>(q_out),
                                          ptr<void>(k_cache),
                                          ptr<void>(v_cache),
                                          batch,
                                          rows,
                                          q_rows,
                                          num_heads,
                                          num_kv_heads,
                                          head_dim,
                                          half,
                                          capacity,
                                          eps,
                                          DType(dtype),
                                          threads};
          py::gil_scoped_release release;
          cpu_kernels().qkv_norm_rope_append(p);
        });

  m.def("append_context_kv",
        [](Address kv, Address positions, Address cos, Address sin, Address k_norm_weight,
           const std::vector<Address>& k_caches, const std::vector<Address>& v_caches, int64_t batch,
           int64_t rows, int64_t num_kv_heads, int64_t head_dim, int64_t half, int64_t capacity, float eps,
           int dtype, int threads) {
          const AppendContextKvParams p{ptr<void>(kv),
                                        ptr<int64_t>(positions),
                                        ptr<float>(cos),
                                        ptr<float>(sin),
                                        ptr<void>(k_norm_weight),
                                        reinterpret_cast<void* const*>(k_caches.data()),
                                        reinterpret_cast<void* const*>(v_caches.data()),
                                        int64_t(k_caches.size()),
                                        batch,
                                        rows,
                                        num_kv_heads,
                                        head_dim,
                                        half,
                                        capacity,
                                        eps,
                                        DType(dtype),
                                        threads};
          py::gil_scoped_release release;
          cpu_kernels().append_context_kv(p);
        });

  m.def("append_kv", [](Address key, Address value, Address positions, Address k_cache, Address v_cache,
                        std::array<int64_t, 3> k_strides, std::array<int64_t, 3> v_strides, int64_t batch,
                        int64_t rows, int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim,
                        int64_t capacity, int dtype, int threads) {
    const AppendKvParams p{ptr<void>(key),
                           ptr<void>(value),
                           ptr<int64_t>(positions),
                           ptr<void>(k_cache),
                           ptr<void>(v_cache),
                           k_strides[0],
                           k_strides[1],
                           k_strides[2],
                           v_strides[0],
                           v_strides[1],
                           v_strides[2],
                           batch,
                           rows,
                           num_kv_heads,
                           head_dim,
                           v_head_dim,
                           capacity,
                           DType(dtype),
                           threads};
    py::gil_scoped_release release;
    cpu_kernels().append_kv(p);
  });

  m.def("block_attention",
        [](Address q, Address k_cache, Address v_cache, Address lengths, Address sinks, Address out,
           std::array<int64_t, 3> q_strides, int64_t batch, int64_t rows, int64_t num_heads,
           int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim, int64_t capacity, int64_t window,
           float scale, float softcap, bool causal, int dtype, int threads) {
          const BlockAttentionParams p{ptr<void>(q),
                                       ptr<void>(k_cache),
                                       ptr<void>(v_cache),
                                       ptr<int64_t>(lengths),
                                       ptr<float>(sinks),
                                       ptr<void>(out),
                                       q_strides[0],
                                       q_strides[1],
                                       q_strides[2],
                                       batch,
                                       rows,
                                       num_heads,
                                       num_kv_heads,
                                       head_dim,
                                       v_head_dim,
                                       capacity,
                                       window,
                                       scale,
                                       softcap,
                                       causal,
                                       DType(dtype),
                                       threads};
          py::gil_scoped_release release;
          cpu_kernels().block_attention(p);
        });

  m.def("select_tokens", [](Address logits, Address positions, Address seeds, Address temperature,
                            Address top_k, Address top_p, Address min_p, Address sharpness, Address ids,
                            int64_t batch, int64_t rows, int64_t vocab, int dtype, int threads) {
    const SelectTokensParams p{ptr<void>(logits),
                               ptr<int64_t>(positions),
                               ptr<int64_t>(seeds),
                               ptr<float>(temperature),
                               ptr<int64_t>(top_k),
                               ptr<float>(top_p),
                               ptr<float>(min_p),
                               ptr<float>(sharpness),
                               ptr<int64_t>(ids),
                               batch,
                               rows,
                               vocab,
                               DType(dtype),
                               threads};
    py::gil_scoped_release release;
    cpu_kernels().select_tokens(p);
  });

  m.def("accept_prefix", [](Address block_ids, Address posterior, Address stop_token_ids, Address limits,
                            Address tokens, Address length, Address num_context, Address done, int64_t batch,
                            int64_t rows, int64_t num_stop_tokens, int64_t capacity) {
    const AcceptPrefixParams p =
        accept_prefix_params(block_ids, posterior, stop_token_ids, limits, tokens, length, num_context, done,
                             batch, rows, num_stop_tokens, capacity, -1);
    py::gil_scoped_release release;
    cpu_kernels().accept_prefix(p);
  });

  m.def("linear", [](Address x, Address weight, Address bias, Address out, int64_t rows, int64_t in,
                     int64_t out_features, int dtype, int threads) {
    const LinearParams p{ptr<void>(x), ptr<void>(weight), ptr<void>(bias), ptr<void>(out), rows,
                         in,           out_features,      DType(dtype),    threads};
    py::gil_scoped_release release;
    cpu_kernels().linear(p);
  });

  // layers: per layer the fields of DecoderLayer in their order, as one flat list.
  m.def("decoder_layers",
        [](const std::vector<int64_t>& layers, Address hidden, Address context, Address num_context,
           Address lengths, Address cos, Address sin, Address norm, Address out, Address taps,
           std::array<int64_t, 13> sizes, float scale, float eps, int dtype, int threads) {
          static_assert(sizeof(DecoderLayer) == 21 * sizeof(int64_t), "one word a field");
          const auto [batch, rows, context_rows, hidden_size, width, num_heads, num_kv_heads, head_dim, half,
                      positions, capacity, num_taps, num_layers] = sizes;
          const DecoderLayersParams p{reinterpret_cast<const DecoderLayer*>(layers.data()),
                                      ptr<void>(hidden),
                                      ptr<void>(context),
                                      ptr<int64_t>(num_context),
                                      ptr<int64_t>(lengths),
                                      ptr<float>(cos),
                                      ptr<float>(sin),
                                      ptr<void>(norm),
                                      ptr<void>(out),
                                      ptr<void>(taps),
                                      num_layers,
                                      batch,
                                      rows,
                                      context_rows,
                                      hidden_size,
                                      width,
                                      num_heads,
                                      num_kv_heads,
                                      head_dim,
                                      half,
                                      positions,
                                      capacity,
                                      num_taps,
                                      scale,
                                      eps,
                                      DType(dtype),
                                      threads};
          py::gil_scoped_release release;
          cpu_kernels().decoder_layers(p);
        });

#if DFLASH_WITH_CUDA
  m.def("accept_prefix_cuda",
        [](Address block_ids, Address posterior, Address stop_token_ids, Address limits, Address tokens,
           Address length, Address num_context, Address done, int64_t batch, int64_t rows,
           int64_t num_stop_tokens, int64_t capacity, int device, Address stream) {
          const AcceptPrefixParams p =
              accept_prefix_params(block_ids, posterior, stop_token_ids, limits, tokens, length, num_context,
                                   done, batch, rows, num_stop_tokens, capacity, device);
          py::gil_scoped_release release;
          throw_on(launch_accept_prefix(p, reinterpret_cast<cudaStream_t>(stream)), "accept_prefix_");
        });
#endif
}
