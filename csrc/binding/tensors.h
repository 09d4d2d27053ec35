// What a kernel's caller must know of tensors before it takes their addresses: that each has memory, as much
// as its shape and strides reach, whose bytes are its values. A tensor's storage may be freed or cut under it
// (FSDP, offloading), and some tensors have none. Tensors are seen through the C functions that torch.Tensor
// offers by DLPack's exchange API, which need no header of torch, and through its own methods.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <vector>

namespace dflash {

// ---- DLPack 1.x, as dlpack.h has it (https://github.com/dmlc/dlpack)

struct DLTensor {
  void* data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape, *strides;  // [ndim], in elements
  uint64_t byte_offset;

  int64_t element_size() const { return bits * lanes / 8; }
  int dtype() const { return code << 8 | bits; }
  int64_t num_bytes() const { return std::accumulate(shape, shape + ndim, element_size(), std::multiplies<>()); }
};
constexpr int32_t kDLCPU = 1;
constexpr uint8_t kDLInt = 0;
constexpr int kDLUInt8 = 0x108, kDLInt64 = 0x040, kDLFloat16 = 0x210, kDLFloat32 = 0x220, kDLBFloat16 = 0x410;
constexpr int kMaxDimensions = 8;  // of a tensor that a kernel is given past Python

struct DLPackExchange {
  uint32_t major, minor;
  void *previous, *allocator, *managed_from, *managed_to;
  int (*tensor_from)(void* object, DLTensor* out);
  void* current_stream;
};

// Between the rows [..., hidden] of a tensor if it is the same for all and each is dense; else -1.
inline int64_t row_stride(const DLTensor& t, bool written) {
  if (t.ndim == 0) return -1;
  const int64_t hidden = t.shape[t.ndim - 1];
  int64_t stride = -1, expected = 0, rows = 1;
  bool even = hidden == 1 || t.strides[t.ndim - 1] == 1;
  for (int i = t.ndim - 2; i >= 0; --i) {
    const int64_t size = t.shape[i];
    rows *= size;
    if (size > 1 && stride < 0) stride = expected = t.strides[i];
    if (stride >= 0) {
      even = even && (size <= 1 || t.strides[i] == expected);
      expected *= size;
    }
  }
  if (stride < 0) stride = hidden;
  if (rows == 0 || hidden == 0) return std::max<int64_t>(stride, 0);
  return even && !(written && rows > 1 && stride < hidden) ? stride : -1;
}

// ---- torch's tensors

// The bytes [begin, end) that a tensor's elements lie in; none if it is empty.
struct Span {
  uintptr_t begin = 0, end = 0;
  bool meets(const Span& other) const { return begin < other.end && other.begin < end; }
};

// A function without arguments, or a method of torch.Tensor. Those in C are called directly: Python would check
// again what they are called with.
class Function {
 public:
  Function() = default;
  Function(pybind11::handle owner, const char* name) : callable_(pybind11::getattr(owner, name).release().ptr()) {
    const PyMethodDef* method = nullptr;
    if (Py_IS_TYPE(callable_, &PyMethodDescr_Type))
      method = reinterpret_cast<PyMethodDescrObject*>(callable_)->d_method;
    if (PyCFunction_CheckExact(callable_)) method = reinterpret_cast<PyCFunctionObject*>(callable_)->m_ml;
    if (method && method->ml_flags == METH_NOARGS) function_ = method->ml_meth;
  }

  // A new reference, or null with Python's error set; `self` must be a torch.Tensor, or null for a function.
  PyObject* operator()(PyObject* self = nullptr) const {
    return function_ ? function_(self, nullptr) : PyObject_Vectorcall(callable_, &self, self != nullptr, nullptr);
  }
  // What it returns if that is an integer; else -1, with Python's error set.
  int64_t number(PyObject* self = nullptr) const {
    PyObject* result = (*this)(self);
    const int64_t value = result ? PyLong_AsLongLong(result) : -1;
    Py_XDECREF(result);
    return value;
  }

