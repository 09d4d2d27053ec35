// Ops on plain tensors, past their Python functions, whose checks and allocations take longer than a small
// kernel. direct_<op> takes the op's arguments in the order of its Python signature. It returns
// NotImplemented for operands that need a closer look, and Python then does what they need or says what is
// wrong with them.
#pragma once
#include <algorithm>
#include <exception>
#include <memory>
#include <string>

#include "cpu/base/table.h"
#include "tensors.h"

namespace dflash {

// An argument, which may be a plain tensor on the CPU (Torch::read_plain) of up to kMaxDims dimensions.
class Operand {
 public:
  static constexpr int kMaxDims = 8;

  explicit Operand(PyObject* object)
      : object_(object), is_plain_(torch.read_plain(object, t_, span_) && t_.ndim <= kMaxDims) {}

  explicit operator bool() const { return is_plain_; }
  const Span& span() const { return span_; }
  template <typename T>
  T* data() const {
    return static_cast<T*>(t_.data);
  }

  int dims() const { return t_.ndim; }
  // Of dimension i, the last one first if it is negative.
  int64_t size(int i) const { return t_.shape[i < 0 ? t_.ndim + i : i]; }
  int64_t stride(int i) const { return t_.strides[i < 0 ? t_.ndim + i : i]; }
  // Of all dimensions but the last.
  int64_t rows() const {
    int64_t count = 1;
    for (int i = 0; i + 1 < t_.ndim; ++i) count *= t_.shape[i];
    return count;
  }
  bool has_shape(std::initializer_list<int64_t> shape) const {
    if (t_.ndim != int(shape.size())) return false;
    for (int i = 0; i < t_.ndim; ++i)
      if (t_.shape[i] != shape.begin()[i]) return false;
    return true;
  }
  bool is_dense() const {
    int64_t step = 1;
    bool dense = true;
    for (int i = t_.ndim - 1; i >= 0; step *= t_.shape[i--])
      dense = dense && (t_.shape[i] == 1 || t_.strides[i] == step);
    return dense || step == 0;
  }
  bool has_dense_rows() const { return stride(-1) == 1 || size(-1) == 1; }

  bool is_like(const Operand& other) const {
    return t_.code == other.t_.code && t_.bits == other.t_.bits && t_.lanes == other.t_.lanes;
  }
  bool is_int64() const { return is(kDLInt, 64); }
  bool is_int8() const { return is(kDLInt, 8); }
  bool is_float32() const { return is(kDLFloat, 32); }
  // The kernels' dtype; false if they have none for it on the CPU.
  bool read_dtype(DType& dtype) const {
    dtype = is_float32() ? DType::kFloat32 : DType::kBFloat16;
    return is_float32() || is(kDLBfloat, 16);
  }
  int64_t element_size() const { return t_.element_size(); }

  // A new tensor like this one, the size of its last dimension another.
  pybind11::object resized(int64_t last) const {
    int64_t shape[kMaxDims];
    std::copy(t_.shape, t_.shape + t_.ndim, shape);
    shape[t_.ndim - 1] = last;
    return torch.new_empty(object_, shape, t_.ndim);
  }

 private:
  bool is(uint8_t code, uint8_t bits) const { return t_.code == code && t_.bits == bits && t_.lanes == 1; }

