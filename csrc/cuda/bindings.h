// The CUDA kernels as functions of a module: NAME_cuda(addresses and sizes, device, stream).
#pragma once
#include <stdexcept>
#include <string>

#include "cuda/launch.h"
#include "pack.h"

namespace dflash {

inline void bind_cuda_kernels(pybind11::module_& m) {
  const auto bind = [&m](const char* name, auto pack, auto launch) {
    const std::string op = name;
    bind_cuda(m, (op + "_cuda").c_str(), pack, [op, launch](const auto& params, Address stream) {
      const cudaError_t error = launch(params, ptr<CUstream_st>(stream));
      if (error != cudaSuccess) throw std::runtime_error(op + ": CUDA error: " + cudaGetErrorString(error));
    });
  };
  bind("accept_prefix", pack_accept_prefix, launch_accept_prefix);
}

}  // namespace dflash
