// An op's contract: the shapes, dtypes and layouts that its tensors must have, the rules that its sizes must
// keep, and what a kernel's fields are made of. Python parses it once (ops/contract.py, which also says what
// is wrong with a call that does not fit). Here a call is matched and, for tensors on the CPU, run: checks
// and allocations in Python take longer than a small kernel.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <memory_resource>
#include <string>
#include <vector>

#include "binding/fields.h"
#include "binding/tensors.h"
#include "cpu/base/table.h"

namespace dflash {

// ---- the CPU kernels by name

struct CpuKernel {
  static constexpr size_t kLargest = 512;  // bytes of a params struct
  const Record* fields;
  void (*make)(void* params);
  void (*run)(void* params, int threads);  // without the GIL
};

template <typename Params, void (*CpuKernels::*KERNEL)(const Params&)>
CpuKernel cpu_kernel() {
  static_assert(sizeof(Params) <= CpuKernel::kLargest && alignof(Params) <= 16);
  return {&fields_of<Params>(), [](void* params) { new (params) Params{}; },
          [](void* params, int threads) {
            Params& filled = *static_cast<Params*>(params);
            filled.threads = threads;
            const pybind11::gil_scoped_release release;
            (cpu_kernels().*KERNEL)(filled);
          }};
}

inline const std::map<std::string, CpuKernel>& kernels() {
  static const auto* found = new std::map<std::string, CpuKernel>{
#define KERNEL(name, Params) {#name, cpu_kernel<Params, &CpuKernels::name>()},
#define CPU_KERNEL KERNEL
#include "binding/kernels.def"
  };
  return *found;
}

// ---- a contract

// Instructions of a stack machine on 64-bit integers: pairs of an operation and its operand. Operations are
// counted on from one table to the next, as in ops/contract.py.
using Program = std::vector<int64_t>;
enum Operation : int64_t { kConstant, kSlot, kHas, kTotalRows, kAtLeast, kAtMost, kNot, kOfTensor };

// Of a tensor; the number is what stands before on the stack, a dimension or 0.
constexpr int64_t (*kTensorOperations[])(const DLTensor& t, int64_t i) = {
    [](const DLTensor& t, int64_t) -> int64_t { return t.ndim; },
    [](const DLTensor& t, int64_t i) -> int64_t { return t.shape[i]; },
    [](const DLTensor& t, int64_t i) -> int64_t { return t.strides[i]; },
    [](const DLTensor& t, int64_t) -> int64_t { return row_stride(t, false); },
    [](const DLTensor& t, int64_t) -> int64_t { return t.element_size(); },
    [](const DLTensor& t, int64_t) -> int64_t { return t.is(kDLFloat, 32); },
    [](const DLTensor& t, int64_t) -> int64_t { return t.is(kDLInt, 8); },
};
using Wide = __int128;  // shows what does not fit
constexpr int64_t kOfNumbers = kOfTensor + std::size(kTensorOperations);
constexpr Wide (*kNumberOperations[])(Wide a, Wide b) = {
    [](Wide a, Wide b) -> Wide { return a + b; },
    [](Wide a, Wide b) -> Wide { return a - b; },
    [](Wide a, Wide b) -> Wide { return a * b; },
    [](Wide a, Wide b) -> Wide { return b > 0 ? (a - (a < 0 ? b - 1 : 0)) / b : 0; },  // as Python divides
    [](Wide a, Wide b) -> Wide { return b > 0 ? (a % b + b) % b : 0; },
    [](Wide a, Wide b) -> Wide { return std::min(a, b); },
    [](Wide a, Wide b) -> Wide { return std::max(a, b); },
    [](Wide a, Wide b) -> Wide { return a == b; },
    [](Wide a, Wide b) -> Wide { return a != b; },
    [](Wide a, Wide b) -> Wide { return a < b; },
    [](Wide a, Wide b) -> Wide { return a <= b; },
    [](Wide a, Wide b) -> Wide { return a && b; },
    [](Wide a, Wide b) -> Wide { return a || b; },
};

// A tensor of a call.
struct Seen {
  PyObject* object;
  DLTensor t;
  Span span;
  bool written;
};

// A call that is being matched, and what it gave names to.
struct Call {
  static constexpr size_t kMaxSlots = 64, kMaxTensors = 24, kFew = 16;