 private:
  PyObject* callable_ = nullptr;
  PyCFunction function_ = nullptr;
};

class Torch {
 public:
  // Called once, with torch.Tensor and torch.nn.Parameter.
  void init(pybind11::handle tensor, pybind11::handle parameter) {
    types_[0] = tensor.inc_ref().ptr(), types_[1] = parameter.inc_ref().ptr();
    untyped_storage_ = {tensor, "untyped_storage"}, storage_offset_ = {tensor, "storage_offset"};
    is_neg_ = {tensor, "is_neg"};
    const auto module = pybind11::module_::import("torch"), c = pybind11::module_::import("torch._C");
    num_threads_ = {c, "get_num_threads"}, num_modes_ = {c, "_len_torch_function_stack"};
    new_empty_ = pybind11::getattr(tensor, "new_empty").release().ptr();
    empty_like_ = pybind11::getattr(module, "empty_like").release().ptr();
    disable_ = pybind11::getattr(c, "DisableTorchFunction").release().ptr();
    const auto capsule = pybind11::getattr(tensor, "__dlpack_c_exchange_api__", pybind11::none());
    if (!PyCapsule_IsValid(capsule.ptr(), "dlpack_exchange_api")) return;
    const auto* found = static_cast<const DLPackExchange*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (found->major == 1) exchange_ = found;
  }

  // While it lives, tensors' methods do not run the Python code of torch function modes: torch.device as a
  // context is one, and it would take ten times as long as the check.
  class ModesOff {
   public:
    explicit ModesOff(const Torch& torch) {
      if (torch.num_modes_.number() > 0) guard_ = PyObject_CallNoArgs(torch.disable_);
      if (guard_) Py_XDECREF(PyObject_CallMethod(guard_, "__enter__", nullptr));
      if (PyErr_Occurred()) PyErr_Clear();
    }
    ~ModesOff() {
      if (guard_) Py_XDECREF(PyObject_CallMethod(guard_, "__exit__", "OOO", Py_None, Py_None, Py_None));
      if (PyErr_Occurred()) PyErr_Clear();
      Py_XDECREF(guard_);
    }
    ModesOff(const ModesOff&) = delete;
    ModesOff& operator=(const ModesOff&) = delete;

   private:
    PyObject* guard_ = nullptr;
  };

  // Fills `out`; returns false, with no Python error set, if the object is not a tensor with an address.
  bool read(PyObject* object, DLTensor& out) const {
    if (exchange_ && exchange_->tensor_from && exchange_->tensor_from(object, &out) == 0) return true;
    PyErr_Clear();
    return false;
  }

  // The tensor's bytes; false if its storage does not hold all of them.
  bool span_of(PyObject* object, const DLTensor& t, Span& span) const {
    int64_t reach = 1;
    for (int i = 0; i < t.ndim; ++i) {
      if (t.shape[i] == 0) return true;
      reach += (t.shape[i] - 1) * t.strides[i];
    }
    const int64_t size = t.element_size(), offset = storage_offset_.number(object);
    PyObject* storage = untyped_storage_(object);
    const int64_t bytes = storage ? PyObject_Size(storage) : -1;
    Py_XDECREF(storage);
    if (PyErr_Occurred()) PyErr_Clear();
    span.begin = reinterpret_cast<uintptr_t>(t.data), span.end = span.begin + reach * size;
    return t.data && offset >= 0 && (offset + reach) * size <= bytes;
  }

  // True for torch.Tensor and Parameter themselves; a subclass may hold its values anywhere.
  bool is_exact(PyObject* object) const {
    const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    return type == types_[0] || type == types_[1];
  }

