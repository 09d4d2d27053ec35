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
  bind("rms_norm", pack_rms_norm, launch_rms_norm);
  bind("silu_mul", pack_silu_mul, launch_silu_mul);
  bind("qkv_norm_rope_append", pack_qkv_norm_rope_append, launch_qkv_norm_rope_append);
  bind("append_context_kv", pack_append_context_kv, launch_append_context_kv);
  bind("append_kv", pack_append_kv, launch_append_kv);
  bind("block_attention", pack_block_attention, launch_block_attention);
  bind("linear", pack_linear, launch_linear);
  bind("select_tokens", pack_select_tokens, launch_select_tokens);
  bind("accept_prefix", pack_accept_prefix, launch_accept_prefix);
}

}  // namespace dflash
