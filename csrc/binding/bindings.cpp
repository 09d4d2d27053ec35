// The module _C: addresses, sizes and (for CUDA) a stream in; a kernel call out.
#include <string>

#include "binding/bodies.h"
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
    Lists lists;
    for (py::handle layer : layers) {
      layers_.push_back({});
      store_record(fields_of<DecoderLayer>(), layer.ptr(), reinterpret_cast<char*>(&layers_.back()), lists);
    }
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
    return "the driver is made for CUDA " + std::to_string(driver / 1000) + ", the kernels need one for CUDA " +
           std::to_string(runtime / 1000);
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
  m.def("use_torch", [](py::handle tensor, py::handle parameter) { torch.init(tensor, parameter); });
  m.def("contract", [](const std::string& op, const py::dict& spec) { return contract(spec, body_of(op)); });
  m.def("run", [](const std::string& kernel, const py::dict& given, int threads) {
    alignas(16) char params[CpuKernel::kLargest];
    const CpuKernel& found = kernels().at(kernel);
    Lists lists;
    found.make(params);
    store_record(*found.fields, given.ptr(), params, lists);
    found.run(params, threads, INT64_MAX);
  });
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
  m.attr("SKINNY_ROWS") =
      py::dict("float32"_a = max_skinny_rows(DType::kFloat32), "bfloat16"_a = max_skinny_rows(DType::kBFloat16));
  m.attr("QUANT_GROUP") = kQuantGroup;
  m.attr("MAX_RECURRENT_KEYS") = kMaxRecurrentKeys;
  m.attr("MAX_TREE_ROWS") = kMaxTreeRows;
  m.attr("MAX_CANDIDATES") = kMaxCandidates;
  m.attr("ROW_STATES") = py::make_tuple(int(kRunning), int(kStop), int(kLimit), int(kInvalid));

  py::class_<DecoderLayers>(m, "DecoderLayers")
      .def(py::init<py::list, py::list>())
      .def("data_ptr", &DecoderLayers::data_ptr)
      .def("unchanged", &DecoderLayers::unchanged);
#if DFLASH_WITH_CUDA
  bind_cuda_kernels(m);
#endif
}
