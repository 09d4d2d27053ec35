// Products of plain tensors with lists of weights, which a contract (contract.h) cannot say. direct_<op>
// takes the op's arguments in the order of its Python signature. It returns NotImplemented for operands that
// need a closer look, and Python then does what they need or says what is wrong with them.
#pragma once
#include <algorithm>
#include <exception>
#include <memory>
#include <string>

#include "cpu/base/table.h"
#include "binding/tensors.h"

namespace dflash {

// An argument, which may be a plain tensor on the CPU (Torch::read_plain) of up to kMaxDimensions dimensions.
class Operand {
 public:
  explicit Operand(PyObject* object)
      : object_(object), is_plain_(torch.read_plain(object, t_, span_) && t_.ndim <= kMaxDimensions) {}

  explicit operator bool() const { return is_plain_; }
  template <typename T>
  T* data() const {
    return static_cast<T*>(t_.data);
  }

  int dims() const { return t_.ndim; }
  // Of dimension i, the last one first if it is negative.
  int64_t size(int i) const { return t_.shape[i < 0 ? t_.ndim + i : i]; }
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

  bool is_like(const Operand& other) const {
    return t_.code == other.t_.code && t_.bits == other.t_.bits && t_.lanes == other.t_.lanes;
  }
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
    int64_t shape[kMaxDimensions];
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
