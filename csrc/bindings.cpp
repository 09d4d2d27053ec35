// The module _C: addresses, sizes and (for CUDA) a stream in; a kernel call out.
#include <string>

#include "cpu/table.h"
#include "pack.h"
#if DFLASH_WITH_CUDA
#include "cuda/bindings.h"
#endif

namespace py = pybind11;
using namespace dflash;

namespace {

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

// The number of the graph capture that the stream takes part in, 0 for none.
unsigned long long capture_id([[maybe_unused]] uintptr_t stream) {
  unsigned long long id = 0;
#if DFLASH_WITH_CUDA
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamGetCaptureInfo(reinterpret_cast<cudaStream_t>(stream), &status, &id);
  if (status != cudaStreamCaptureStatusActive) id = 0;
#endif
  return id;
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.def("isa", [] { return cpu_kernels().isa; });
  m.def("with_cuda", &with_cuda);
  m.def("cuda_status", &cuda_status);
  m.def("capture_id", &capture_id);

  const auto bind = [&m](const char* name, auto pack, auto kernel) {
    bind_cpu(m, name, pack, [kernel](const auto& params) { (cpu_kernels().*kernel)(params); });
  };
  bind("rms_norm", pack_rms_norm, &CpuKernels::rms_norm);
  bind("silu_mul", pack_silu_mul, &CpuKernels::silu_mul);
  bind("qkv_norm_rope_append", pack_qkv_norm_rope_append, &CpuKernels::qkv_norm_rope_append);
  bind("append_context_kv", pack_append_context_kv, &CpuKernels::append_context_kv);
  bind("append_kv", pack_append_kv, &CpuKernels::append_kv);
  bind("block_attention", pack_block_attention, &CpuKernels::block_attention);
  bind("select_tokens", pack_select_tokens, &CpuKernels::select_tokens);
  bind("accept_prefix", pack_accept_prefix, &CpuKernels::accept_prefix);
  bind("linear", pack_linear, &CpuKernels::linear);
  bind("decoder_layers", pack_decoder_layers, &CpuKernels::decoder_layers);
#if DFLASH_WITH_CUDA
  bind_cuda_kernels(m);
#endif
}
