// The CUDA kernels as functions of a module: launch(kernel, fields by name, device, stream), and
// NAME_workspace(shapes).
#pragma once
#include <pybind11/stl.h>

#include <map>
#include <string>

#include "binding/fields.h"
#include "cuda/base/launch.h"

namespace dflash {

template <typename Params, cudaError_t (*LAUNCH)(const Params&, cudaStream_t)>
cudaError_t launch(const pybind11::dict& given, int device, cudaStream_t stream) {
  Lists lists;
  Params p{};
  store_record(fields_of<Params>(), given.ptr(), reinterpret_cast<char*>(&p), lists);
  p.device = device;
  const pybind11::gil_scoped_release release;
  return LAUNCH(p, stream);
}

inline void bind_cuda_kernels(pybind11::module_& m) {
  using Launch = cudaError_t (*)(const pybind11::dict&, int, cudaStream_t);
  static const std::map<std::string, Launch> launches{
#define KERNEL(name, Params) {#name, &launch<Params, launch_##name>},
      DFLASH_KERNELS(KERNEL, KERNEL, DFLASH_NOTHING)
#undef KERNEL
  };
  m.def("launch", [](const std::string& kernel, const pybind11::dict& given, int device, Address stream) {
    const cudaError_t error = launches.at(kernel)(given, device, ptr<CUstream_st>(stream));
    if (error != cudaSuccess) throw std::runtime_error(kernel + ": CUDA error: " + cudaGetErrorString(error));
  });

  const auto answer = [](Workspace w) { return std::pair(w.splits, w.bytes); };
  const auto addresses = [](const pybind11::list& objects) {
    std::vector<const void*> found;
    for (pybind11::handle object : objects) found.push_back(address_of(object.ptr()));
    return found;
  };
  m.attr("NUM_COUNTERS") = kNumCounters;
  m.def("aligned", [](pybind11::handle tensor, const std::vector<int64_t>& strides) {
    bool aligned = uintptr_t(address_of(tensor.ptr())) % 16 == 0;
    for (int64_t bytes : strides) aligned &= bytes % 16 == 0;
    return aligned;
  });
  m.def("block_attention_workspace", [answer](int dtype, pybind11::handle k_cache, pybind11::handle v_cache,
                                              int64_t batch, int64_t rows, int64_t num_heads, int64_t num_kv_heads,
                                              int64_t head_dim, int64_t v_head_dim, int64_t capacity) {
    return answer(block_attention_workspace(DType(dtype), address_of(k_cache.ptr()), address_of(v_cache.ptr()), batch,
                                            rows, num_heads, num_kv_heads, head_dim, v_head_dim, capacity));
  });
  m.def("linear_workspace", [=](int dtype, int64_t rows, int64_t in, const pybind11::list& weights,
                                const std::vector<int64_t>& features, bool gated, int format) {
    return answer(linear_workspace(DType(dtype), rows, in, int(weights.size()), addresses(weights).data(),
                                   features.data(), gated, Format(format)));
  });
  m.def("experts_workspace", [answer](int dtype, pybind11::handle gate_up, pybind11::handle down, int64_t rows,
                                      int64_t top_k, int64_t hidden, int64_t width) {
    return answer(
        experts_workspace(DType(dtype), address_of(gate_up.ptr()), address_of(down.ptr()), rows, top_k, hidden, width));
  });
  m.def("select_tokens_workspace", &select_tokens_workspace);
  m.def("tree_candidates_workspace", &candidates_workspace);
  m.def("top_candidates_workspace", &candidates_workspace);
}

}  // namespace dflash
