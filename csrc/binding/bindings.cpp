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

#if DFLASH_WITH_CUDA
// Why this build's kernels cannot run on the device; empty if they can.
std::string cuda_status(int device) {
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return "no CUDA driver was found";
  cudaRuntimeGetVersion(&runtime);
  if (driver / 1000 < runtime / 1000)
    return "the driver is made for CUDA " + std::to_string(driver / 1000) + ", the kernels need one for CUDA " +
           std::to_string(runtime / 1000);
  const cudaError_t error = probe_kernels(device);
  return error == cudaSuccess ? "" : cudaGetErrorString(error);
}

// The number of the graph capture that the stream takes part in, 0 for none.
unsigned long long capture_id(Address stream) {
  unsigned long long id = 0;
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamGetCaptureInfo(ptr<CUstream_st>(stream), &status, &id);
  return status == cudaStreamCaptureStatusActive ? id : 0;
}
#endif

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
#if DFLASH_WITH_CUDA
  bind_cuda_kernels(m);
  m.def("with_cuda", [] { return true; });
  m.def("cuda_status", &cuda_status);
  m.def("overlaps", &overlaps);
  m.def("set_overlap", &set_overlap);
  m.def("capture_id", &capture_id);
#else
  m.def("with_cuda", [] { return false; });
  m.def("cuda_status", [](int) { return "this build has no CUDA kernels"; });
  m.def("overlaps", [](int) { return false; });
  m.def("set_overlap", [](bool) {});
  m.def("capture_id", [](uintptr_t) { return 0; });
#endif
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
}
