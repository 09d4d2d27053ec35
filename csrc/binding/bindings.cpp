// The module _C: addresses, sizes and (for CUDA) a stream in; a kernel call out.
#include <string>

#include "binding/contract.h"
#include "cpu/base/table.h"
#include "binding/direct.h"
#include "binding/pack.h"
#include "binding/tensors.h"
#if DFLASH_WITH_CUDA
#include "binding/cuda.h"
#endif

namespace py = pybind11;
using namespace dflash;
using namespace py::literals;

namespace {

// The layers of a decoder as decoder_layers reads them, packed once for many calls.
class DecoderLayers {
 public:
  DecoderLayers(const py::list& layers, const py::list& weights) : weights_(weights) {
    for (py::handle layer : layers)
      layers_.push_back(pack_tuple(DecoderLayer::wire(), py::cast<py::tuple>(layer)));
  }
  Address data_ptr() const { return reinterpret_cast<Address>(layers_.data()); }
  bool unchanged(bool signs) const { return weights_.unchanged(signs); }

 private:
  std::vector<DecoderLayer> layers_;
  Snapshot weights_;
};

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

// Whether kernels launched on the device may start before the one ahead has ended.
bool kernels_overlap([[maybe_unused]] int device) {
#if DFLASH_WITH_CUDA
  return overlaps(device);
#else
  return false;
#endif
}

void let_kernels_overlap([[maybe_unused]] bool on) {
#if DFLASH_WITH_CUDA
  set_overlap(on);
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
  m.def("use_torch", [](py::handle tensor, py::handle parameter,
                        const std::vector<std::tuple<py::object, uint8_t, uint8_t>>& dtypes) {
    torch.init(tensor, parameter, dtypes);
  });
  // Called more often than any other, and pybind11 takes as long as they do.
  const auto fast = [](auto* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
  };
  static PyMethodDef methods[] = {
      {"direct_linear", fast(&as_method<direct_linear, 5>), METH_FASTCALL, nullptr},
      {"direct_linears", fast(&as_method<direct_linears, 5>), METH_FASTCALL, nullptr},
      {"direct_swiglu", fast(&as_method<direct_swiglu, 5>), METH_FASTCALL, nullptr},
  };
  for (PyMethodDef& method : methods) m.add_object(method.ml_name, PyCFunction_New(&method, nullptr));
  m.def("contract", &contract);
  py::dict fields;
  for (const auto& [name, kernel] : kernels()) {
    py::list named;
    for (const Field& field : kernel.fields) named.append(py::make_tuple(field.name, field.initial));
    fields[name.c_str()] = named;
  }
  m.attr("FIELDS") = fields;
  m.def("isa", [] { return cpu_kernels().isa; });
  m.def("isas", &cpu_isas);
  m.def("with_cuda", &with_cuda);
  m.def("cuda_status", &cuda_status);
  m.def("overlaps", &kernels_overlap);
  m.def("set_overlap", &let_kernels_overlap);
  m.def("capture_id", &capture_id);
  m.attr("DTYPES") = py::dict("float32"_a = int(DType::kFloat32), "bfloat16"_a = int(DType::kBFloat16),
                              "float16"_a = int(DType::kFloat16));
  m.attr("GATES") = py::dict("silu"_a = int(Gate::kSilu), "gelu_tanh"_a = int(Gate::kGeluTanh),
                             "clamped_silu"_a = int(Gate::kClampedSilu));
  m.attr("MAX_LINEAR_WEIGHTS") = kMaxLinearWeights;
  m.attr("MAX_LINEAR_ROWS") = kMaxLinearRows;
  m.attr("SKINNY_ROWS") = py::dict("float32"_a = max_skinny_rows(DType::kFloat32),
                                   "bfloat16"_a = max_skinny_rows(DType::kBFloat16));
  m.attr("QUANT_GROUP") = kQuantGroup;
  m.attr("MAX_RECURRENT_KEYS") = kMaxRecurrentKeys;
  m.attr("MAX_TREE_ROWS") = kMaxTreeRows;
  m.attr("MAX_CANDIDATES") = kMaxCandidates;
  m.attr("ROW_STATES") = py::make_tuple(int(kRunning), int(kStop), int(kLimit), int(kInvalid));

  const auto bind = [&m](const char* name, auto fields, auto kernel) {
    bind_cpu(m, name, fields, [kernel](const auto& params) { (cpu_kernels().*kernel)(params); });
  };
#define KERNEL(name, Params) bind(#name, Params::wire(), &CpuKernels::name);
#define CPU_KERNEL KERNEL
#include "binding/kernels.def"
  py::class_<DecoderLayers>(m, "DecoderLayers")
      .def(py::init<py::list, py::list>())
      .def("data_ptr", &DecoderLayers::data_ptr)
      .def("unchanged", &DecoderLayers::unchanged);
#if DFLASH_WITH_CUDA
  bind_cuda_kernels(m);
#endif
}