  Call(PyObject* const* given, size_t num_slots, size_t num_tensors) : arguments(given) {
    seen.reserve(kFew);
    std::fill_n(slots, num_slots, 0), std::fill_n(first, num_tensors, 0), std::fill_n(count, num_tensors, 0);
  }
  // The tensors of a contract's i-th; none if it is None.
  const Seen* tensors(int i) const { return count[i] ? &seen[first[i]] : nullptr; }
  float number(int argument) const { return float(PyFloat_AsDouble(arguments[argument])); }
  // The kernels' code of the storage type.
  DType dtype() const {
    const DLTensor& t = seen[storage].t;
    return t.is(kDLFloat, 32) ? DType::kFloat32 : t.code == kDLFloat ? DType::kFloat16 : DType::kBFloat16;
  }

  PyObject* const* arguments;
  alignas(Seen) std::byte memory[kFew * sizeof(Seen)];  // allocating takes longer than a tensor's checks
  std::pmr::monotonic_buffer_resource resource{memory, sizeof(memory)};
  std::pmr::vector<Seen> seen{&resource};
  std::vector<pybind11::object> held;          // lists, which other threads may empty while the kernel runs
  int first[kMaxTensors], count[kMaxTensors];  // of each rule's tensors in `seen`
  int64_t slots[kMaxSlots];
  uint64_t bound = 0;
  bool overflowed = false, is_on_cpu = false;       // the latter: all tensors must be
  int storage = -1, leading = -1, num_leading = 0;  // tensors in `seen`, and the leading dimensions of one
};

// Runs an op that is more than one kernel with the contract's fields (bodies.h); false if the CPU's kernels
// do not take the call.
using Body = bool (*)(const Call& call, void* const* outputs);

class Contract {
 public:
  // `spec` is what ops/contract.py made of the text; without a body the kernel that it names runs.
  Contract(const pybind11::dict& spec, Body body) : body_(body) {
    const auto get = [&spec](const char* name) { return spec[name]; };
    for (pybind11::handle entry : get("arguments")) arguments_.push_back(entry.cast<std::pair<char, int>>());
    for (pybind11::handle entry : get("tensors")) tensors_.push_back(TensorRule(entry));
    rules_ = get("rules").cast<std::vector<Program>>();
    derived_ = get("derived").cast<std::vector<std::pair<int, Program>>>();
    for (pybind11::handle entry : get("outputs")) outputs_.push_back(Output(entry));
    const auto intern = [&get](const char* list, std::vector<PyObject*>& names) {
      for (pybind11::handle name : get(list))
        names.push_back(PyUnicode_InternFromString(name.cast<std::string>().c_str()));
    };
    intern("parameters", parameters_), intern("names", names_);
    constants_ = get("constants").cast<std::vector<float>>();
    choices_ = get("choices");
    if (names_.size() > Call::kMaxSlots || tensors_.size() > Call::kMaxTensors || outputs_.size() > kMaxOutputs)
      throw std::length_error("a contract has too many names, tensors or outputs");
    const auto found = kernels().find(get("kernel").cast<std::string>());
    if (found == kernels().end()) return;
    kernel_ = &found->second;
    const auto sources = get("sources").cast<std::map<std::string, std::pair<char, int>>>();
    for (const Field& field : *kernel_->fields) {
      const auto source = sources.find(pybind11::handle(field.name).cast<std::string>());
      if (source != sources.end()) fills_.push_back({&field, source->second.first, source->second.second});
    }
    has_dtype_ = std::any_of(fills_.begin(), fills_.end(), [](const Fill& fill) { return fill.source == 'd'; });
  }

  size_t arity() const { return arguments_.size(); }
  bool has_dtype() const { return has_dtype_; }
  bool runs() const { return body_ || kernel_; }

