// The CUDA kernels as functions of a module: NAME_cuda(the wire's arguments, device, stream), and
// NAME_workspace(shapes).
#pragma once
#include <stdexcept>
#include <string>

#include "cuda/base/launch.h"
#include "binding/pack.h"

namespace dflash {

inline void bind_cuda_kernels(pybind11::module_& m) {
  const auto bind = [&m](const char* name, auto fields, auto launch) {
    const std::string op = name;
    bind_cuda(m, (op + "_cuda").c_str(), fields, [op, launch](const auto& params, Address stream) {
      const cudaError_t error = launch(params, ptr<CUstream_st>(stream));
      if (error != cudaSuccess) throw std::runtime_error(op + ": CUDA error: " + cudaGetErrorString(error));
    });
  };
#define KERNEL(name, Params) bind(#name, Params::wire(), launch_##name);
#include "binding/kernels.def"

  using Const = Pointer<const void>;
  const auto answer = [](Workspace w) { return std::pair(w.splits, w.bytes); };
  m.attr("NUM_COUNTERS") = kNumCounters;
  m.def("aligned", [](Const address, const std::vector<int64_t>& strides) {
    bool aligned = uintptr_t(address.value) % 16 == 0;
    for (int64_t bytes : strides) aligned &= bytes % 16 == 0;
    return aligned;
  });
  m.def("block_attention_workspace",
        [answer](int dtype, Const k_cache, Const v_cache, int64_t batch, int64_t rows, int64_t num_heads,
                 int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim, int64_t capacity) {
          return answer(block_attention_workspace(DType(dtype), k_cache.value, v_cache.value, batch, rows,
                                                  num_heads, num_kv_heads, head_dim, v_head_dim, capacity));
        });
  m.def("linear_workspace", [answer](int dtype, int64_t rows, int64_t in, const std::vector<Const>& weights,
                                     const std::vector<int64_t>& features, bool gated) {
    const void* const* addresses = nullptr;
    Wire<const void* const*>::put(addresses, weights);
    return answer(
        linear_workspace(DType(dtype), rows, in, int(weights.size()), addresses, features.data(), gated));
  });
  m.def("experts_workspace", [answer](int dtype, Const gate_up, Const down, int64_t rows, int64_t top_k,
                                      int64_t hidden, int64_t width) {
    return answer(experts_workspace(DType(dtype), gate_up.value, down.value, rows, top_k, hidden, width));
  });
  m.def("select_tokens_workspace", &select_tokens_workspace);
  m.def("tree_candidates_workspace", &tree_candidates_workspace);
  m.def("top_candidates_workspace", &top_candidates_workspace);
}

}  // namespace dflash
