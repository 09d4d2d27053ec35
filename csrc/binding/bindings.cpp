// The module _C: addresses, sizes and (for CUDA) a stream in; a kernel call out.
#ifdef _OPENMP
#include <omp.h>
#endif

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "binding/contract.h"
#if DFLASH_WITH_CUDA
#include "binding/cuda.h"
#endif

namespace py = pybind11;
using namespace dflash;
using namespace py::literals;

namespace {

// ---- the ops on the CPU that are more than one kernel, or whose kernel takes lists that a contract cannot say. Their
// contracts have matched; tensors are numbered as there.

// The products of a call's first tensor with weights side by side; false if torch's product is faster, or the
// operands do not fit each other.
bool read_products(const Call& call, const Seen* weights, int count, const Seen* biases, const Seen* scales,
                   LinearParams& p) {
  const DLTensor& x = call.seen[0].t;
  p.x = x.data, p.in = x.shape[x.ndim - 1], p.dtype = call.dtype(), p.rows = 1;
  for (int i = 0; i + 1 < x.ndim; ++i) p.rows *= x.shape[i];
  p.format = call.format;
  if (p.in == 0 || (p.format == Format::kDense && p.rows > skinny_rows(p.dtype))) return false;
  for (int i = 0; i < count; ++i) {
    const DLTensor& weight = weights[i].t;
    if (biases && biases[i].t.shape[0] != weight.shape[0]) return false;
    p.weights[i] = weight.data, p.features[i] = weight.shape[0];
    p.biases[i] = biases ? biases[i].t.data : nullptr;
    p.scales[i] = scales ? static_cast<const float*>(scales->t.data) + p.out_features : nullptr;
    p.out_features += weight.shape[0];
  }
  p.num_weights = count;
  return true;
}

// linear(x, weight, bias, scales) and linears(x, weights, biases, scales), and the weights' format
bool run_linears(const Call& call, void* const* outputs) {
  LinearParams p{};
  p.out = outputs[0];
  if (!read_products(call, call.tensors(1), call.count[1], call.tensors(2), call.tensors(3), p)) return false;
  run_kernel(&CpuKernels::linear, p, torch.num_threads(), call.bytes);
  return true;
}

// swiglu(x, gate, up, scales)
bool run_swiglu(const Call& call, void* const* outputs) {
  LinearParams p{};
  if (!read_products(call, call.tensors(1), 2, nullptr, call.tensors(3), p)) return false;
  const std::unique_ptr<char[]> gate_up(new char[p.rows * p.out_features * call.seen[0].t.element_size()]);
  p.out = gate_up.get();
  run_kernel(&CpuKernels::linear, p, torch.num_threads(), call.bytes);
  SiluMulParams gated{p.out, outputs[0], p.rows, p.features[0], Gate::kSilu, p.dtype, 0};
  run_kernel(&CpuKernels::silu_mul, gated, p.threads, call.bytes);
  return true;
}

// fuse_features(context, num_context, fc_weight, norm_weight), and eps as the last argument
bool run_fuse_features(const Call& call, void* const* outputs) {
  LinearParams p{};
  if (!read_products(call, call.tensors(2), 1, nullptr, nullptr, p)) return false;
  const std::unique_ptr<char[]> fused(new char[p.rows * p.out_features * call.seen[0].t.element_size()]);
  p.out = fused.get();
  run_kernel(&CpuKernels::linear, p, torch.num_threads(), call.bytes);
  RmsNormParams norm{};
  norm.x = p.out, norm.weight = call.tensors(3)->t.data, norm.out = outputs[0];
  norm.counts = static_cast<const int64_t*>(call.tensors(1)->t.data);
  norm.rows = p.rows, norm.rows_per_sequence = call.seen[0].t.shape[1], norm.hidden = p.out_features;
  norm.eps = float(call.number(4)), norm.dtype = p.dtype;
  run_kernel(&CpuKernels::rms_norm, norm, p.threads, call.bytes);
  return true;
}

// compact_kv_(path, counts, first, k_caches, v_caches)
bool run_compact_kv(const Call& call, void* const*) {
  const int count = call.count[3] + call.count[4];
  if (count == 0) return true;
  const Seen* caches = call.tensors(3);  // and those of v behind them
  std::vector<void*> addresses;
  std::vector<int64_t> heads, row_bytes;
  for (int i = 0; i < count; ++i) {
    const DLTensor& t = caches[i].t;
    addresses.push_back(t.data), heads.push_back(t.shape[1]);
    row_bytes.push_back(t.shape[3] * t.element_size());
  }
  const auto numbers = [&call](int i) { return static_cast<const int64_t*>(call.tensors(i)->t.data); };
  const int64_t* path = call.seen[0].t.shape;
  CompactKvParams p{numbers(0),     numbers(1),           numbers(2), addresses.data(),
                    {heads.data()}, {row_bytes.data()},   count,      path[0],
                    path[1],        caches[0].t.shape[2], 0};
  run_kernel(&CpuKernels::compact_kv, p, torch.num_threads(), call.bytes);
  return true;
}

// Null for an op whose kernel takes the contract's fields.
Body body_of(const std::string& op) {
  static const std::map<std::string, Body> bodies{{"linear", run_linears},
                                                  {"linears", run_linears},
                                                  {"swiglu", run_swiglu},
                                                  {"fuse_features", run_fuse_features},
                                                  {"compact_kv_", run_compact_kv}};
  const auto found = bodies.find(op);
  return found == bodies.end() ? nullptr : found->second;
}

// ---- the module

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
// Why this build's kernels cannot run on the device, empty if they can, and whether that answer lasts.
std::pair<std::string, bool> cuda_status(int device) {
  int driver = 0, runtime = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) return {"no CUDA driver was found", true};
  cudaRuntimeGetVersion(&runtime);
  if (driver / 1000 < runtime / 1000)
    return {"the driver is made for CUDA " + std::to_string(driver / 1000) + ", the kernels need one for CUDA " +
                std::to_string(runtime / 1000),
            true};
  const cudaError_t error = probe_kernels(device);
  if (error == cudaSuccess) return {"", true};
  return {cudaGetErrorString(error), error != cudaErrorMemoryAllocation && error != cudaErrorDevicesUnavailable};
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
#ifdef _OPENMP
  m.def("set_threads", &omp_set_num_threads);  // of the calling thread's regions, torch's among them
#else
  m.def("set_threads", [](int) {});
#endif
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
  m.def("cuda_status", [](int) { return std::pair("this build has no CUDA kernels", true); });
  m.def("overlaps", [](int) { return false; });
  m.def("set_overlap", [](bool) {});
  m.def("capture_id", [](uintptr_t) { return 0; });
#endif
  m.attr("DTYPES") = py::dict("float32"_a = int(DType::kFloat32), "bfloat16"_a = int(DType::kBFloat16),
                              "float16"_a = int(DType::kFloat16));
  m.attr("GATES") = py::dict("silu"_a = int(Gate::kSilu), "gelu_tanh"_a = int(Gate::kGeluTanh),
                             "clamped_silu"_a = int(Gate::kClampedSilu));
  py::dict formats("dense"_a = int(Format::kDense), "w8a8"_a = int(Format::kW8A8), "w8a16"_a = int(Format::kW8A16));
  for (int i = kFirstBlocks; i < kFirstGroups; ++i) formats[blocks_of(Format(i)).name] = i;
  int groups = kFirstGroups;
  for (const char* name : kGroupFormats) formats[name] = groups++;
  m.attr("FORMATS") = formats;
  m.def("coding", [](int format) {
    const BlockFormat& f = blocks_of(Format(format));
    const std::vector<int> table(f.table, f.table + (f.table ? 16 : 0));
    return py::make_tuple(f.columns, f.bits, f.offset, kScaleNames[int(f.scales)], f.has_minima, f.scale_columns,
                          table);
  });
  m.def("grouping", [](int number) {
    const auto format = Format(number);
    const char* scales = has_super_groups(format) ? "super" : has_float_groups(format) ? "half" : "word";
    return py::make_tuple(bits_of_groups(format), 1 << log2_of_group(format), scales);
  });
  m.attr("FIRST_GROUPS") = kFirstGroups;
  m.def("row_size", [](int format, int64_t in) { return row_size(Format(format), in); });
  m.attr("MAX_LINEAR_WEIGHTS") = kMaxLinearWeights;
  m.attr("MAX_LINEAR_ROWS") = kMaxLinearRows;
  m.attr("SKINNY_ROWS") =
      py::dict("float32"_a = skinny_rows(DType::kFloat32), "bfloat16"_a = skinny_rows(DType::kBFloat16));
  m.attr("MAX_RECURRENT_KEYS") = kMaxRecurrentKeys;
  m.attr("MAX_TREE_ROWS") = kMaxTreeRows;
  m.attr("MAX_CANDIDATES") = kMaxCandidates;
  m.attr("ROW_STATES") = py::make_tuple(int(kRunning), int(kStop), int(kLimit), int(kInvalid));

  py::class_<DecoderLayers>(m, "DecoderLayers")
      .def(py::init<py::list, py::list>())
      .def("data_ptr", &DecoderLayers::data_ptr)
      .def("unchanged", &DecoderLayers::unchanged);
}