  // The arguments, sizes and fields by name, if the call fits as it is; else null, without an error set.
  PyObject* match(PyObject* const* arguments) const {
    const Torch::ModesOff guard(torch);
    Call call(arguments, names_.size(), tensors_.size());
    if (!fits(call)) return nullptr;
    pybind11::dict named;
    for (size_t i = 0; i < arguments_.size(); ++i) PyDict_SetItem(named.ptr(), parameters_[i], arguments[i]);
    for (size_t i = 0; i < names_.size(); ++i) named[names_[i]] = call.slots[i];
    if (has_dtype_ && call.storage >= 0) named["dtype"] = int(call.dtype());
    return named.release().ptr();
  }

  // Runs a call on the CPU; null, without an error set, if it does not fit as it is.
  PyObject* run(PyObject* const* arguments) const {
    const Torch::ModesOff guard(torch);
    Call call(arguments, names_.size(), tensors_.size());
    call.is_on_cpu = true;
    if (!fits(call)) return nullptr;
    pybind11::object made[kMaxOutputs];
    void* addresses[kMaxOutputs] = {};
    for (size_t i = 0; i < outputs_.size(); ++i) {
      made[i] = allocate(call, outputs_[i]);
      DLTensor t;
      if (!torch.is_exact(made[i].ptr()) || !torch.read(made[i].ptr(), t) || t.device_type != kDLCPU) return nullptr;
      addresses[i] = t.data;
    }
    if (body_) {
      if (!body_(call, addresses)) return nullptr;
    } else {
      alignas(16) char params[CpuKernel::kLargest];
      kernel_->make(params);
      Lists lists;
      for (const Fill& fill : fills_) put(call, fill, addresses, params, lists);
      kernel_->run(params, torch.num_threads());
    }
    if (outputs_.empty()) Py_RETURN_NONE;
    if (outputs_.size() == 1) return made[0].release().ptr();
    pybind11::tuple results(outputs_.size());
    for (size_t i = 0; i < outputs_.size(); ++i) results[i] = made[i];
    return results.release().ptr();
  }

 private:
  static constexpr size_t kMaxOutputs = 8;
  // The dtype of a tensor: the op's storage type, or that or another; any; or one by its name.
  enum class Kind : int { kStorage, kStorageOrFloat32, kStorageOrInt8, kAny, kInt64, kFloat32, kInt8 };
  // Dense, written or read with evenly spaced rows, or with that many of its last dimensions dense.
  static constexpr int kDense = 0, kEvenRows = -1;

  struct TensorRule {
    explicit TensorRule(pybind11::handle entry) {
      int number;
      std::tie(argument, number, layout, leading, count, optional, written, last_may_miss, shape) =
          entry.cast<std::tuple<int, int, int, int, int, bool, bool, bool, std::vector<Program>>>();
      kind = Kind(number);
    }
    int argument, layout, leading, count;  // the slots of leading dimensions and of a list's length, or -1
    Kind kind;
    bool optional, written, last_may_miss;
    std::vector<Program> shape;  // empty for any size
  };
  struct Output {
    explicit Output(pybind11::handle entry) {
      int number;
      std::tie(number, has_leading, shape) = entry.cast<std::tuple<int, bool, std::vector<Program>>>();
      kind = Kind(number);
    }
    Kind kind;
    bool has_leading;
    std::vector<Program> shape;
  };
  struct Fill {
    const Field* field;
    char source;  // t: a tensor or list, o: an output, s: a slot, f: a float, k: a constant, d: the dtype
    int index;
  };

  bool fits(Call& call) const {
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (!read_argument(call, i)) return false;
    for (size_t i = 0; i < tensors_.size(); ++i)
      if (!read_tensors(call, i)) return false;
    derive(call);  // sizes may be among the derived
    for (size_t i = 0; i < tensors_.size(); ++i) {
      const TensorRule& rule = tensors_[i];
      for (int j = 0; j < call.count[i]; ++j)
        if (!has_sizes(call, rule, call.seen[call.first[i] + j])) return false;
    }
    for (const Program& rule : rules_)
      if (!evaluate(call, rule)) return false;
    return !call.overflowed && !meets(call);
  }

  void derive(Call& call) const {
    for (const auto& [slot, program] : derived_) call.slots[slot] = evaluate(call, program);
  }