  PyObject* object_;
  DLTensor t_{};
  Span span_;
  bool is_plain_;
};

// Runs a CPU kernel as the binding does.
template <typename Params>
inline void run_kernel(void (*CpuKernels::*kernel)(const Params&), Params& p) {
  p.threads = torch.num_threads();
  const pybind11::gil_scoped_release release;
  (cpu_kernels().*kernel)(p);
}

// The result of an op: `out` is a new tensor, and run(its memory) fills it.
template <typename Run>
inline PyObject* filled(pybind11::object out, const Run& run) {
  DLTensor t;
  if (!torch.is_exact(out.ptr()) || !torch.read(out.ptr(), t) || t.device_type != kDLCPU)
    Py_RETURN_NOTIMPLEMENTED;
  run(t.data);
  return out.release().ptr();
}

// ---- products

// Reads one of the weights [features, in], its bias and, if they are int8, its scales.
inline bool read_weight(const Operand& x, PyObject* weight_object, PyObject* bias_object, const float* scales,
                        LinearParams& p) {
  const Operand weight(weight_object);
  if (!weight || weight.dims() != 2 || weight.size(1) != p.in || !weight.is_dense()) return false;
  if (scales ? !weight.is_int8() : !weight.is_like(x)) return false;
  const int i = p.num_weights++;
  p.weights[i] = weight.data<void>(), p.features[i] = weight.size(0);
  p.scales[i] = scales ? scales + p.out_features : nullptr;
  p.out_features += weight.size(0);
  if (bias_object == Py_None) return true;
  const Operand bias(bias_object);
  if (!bias || !bias.is_like(x) || !bias.has_shape({weight.size(0)}) || !bias.is_dense()) return false;
  p.biases[i] = bias.data<void>();
  return true;
}

// Reads the products of x with several weights; `biases` has as many, which may be None, or is null.
inline bool read_products(const Operand& x, PyObject* const* weights, PyObject* const* biases,
                          Py_ssize_t count, PyObject* scales_object, LinearParams& p) {
  // 1. x
  if (!x || x.dims() < 2 || !x.is_dense() || !x.read_dtype(p.dtype)) return false;
  p.x = x.data<void>(), p.rows = x.rows(), p.in = x.size(-1);
  const bool is_int8 = scales_object != Py_None;
  if (p.in == 0 || count < 1 || count > kMaxLinearWeights) return false;
  if (!is_int8 && p.rows > max_skinny_rows(p.dtype)) return false;
  // 2. Weights and biases
  const Operand scales(scales_object);
  if (is_int8 &&
      (!scales || scales.dims() != 1 || scales.size(0) == 0 || !scales.is_float32() || !scales.is_dense()))
    return false;
  for (Py_ssize_t i = 0; i < count; ++i)
    if (!read_weight(x, weights[i], biases ? biases[i] : Py_None, is_int8 ? scales.data<float>() : nullptr,
                     p))
      return false;
  return !is_int8 || scales.size(0) == p.out_features;
}

inline PyObject* run_products(const Operand& x, LinearParams& p) {
  return filled(x.resized(p.out_features), [&](void* out) {
    p.out = out;
    run_kernel(&CpuKernels::linear, p);
  });
}

// linear(x, weight, bias, prefetch, scales)
inline PyObject* direct_linear(PyObject* const* arguments) {
  if (!PyBool_Check(arguments[3])) Py_RETURN_NOTIMPLEMENTED;
  const Torch::ModesOff guard(torch);
  const Operand x(arguments[0]);
  LinearParams p{};
  if (!read_products(x, arguments + 1, arguments + 2, 1, arguments[4], p)) Py_RETURN_NOTIMPLEMENTED;
  return run_products(x, p);
}

// linears(x, weights, biases, prefetch, scales)
inline PyObject* direct_linears(PyObject* const* arguments) {
  const auto is_list = [](PyObject* object) { return PyList_Check(object) || PyTuple_Check(object); };
  if (!is_list(arguments[1]) || !is_list(arguments[2]) || !PyBool_Check(arguments[3]))
    Py_RETURN_NOTIMPLEMENTED;
  // Other threads may empty a list while the kernel runs.
  const auto weights = pybind11::reinterpret_steal<pybind11::tuple>(PySequence_Tuple(arguments[1]));
  const auto biases = pybind11::reinterpret_steal<pybind11::tuple>(PySequence_Tuple(arguments[2]));
  if (!weights || !biases) throw pybind11::error_already_set();
  const Py_ssize_t count = weights.size(), given = biases.size();
  if (given != 0 && given != count) Py_RETURN_NOTIMPLEMENTED;
  const Torch::ModesOff guard(torch);
  const Operand x(arguments[0]);
  LinearParams p{};
  if (!read_products(x, PySequence_Fast_ITEMS(weights.ptr()),
                     given ? PySequence_Fast_ITEMS(biases.ptr()) : nullptr, count, arguments[4], p))
    Py_RETURN_NOTIMPLEMENTED;
  return run_products(x, p);
}

// swiglu(x, gate, up, prefetch, scales)
inline PyObject* direct_swiglu(PyObject* const* arguments) {
  if (!PyBool_Check(arguments[3])) Py_RETURN_NOTIMPLEMENTED;
  const Torch::ModesOff guard(torch);
  const Operand x(arguments[0]);
  LinearParams p{};
  if (!read_products(x, arguments + 1, nullptr, 2, arguments[4], p) || p.features[0] != p.features[1])
    Py_RETURN_NOTIMPLEMENTED;
  return filled(x.resized(p.features[0]), [&](void* out) {
    const std::unique_ptr<char[]> gate_up(new char[p.rows * p.out_features * x.element_size()]);
    p.out = gate_up.get();
    run_kernel(&CpuKernels::linear, p);
    SiluMulParams gated{};
    gated.gate_up = gate_up.get(), gated.out = out;
    gated.rows = p.rows, gated.width = p.features[0], gated.dtype = p.dtype;
    run_kernel(&CpuKernels::silu_mul, gated);
  });
}

// ---- gates

// silu_mul(gate_up)
inline PyObject* direct_silu_mul(PyObject* const* arguments) {
  const Torch::ModesOff guard(torch);
  const Operand gate_up(arguments[0]);
  SiluMulParams p{};
  if (!gate_up || gate_up.dims() < 2 || gate_up.size(-1) % 2 != 0 || !gate_up.is_dense() ||
      !gate_up.read_dtype(p.dtype))
    Py_RETURN_NOTIMPLEMENTED;
  p.gate_up = gate_up.data<void>(), p.width = gate_up.size(-1) / 2;
  p.rows = p.width > 0 ? gate_up.rows() : 0;
  return filled(gate_up.resized(p.width), [&](void* out) {
    p.out = out;
    run_kernel(&CpuKernels::silu_mul, p);
  });
}

// sigmoid_mul(x, gate)
inline PyObject* direct_sigmoid_mul(PyObject* const* arguments) {
  const Torch::ModesOff guard(torch);
  const Operand x(arguments[0]), gate(arguments[1]);
  SigmoidMulParams p{};
  if (!x || !gate || x.dims() != 3 || !x.is_dense() || !x.read_dtype(p.dtype) || !gate.is_like(x) ||
      !gate.has_shape({x.size(0), x.size(1), x.size(2)}) || !gate.has_dense_rows())
    Py_RETURN_NOTIMPLEMENTED;
  p.x = x.data<void>(), p.gate = gate.data<void>();
  p.gate_stride_row = gate.stride(0), p.gate_stride_head = gate.stride(1);
  p.rows = x.size(0), p.heads = x.size(1), p.width = x.size(2);
  return filled(x.resized(p.width), [&](void* out) {
    p.out = out;
    run_kernel(&CpuKernels::sigmoid_mul, p);
  });
}

// ---- rows of caches

// append_kv_(key, value, positions, k_cache, v_cache)
inline PyObject* direct_append_kv(PyObject* const* arguments) {
  // 1. See whether all are plain, and the caches lie apart
  const Torch::ModesOff guard(torch);
  const Operand key(arguments[0]), value(arguments[1]), positions(arguments[2]);
  const Operand k_cache(arguments[3]), v_cache(arguments[4]);
  AppendKvParams p{};
  if (!key || !value || !positions || !k_cache || !v_cache || key.dims() != 4 || v_cache.dims() != 4)
    Py_RETURN_NOTIMPLEMENTED;
  for (const Operand* read : {&key, &value, &positions})
    if (k_cache.span().meets(read->span()) || v_cache.span().meets(read->span())) Py_RETURN_NOTIMPLEMENTED;
  if (k_cache.span().meets(v_cache.span())) Py_RETURN_NOTIMPLEMENTED;
  // 2. See whether they fit
  p.batch = key.size(0), p.num_kv_heads = key.size(1), p.rows = key.size(2), p.head_dim = key.size(3);
  p.capacity = v_cache.size(2), p.v_head_dim = v_cache.size(3);
  const bool fits = key.read_dtype(p.dtype) && value.is_like(key) && k_cache.is_like(key) &&
                    v_cache.is_like(key) && positions.is_int64() &&
                    value.has_shape({p.batch, p.num_kv_heads, p.rows, p.v_head_dim}) &&
                    positions.has_shape({p.batch, p.rows}) && p.capacity > 0 &&
                    k_cache.has_shape({p.batch, p.num_kv_heads, p.capacity, p.head_dim}) &&
                    v_cache.has_shape({p.batch, p.num_kv_heads, p.capacity, p.v_head_dim});
  if (!fits || !key.has_dense_rows() || !value.has_dense_rows() || !positions.is_dense() ||
      !k_cache.is_dense() || !v_cache.is_dense())
    Py_RETURN_NOTIMPLEMENTED;
  // 3. Append
  p.key = key.data<void>(), p.value = value.data<void>(), p.positions = positions.data<int64_t>();
  p.k_cache = k_cache.data<void>(), p.v_cache = v_cache.data<void>();
  p.k_stride_batch = key.stride(0), p.k_stride_head = key.stride(1), p.k_stride_row = key.stride(2);
  p.v_stride_batch = value.stride(0), p.v_stride_head = value.stride(1), p.v_stride_row = value.stride(2);
  run_kernel(&CpuKernels::append_kv, p);
  Py_RETURN_NONE;
}

// gather_rows_(x, path, out)
inline PyObject* direct_gather_rows(PyObject* const* arguments) {
  const Torch::ModesOff guard(torch);
  const Operand x(arguments[0]), path(arguments[1]), out(arguments[2]);
  if (!x || !path || !out || x.dims() != 3 || path.dims() != 2 || out.dims() != 3 ||
      out.span().meets(x.span()) || out.span().meets(path.span()))
    Py_RETURN_NOTIMPLEMENTED;
  const int64_t batch = x.size(0), columns = path.size(1), width = x.size(2);
  const bool fits = x.size(1) > 0 && path.is_int64() && path.size(0) == batch && out.is_like(x) &&
                    out.size(1) >= columns && out.has_shape({batch, out.size(1), width});
  if (!fits || !x.is_dense() || !path.is_dense() || !out.is_dense()) Py_RETURN_NOTIMPLEMENTED;
  GatherRowsParams p{};
  p.x = x.data<void>(), p.path = path.data<int64_t>(), p.out = out.data<void>();
  p.batch = batch, p.rows = x.size(1), p.path_rows = columns, p.out_rows = out.size(1);
  p.row_bytes = width * x.element_size();
  run_kernel(&CpuKernels::gather_rows, p);
  Py_RETURN_NONE;
}

// A direct_<op> of COUNT arguments as Python's C functions are: exceptions become Python's.
template <PyObject* (*DIRECT)(PyObject* const*), Py_ssize_t COUNT>
inline PyObject* as_method(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  try {
    if (count != COUNT)
      throw pybind11::type_error("takes " + std::to_string(COUNT) + " arguments, got " +
                                 std::to_string(count));
    return DIRECT(arguments);
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const pybind11::builtin_exception& error) {
    error.set_error();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

}  // namespace dflash