  // True if the values are minus the bytes, see torch.Tensor.is_neg: parts of complex tensors may be.
  bool is_negative(PyObject* object, const DLTensor& t) const {
    if (t.code == kDLInt) return false;
    PyObject* negative = is_neg_(object);
    if (!negative) PyErr_Clear();
    Py_XDECREF(negative);
    return negative != Py_False;
  }

  // torch.empty_like(tensor)
  pybind11::object empty_like(PyObject* tensor) const { return checked(PyObject_CallOneArg(empty_like_, tensor)); }

  // tensor.new_empty(*shape, dtype=dtype), which takes less time than with a tuple; null for its own dtype.
  pybind11::object new_empty(PyObject* tensor, const int64_t* shape, int ndim, PyObject* dtype = nullptr) const {
    static PyObject* const names = pybind11::make_tuple("dtype").release().ptr();
    pybind11::object sizes[kMaxDimensions];
    PyObject* arguments[kMaxDimensions + 2] = {tensor};
    for (int i = 0; i < ndim; ++i) {
      sizes[i] = pybind11::int_(shape[i]);
      arguments[1 + i] = sizes[i].ptr();
    }
    arguments[1 + ndim] = dtype;
    return checked(PyObject_Vectorcall(new_empty_, arguments, 1 + ndim, dtype ? names : nullptr));
  }

  // torch.get_num_threads()
  int num_threads() const {
    const int64_t threads = num_threads_.number();
    if (PyErr_Occurred()) throw pybind11::error_already_set();
    return int(threads);
  }

 private:
  static pybind11::object checked(PyObject* made) {
    if (!made) throw pybind11::error_already_set();
    return pybind11::reinterpret_steal<pybind11::object>(made);
  }

  PyObject* types_[2] = {};
  Function untyped_storage_, storage_offset_, is_neg_, num_threads_, num_modes_;
  PyObject *new_empty_ = nullptr, *empty_like_ = nullptr, *disable_ = nullptr;
  const DLPackExchange* exchange_ = nullptr;
};

inline Torch torch;

// ---- tensors whose addresses are kept

// Tensors of one to three dimensions as they were found. The storages stay alive with it.
class Snapshot {
 public:
  explicit Snapshot(const pybind11::list& tensors) {
    for (pybind11::handle tensor : tensors) {
      Entry entry{};
      entry.readable = torch.read(tensor.ptr(), entry.seen) && entry.seen.ndim <= 3;
      for (int i = 0; entry.readable && i < entry.seen.ndim; ++i)
        entry.shape[i] = entry.seen.shape[i], entry.strides[i] = entry.seen.strides[i];
      entry.tensor = pybind11::reinterpret_borrow<pybind11::object>(tensor);
      entry.storage = tensor.attr("untyped_storage")();
      entry.bytes = pybind11::len(entry.storage);
      entries_.push_back(std::move(entry));
    }
  }

  // True if every tensor still has its address, shape, strides, dtype, and its storage its
  // size. With `signs`, also if none became a negative view since, which costs as much again.
  bool unchanged(bool signs) const {
    for (const Entry& entry : entries_) {
      DLTensor now;
      if (!entry.readable || !torch.read(entry.tensor.ptr(), now)) return false;
      if (now.data != entry.seen.data || now.ndim != entry.seen.ndim || now.code != entry.seen.code ||
          now.bits != entry.seen.bits)
        return false;
      for (int i = 0; i < now.ndim; ++i)
        if (now.shape[i] != entry.shape[i] || now.strides[i] != entry.strides[i]) return false;
      if (PyObject_Size(entry.storage.ptr()) != entry.bytes) return false;
      if (signs && torch.is_negative(entry.tensor.ptr(), now)) return false;
    }
    return true;
  }

 private:
  struct Entry {
    pybind11::object tensor, storage;
    DLTensor seen;  // its shape and strides are the tensor's own, not kept
    int64_t shape[3], strides[3], bytes;
    bool readable;
  };
  std::vector<Entry> entries_;
};

}  // namespace dflash