  bool read_argument(Call& call, size_t i) const {
    PyObject* object = call.arguments[i];
    const auto [kind, slot] = arguments_[i];
    if (slot >= 0) call.bound |= uint64_t(1) << slot;
    switch (kind) {
      case 'i': {
        int overflow = 0;
        if (!PyLong_Check(object)) return false;
        call.slots[slot] = PyLong_AsLongLongAndOverflow(object, &overflow);
        return overflow == 0;
      }
      case 'b':
        call.slots[slot] = object == Py_True;
        return PyBool_Check(object);
      case 'f':
        if (PyFloat_Check(object)) return true;
        if (!PyLong_CheckExact(object)) return false;
        PyFloat_AsDouble(object);  // too large a number sets an error
        return !PyErr_Occurred();
      case 'c': {
        PyObject* code = PyUnicode_CheckExact(object) ? PyDict_GetItem(choices_.ptr(), object) : nullptr;
        if (!code) return false;
        call.slots[slot] = PyLong_AsLongLong(code);
        return true;
      }
      default:
        return true;
    }
  }

  bool read_tensors(Call& call, size_t i) const {
    const TensorRule& rule = tensors_[i];
    PyObject* object = call.arguments[rule.argument];
    call.first[i] = int(call.seen.size());
    if (object == Py_None) return rule.optional;
    if (rule.count < 0) {
      call.count[i] = 1;
      return read_tensor(call, rule, object);
    }
    if (!PyList_Check(object) && !PyTuple_Check(object)) return false;
    auto list = pybind11::reinterpret_steal<pybind11::tuple>(PySequence_Tuple(object));
    if (!list) {
      PyErr_Clear();
      return false;
    }
    call.count[i] = int(list.size());
    const int64_t number = call.count[i];
    if (!bind(call, rule.count, number)) return false;
    for (int j = 0; j < call.count[i]; ++j)
      if (!read_tensor(call, rule, PyTuple_GET_ITEM(list.ptr(), j))) return false;
    call.held.push_back(std::move(list));
    return true;
  }

  bool read_tensor(Call& call, const TensorRule& rule, PyObject* object) const {
    // 1. Its memory and dtype
    call.seen.push_back({object, {}, {}, rule.written});
    Seen& seen = call.seen.back();
    DLTensor& t = seen.t;
    if (!torch.is_exact(object) || !torch.read(object, t)) return false;
    const DLTensor& first_of_all = call.seen[0].t;
    if (t.device_type != (call.is_on_cpu ? kDLCPU : first_of_all.device_type)) return false;
    if (t.device_id != first_of_all.device_id || torch.is_negative(object)) return false;
    if (!torch.span_of(object, t, seen.span) || !has_kind(call, rule.kind, t)) return false;
    // 2. Its layout
    const int dims = int(rule.shape.size()), leading = t.ndim - dims;
    if (t.ndim > kMaxDimensions || !has_layout(rule.layout, rule.written, t)) return false;
    // 3. The sizes that it gives names to
    if (rule.leading < 0) {
      if (leading != 0 && !(leading == -1 && rule.last_may_miss)) return false;
    } else if (leading < 0) {
      return false;
    } else {
      int64_t product = 1;
      for (int d = 0; d < leading; ++d) product *= t.shape[d];
      if (!bind(call, rule.leading, product)) return false;
      if (call.leading < 0) call.leading = int(call.seen.size()) - 1, call.num_leading = leading;
      const DLTensor& first = call.seen[call.leading].t;
      if (leading != call.num_leading || !std::equal(t.shape, t.shape + leading, first.shape)) return false;
    }
    const int skipped = std::max(leading, 0);
    for (int d = 0; d + skipped < t.ndim; ++d) {
      const Program& size = rule.shape[d];
      if (is_name(size) && !bind(call, int(size[1]), t.shape[d + skipped])) return false;
    }
    return true;
  }

  static bool is_name(const Program& size) { return size.size() == 2 && size[0] == kSlot; }

  static bool bind(Call& call, int slot, int64_t value) {
    const uint64_t bit = uint64_t(1) << slot;
    if (call.bound & bit) return call.slots[slot] == value;
    call.bound |= bit;
    call.slots[slot] = value;
    return true;
  }

  bool has_kind(Call& call, Kind kind, const DLTensor& t) const {
    if (kind == Kind::kAny) return true;
    if (kind == Kind::kInt64) return t.is(kDLInt, 64);
    if (kind == Kind::kFloat32) return t.is(kDLFloat, 32);
    if (kind == Kind::kInt8) return t.is(kDLInt, 8);
    if (call.storage < 0) {
      call.storage = int(call.seen.size()) - 1;
      return !has_dtype_ || t.is(kDLFloat, 32) || t.is(kDLBfloat, 16) ||
             (t.device_type != kDLCPU && t.is(kDLFloat, 16));
    }
    const DLTensor& storage = call.seen[call.storage].t;
    return t.is(storage.code, storage.bits) || (kind == Kind::kStorageOrFloat32 && t.is(kDLFloat, 32)) ||
           (kind == Kind::kStorageOrInt8 && t.is(kDLInt, 8));
  }

  static bool has_layout(int layout, bool written, const DLTensor& t) {
    if (layout == kEvenRows) return row_stride(t, written) >= 0;
    int64_t step = 1;
    const int last = layout == kDense ? 0 : std::max(t.ndim - layout, 0);
    bool dense = true;
    for (int i = t.ndim - 1; i >= last; step *= t.shape[i--])
      dense = dense && (t.shape[i] == 1 || t.strides[i] == step);
    return dense || (step == 0 && layout == kDense);
  }

  bool has_sizes(Call& call, const TensorRule& rule, const Seen& seen) const {
    const int skipped = rule.leading < 0 ? 0 : seen.t.ndim - int(rule.shape.size());
    for (int d = 0; d + skipped < seen.t.ndim; ++d) {
      const Program& size = rule.shape[d];
      if (size.empty()) continue;
      const int64_t want = is_name(size) ? call.slots[size[1]] : evaluate(call, size);
      if (want != seen.t.shape[d + skipped]) return false;
    }
    return true;
  }

  // True if a tensor that is written shares memory with another, as far as their spans say.
  static bool meets(const Call& call) {
    for (size_t i = 0; i < call.seen.size(); ++i)
      for (size_t j = 0; call.seen[i].written && j < call.seen.size(); ++j)
        if (i != j && call.seen[i].span.meets(call.seen[j].span)) return true;
    return false;
  }

  int64_t evaluate(Call& call, const Program& program) const {
    int64_t stack[16], *top = stack - 1;
    for (size_t i = 0; i < program.size(); i += 2) {
      const int64_t operation = program[i], operand = program[i + 1];
      if (operation == kConstant) {
        *++top = operand;
      } else if (operation == kSlot) {
        *++top = call.slots[operand];
      } else if (operation == kHas) {
        *++top = call.count[operand] > 0;
      } else if (operation == kTotalRows) {
        *++top = 0;
        for (int j = 0; j < call.count[operand]; ++j) *top += call.tensors(int(operand))[j].t.shape[0];
      } else if (operation == kAtLeast) {
        *top = PyFloat_AsDouble(call.arguments[operand]) >= double(*top);
      } else if (operation == kAtMost) {
        *top = PyFloat_AsDouble(call.arguments[operand]) <= double(*top);
      } else if (operation == kNot) {
        *top = !*top;
      } else if (operation < kOfNumbers) {
        const Seen* seen = call.tensors(int(operand));
        *top = seen ? kTensorOperations[operation - kOfTensor](seen->t, *top) : 0;
      } else {
        const Wide b = *top--, value = kNumberOperations[operation - kOfNumbers](*top, b);
        *top = int64_t(value);
        call.overflowed |= *top != value;
      }
    }
    return *top;
  }

  pybind11::object allocate(Call& call, const Output& output) const {
    // 1. Its shape
    int64_t shape[kMaxDimensions];
    int ndim = 0;
    if (output.has_leading)
      for (; ndim < call.num_leading; ++ndim) shape[ndim] = call.seen[call.leading].t.shape[ndim];
    for (const Program& size : output.shape) shape[ndim++] = evaluate(call, size);
    // 2. A tensor of its dtype to make it like
    const auto [code, bits] = output.kind == Kind::kInt64 ? std::pair(kDLInt, uint8_t(64))
                              : output.kind == Kind::kFloat32
                                  ? std::pair(kDLFloat, uint8_t(32))
                                  : std::pair(call.seen[call.storage].t.code, call.seen[call.storage].t.bits);
    const Seen* like = nullptr;
    for (const Seen& seen : call.seen) {
      if (!seen.t.is(code, bits)) continue;
      if (!like) like = &seen;
      if (seen.t.ndim == ndim && std::equal(shape, shape + ndim, seen.t.shape) && has_layout(kDense, false, seen.t))
        return torch.empty_like(seen.object);  // half the time of new_empty
    }
    if (like) return torch.new_empty(like->object, shape, ndim);
    return torch.new_empty(call.seen[0].object, shape, ndim, torch.dtype_of(code, bits));
  }

  void put(const Call& call, const Fill& fill, void* const* outputs, char* params, Lists& lists) const {
    char* to = params + fill.field->offset;
    const auto store = [to](const auto& value) { std::memcpy(to, &value, sizeof(value)); };
    switch (fill.source) {
      case 't': {
        const Seen* seen = call.tensors(fill.index);
        if (fill.field->most == 1) return store(seen ? seen->t.data : nullptr);
        lists.emplace_back();
        for (int i = 0; i < call.count[fill.index]; ++i) lists.back().push_back(int64_t(seen[i].t.data));
        return store(lists.back().data());
      }
      case 'o':
        return store(outputs[fill.index]);
      case 'f':
        return store(call.number(fill.index));
      case 'k':
        return store(constants_[fill.index]);
      case 'd':
        return store(call.dtype());
      default: {
        const int64_t value = call.slots[fill.index];
        if (fill.field->kind == Field::kInteger) return store(value);
        if (fill.field->kind == Field::kBool) return store(value != 0);
        return store(int32_t(value));
      }
    }
  }

  // Of each argument its kind, t(ensor), i(nteger), b(ool), f(loat), c(hoice) or o(ther), and its slot or -1.
  std::vector<std::pair<char, int>> arguments_;
  std::vector<TensorRule> tensors_;
  std::vector<Program> rules_;
  std::vector<std::pair<int, Program>> derived_;
  std::vector<Output> outputs_;
  std::vector<PyObject*> parameters_, names_;  // of the arguments and of the slots
  std::vector<float> constants_;
  pybind11::dict choices_;
  Body body_;
  const CpuKernel* kernel_ = nullptr;
  bool has_dtype_ = true;  // false for kernels that only move bytes, of any dtype
  std::vector<Fill> fills_;
};

// ---- as Python's functions, which cost less than pybind11's: (arguments...)

template <PyObject* (Contract::*CALL)(PyObject* const*) const>
PyObject* call_contract(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  try {
    const auto& contract = *static_cast<Contract*>(PyCapsule_GetPointer(self, nullptr));
    if (size_t(count) == contract.arity()) {
      if (PyObject* result = (contract.*CALL)(arguments)) return result;
      if (PyErr_Occurred()) PyErr_Clear();
    }
    Py_RETURN_NOTIMPLEMENTED;
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// (run, match, has_dtype) of a contract, which lives as long as the process. The first two take the op's
// arguments in order and return NotImplemented for a call that does not fit as it is.
inline pybind11::tuple contract(const pybind11::dict& spec, Body body) {
  const auto fast = [](auto* function) { return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function)); };
  static PyMethodDef run{"run", fast(&call_contract<&Contract::run>), METH_FASTCALL, nullptr};
  static PyMethodDef match{"match", fast(&call_contract<&Contract::match>), METH_FASTCALL, nullptr};
  const auto* made = new Contract(spec, body);
  const pybind11::capsule self(made);
  const auto bound = [&self](PyMethodDef& method) {
    return pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(&method, self.ptr()));
  };
  const auto runs = made->runs() ? bound(run) : pybind11::none();
  return pybind11::make_tuple(runs, bound(match), made->has_dtype());
}

}  // namespace dflash
