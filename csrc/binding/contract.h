// An op's contract: the shapes, dtypes and layouts that its tensors must have, the rules that its sizes must
// keep, and what a kernel's fields are made of. Python parses it once (ops/contract.py, which also says what
// is wrong with a call that does not fit). Here a call is matched and, for tensors on the CPU, run: checks
// and allocations in Python take longer than a small kernel.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <map>
#include <optional>
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
  void (*run)(void* params, int threads, int64_t bytes);
};

// Runs a kernel on tensors of so many bytes: without the GIL, unless it takes less time than to give that away.
template <typename Params>
void run_kernel(void (*CpuKernels::*kernel)(const Params&), Params& p, int threads, int64_t bytes) {
  constexpr int64_t kFewBytes = 1 << 16;
  p.threads = threads;
  std::optional<pybind11::gil_scoped_release> release;
  if (bytes > kFewBytes) release.emplace();
  (cpu_kernels().*kernel)(p);
}

template <typename Params, void (*CpuKernels::*KERNEL)(const Params&)>
CpuKernel cpu_kernel() {
  static_assert(sizeof(Params) <= CpuKernel::kLargest && alignof(Params) <= 16);
  return {&fields_of<Params>(), [](void* params) { new (params) Params{}; },
          [](void* params, int threads, int64_t bytes) {
            run_kernel(KERNEL, *static_cast<Params*>(params), threads, bytes);
          }};
}

inline const std::map<std::string, CpuKernel>& kernels() {
  static const auto* found = new std::map<std::string, CpuKernel>{
#define KERNEL(name, Params) {#name, cpu_kernel<Params, &CpuKernels::name>()},
      DFLASH_KERNELS(KERNEL, KERNEL, KERNEL)
#undef KERNEL
  };
  return *found;
}

// ---- a contract

// Instructions of a stack machine on 64-bit integers: an operation; a slot, argument or tensor; a constant or
// dimension. Operations are counted on from one table to the next, as in ops/contract.py.
using Program = std::vector<std::tuple<int, int, int64_t>>;
enum Operation : int { kConstant, kSlot, kHas, kTotalRows, kAtLeast, kAtMost, kNot, kOfTensor };

constexpr int64_t (*kTensorOperations[])(const DLTensor& t, int64_t dim) = {
    [](const DLTensor& t, int64_t) -> int64_t { return t.ndim; },
    [](const DLTensor& t, int64_t dim) -> int64_t { return t.shape[dim]; },
    [](const DLTensor& t, int64_t dim) -> int64_t { return t.strides[dim]; },
    [](const DLTensor& t, int64_t) -> int64_t { return row_stride(t, false); },
    [](const DLTensor& t, int64_t) -> int64_t { return t.element_size(); },
    [](const DLTensor& t, int64_t) -> int64_t { return t.dtype() == kDLFloat32; },
};
using Wide = __int128;  // shows what does not fit
constexpr int kOfNumbers = kOfTensor + std::size(kTensorOperations);
constexpr Wide (*kNumberOperations[])(int64_t a, int64_t b) = {
    [](int64_t a, int64_t b) { return Wide(a) + b; },
    [](int64_t a, int64_t b) { return Wide(a) - b; },
    [](int64_t a, int64_t b) { return Wide(a) * b; },
    [](int64_t a, int64_t b) { return Wide(b > 0 ? a / b - (a % b < 0) : 0); },  // as Python divides
    [](int64_t a, int64_t b) { return Wide(b > 0 ? a % b + (a % b < 0 ? b : 0) : 0); },
    [](int64_t a, int64_t b) { return Wide(std::min(a, b)); },
    [](int64_t a, int64_t b) { return Wide(std::max(a, b)); },
    [](int64_t a, int64_t b) { return Wide(a == b); },
    [](int64_t a, int64_t b) { return Wide(a != b); },
    [](int64_t a, int64_t b) { return Wide(a < b); },
    [](int64_t a, int64_t b) { return Wide(a <= b); },
    [](int64_t a, int64_t b) { return Wide(a && b); },
    [](int64_t a, int64_t b) { return Wide(a || b); },
    [](int64_t a, int64_t b) { return Wide(row_size(Format(a), b)); },
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
  static constexpr size_t kMaxSlots = 64, kMaxTensors = 24;

  Call(PyObject* const* given, size_t num_slots, size_t num_tensors) : arguments(given) {
    seen.swap(spare), seen.clear();
    std::fill_n(slots, num_slots, 0), std::fill_n(first, num_tensors, 0), std::fill_n(count, num_tensors, 0);
  }
  ~Call() { seen.swap(spare); }
  // The tensors of a contract's i-th; none if it is None.
  const Seen* tensors(int64_t i) const { return count[i] ? &seen[first[i]] : nullptr; }
  double number(int64_t argument) const { return PyFloat_AsDouble(arguments[argument]); }
  // The kernels' code of the storage type.
  DType dtype() const {
    return storage == kDLFloat32 ? DType::kFloat32 : storage == kDLFloat16 ? DType::kFloat16 : DType::kBFloat16;
  }
  // Gives a slot its value; false if it has another.
  bool bind(int slot, int64_t value) {
    const uint64_t bit = uint64_t(1) << slot;
    if (bound & bit) return slots[slot] == value;
    bound |= bit, slots[slot] = value;
    return true;
  }

  PyObject* const* arguments;
  inline static thread_local std::vector<Seen> spare;  // memory for the next call: allocating takes as long as a check
  std::vector<Seen> seen;
  std::vector<pybind11::object> held;          // copies of lists
  int first[kMaxTensors], count[kMaxTensors];  // of each rule's tensors in `seen`
  int64_t slots[kMaxSlots], bytes = 0;         // of all tensors
  uint64_t bound = 0;
  bool overflowed = false, is_on_cpu = false;      // the latter: all tensors must be
  Format format = Format::kDense;                  // of the weights
  int storage = 0, leading = -1, num_leading = 0;  // the storage type; a tensor in `seen`, and its leading dimensions
};

// Runs an op that is more than one kernel with the contract's fields (body_of in bindings.cpp); false if the CPU's
// kernels do not take the call.
using Body = bool (*)(const Call& call, void* const* outputs);

class Contract {
 public:
  // `spec` is what ops/contract.py made of the text; without a body the kernel that it names runs.
  Contract(const pybind11::dict& spec, Body body) : body_(body) {
    const auto get = [&spec](const char* name, auto& field) {
      field = spec[name].cast<std::decay_t<decltype(field)>>();
    };
    get("arguments", arguments_), get("rules", rules_), get("derived", derived_), get("format", format_);
    for (const auto& codes : spec["choices"].cast<std::vector<std::map<std::string, int>>>()) {
      choices_.emplace_back();
      for (const auto& [name, code] : codes)
        choices_.back().emplace_back(PyUnicode_InternFromString(name.c_str()), code);
    }
    for (pybind11::handle entry : spec["tensors"]) tensors_.emplace_back(entry);
    for (pybind11::handle entry : spec["outputs"]) outputs_.emplace_back(entry);
    for (const auto& [key, names] : {std::pair("parameters", &parameters_), std::pair("names", &names_)})
      for (pybind11::handle name : spec[key])
        names->push_back(PyUnicode_InternFromString(name.cast<std::string>().c_str()));
    if (names_.size() > Call::kMaxSlots || tensors_.size() > Call::kMaxTensors || outputs_.size() > kMaxOutputs)
      throw std::length_error("a contract has too many names, tensors or outputs");
    const auto found = kernels().find(spec["kernel"].cast<std::string>());
    if (found == kernels().end()) return;
    kernel_ = &found->second;
    const auto sources = spec["sources"].cast<std::map<std::string, std::pair<char, int>>>();
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
    if (has_dtype_ && call.storage) named["dtype"] = int(call.dtype());
    return named.release().ptr();
  }

  // Runs a call on the CPU; null, without an error set, if it does not fit as it is.
  PyObject* run(PyObject* const* arguments) const {
    const Torch::ModesOff guard(torch);
    Call call(arguments, names_.size(), tensors_.size());
    call.is_on_cpu = true;
    if (!fits(call) || !cpu_reads(call.format)) return nullptr;
    pybind11::object made[kMaxOutputs];
    void* addresses[kMaxOutputs] = {};
    for (size_t i = 0; i < outputs_.size(); ++i) {
      made[i] = allocate(call, outputs_[i]);
      DLTensor t;
      if (!torch.is_exact(made[i].ptr()) || !torch.read(made[i].ptr(), t) || t.device_type != kDLCPU) return nullptr;
      addresses[i] = t.data;
      call.bytes += t.num_bytes();
    }
    if (body_) {
      if (!body_(call, addresses)) return nullptr;
    } else {
      alignas(16) char params[CpuKernel::kLargest];
      kernel_->make(params);
      Lists lists;
      for (const Fill& fill : fills_) put(call, fill, addresses, params, lists);
      kernel_->run(params, torch.num_threads(), call.bytes);
    }
    if (outputs_.empty()) Py_RETURN_NONE;
    if (outputs_.size() == 1) return made[0].release().ptr();
    pybind11::tuple results(outputs_.size());
    for (size_t i = 0; i < outputs_.size(); ++i) results[i] = made[i];
    return results.release().ptr();
  }

 private:
  static constexpr size_t kMaxOutputs = 8;
  // Layouts: dense; evenly spaced rows; else so many of the last dimensions are dense.
  static constexpr int kDense = 0, kEvenRows = -1;
  static constexpr int kStorage = 0, kAny = -1, kOfFormat = -2;  // dtypes beside those of DLPack

  struct TensorRule {
    explicit TensorRule(pybind11::handle entry) {
      std::tie(argument, dtype, or_dtype, layout, leading, count, optional, written, last_may_miss, names, sizes) =
          entry.cast<std::tuple<int, int, int, int, int, int, bool, bool, bool, std::vector<int>,
                                std::vector<std::pair<int, Program>>>>();
    }
    int argument, dtype, or_dtype, layout;
    int leading, count;  // the slots of leading dimensions and of a list's length, or -1
    bool optional, written, last_may_miss;
    std::vector<int> names;                      // the slot that each dimension gives its size to, or -1
    std::vector<std::pair<int, Program>> sizes;  // what other dimensions must be
  };
  struct Output {
    explicit Output(pybind11::handle entry) {
      std::tie(dtype, torch_dtype, has_leading, shape) =
          entry.cast<std::tuple<int, pybind11::object, bool, std::vector<Program>>>();
    }
    int dtype;
    pybind11::object torch_dtype;
    bool has_leading;
    std::vector<Program> shape;
  };
  struct Fill {
    const Field* field;
    char source;  // t: a tensor or list, o: an output, s: a slot, f: a float, d: the dtype
    int index;
  };

  bool fits(Call& call) const {
    for (size_t i = 0; i < arguments_.size(); ++i)
      if (!read_argument(call, i)) return false;
    if (format_ >= 0) call.format = Format(call.slots[format_]);
    for (size_t i = 0; i < tensors_.size(); ++i)
      if (!read_tensors(call, i)) return false;
    for (const auto& [slot, program] : derived_) call.slots[slot] = evaluate(call, program);
    for (size_t i = 0; i < tensors_.size(); ++i)
      for (int j = 0; j < call.count[i]; ++j)
        if (!has_sizes(call, tensors_[i], call.seen[call.first[i] + j].t)) return false;
    for (const Program& rule : rules_)
      if (!evaluate(call, rule)) return false;
    return !call.overflowed && !meets(call);
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
        if (!PyUnicode_CheckExact(object)) return false;
        const auto find = [&](auto is_it) {  // the very object nearly always
          return std::any_of(choices_[i].begin(), choices_[i].end(), [&](const auto& choice) {
            call.slots[slot] = choice.second;
            return is_it(choice.first);
          });
        };
        return find([object](PyObject* name) { return name == object; }) ||
               find([object](PyObject* name) { return PyUnicode_Compare(name, object) == 0; });
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
    if (!PyTuple_CheckExact(object)) {  // other threads may empty it while the kernel runs
      call.held.push_back(pybind11::reinterpret_steal<pybind11::object>(PySequence_Tuple(object)));
      object = call.held.back().ptr();
      if (!object) throw pybind11::error_already_set();
    }
    call.count[i] = int(PyTuple_GET_SIZE(object));
    if (!call.bind(rule.count, call.count[i])) return false;
    for (int j = 0; j < call.count[i]; ++j)
      if (!read_tensor(call, rule, PyTuple_GET_ITEM(object, j))) return false;
    return true;
  }

  bool read_tensor(Call& call, const TensorRule& rule, PyObject* object) const {
    // 1. Its memory, dtype and layout
    Seen& seen = call.seen.emplace_back();
    seen.object = object, seen.written = rule.written;
    const DLTensor &t = seen.t, &first = call.seen[0].t;
    if (!torch.is_exact(object) || !torch.read(object, seen.t) || t.ndim > kMaxDimensions) return false;
    if (t.device_type != (call.is_on_cpu ? kDLCPU : first.device_type) || t.device_id != first.device_id) return false;
    if (torch.is_negative(object, t) || !torch.span_of(object, t, seen.span)) return false;
    if (!has_dtype(call, rule, t) || !has_layout(rule.layout, rule.written, t)) return false;
    call.bytes += int64_t(seen.span.end - seen.span.begin);
    // 2. Its leading dimensions
    const int leading = t.ndim - int(rule.names.size());
    if (rule.leading < 0) {
      if (leading != 0 && !(leading == -1 && rule.last_may_miss)) return false;
    } else {
      if (leading < 0) return false;
      int64_t product = 1;
      for (int d = 0; d < leading; ++d) product *= t.shape[d];
      if (call.leading < 0) call.leading = int(call.seen.size()) - 1, call.num_leading = leading;
      const int64_t* shape = call.seen[call.leading].t.shape;
      if (leading != call.num_leading || !std::equal(t.shape, t.shape + leading, shape)) return false;
      if (!call.bind(rule.leading, product)) return false;
    }
    // 3. The sizes that it gives names to
    const int skipped = std::max(leading, 0);
    for (int d = skipped; d < t.ndim; ++d)
      if (const int slot = rule.names[d - skipped]; slot >= 0 && !call.bind(slot, t.shape[d])) return false;
    return true;
  }

  bool has_dtype(Call& call, const TensorRule& rule, const DLTensor& t) const {
    const int dtype = t.dtype();
    if (rule.dtype == kOfFormat && call.format != Format::kDense) return dtype == kDLUInt8;
    if (rule.dtype != kStorage && rule.dtype != kOfFormat) return rule.dtype == kAny || rule.dtype == dtype;
    if (call.storage) return dtype == call.storage || dtype == rule.or_dtype;
    call.storage = dtype;
    return !has_dtype_ || dtype == kDLFloat32 || dtype == kDLBFloat16 ||
           (dtype == kDLFloat16 && t.device_type != kDLCPU);
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

  bool has_sizes(Call& call, const TensorRule& rule, const DLTensor& t) const {
    const int skipped = std::max(t.ndim - int(rule.names.size()), 0);
    for (const auto& [d, size] : rule.sizes)
      if (d + skipped < t.ndim && t.shape[d + skipped] != evaluate(call, size)) return false;
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
    for (const auto& [operation, place, number] : program) {
      if (operation == kConstant) {
        *++top = number;
      } else if (operation == kSlot) {
        *++top = call.slots[place];
      } else if (operation == kHas) {
        *++top = call.count[place] > 0;
      } else if (operation == kTotalRows) {
        *++top = 0;
        for (int i = 0; i < call.count[place]; ++i) *top += call.tensors(place)[i].t.shape[0];
      } else if (operation == kAtLeast) {
        *top = call.number(place) >= double(*top);
      } else if (operation == kAtMost) {
        *top = call.number(place) <= double(*top);
      } else if (operation == kNot) {
        *top = !*top;
      } else if (operation < kOfNumbers) {
        const Seen* seen = call.tensors(place);
        *++top = seen ? kTensorOperations[operation - kOfTensor](seen->t, number) : 0;
      } else {
        const int64_t b = *top--;
        const Wide value = kNumberOperations[operation - kOfNumbers](*top, b);
        *top = int64_t(value);
        call.overflowed |= *top != value;
      }
    }
    return *top;
  }

  pybind11::object allocate(Call& call, const Output& output) const {
    int64_t shape[kMaxDimensions];
    const int leading = output.has_leading ? call.num_leading : 0;
    if (leading) std::copy_n(call.seen[call.leading].t.shape, leading, shape);
    int ndim = leading;
    for (const Program& size : output.shape) shape[ndim++] = evaluate(call, size);
    // Like a tensor of its dtype, which takes less time than to name that
    const int dtype = output.dtype == kStorage ? call.storage : output.dtype;
    const Seen* like = nullptr;
    for (const Seen& seen : call.seen) {
      if (seen.t.dtype() != dtype) continue;
      if (seen.t.ndim == ndim && std::equal(shape, shape + ndim, seen.t.shape) && has_layout(kDense, false, seen.t))
        return torch.empty_like(seen.object);  // half the time of new_empty
      if (!like) like = &seen;
    }
    if (like) return torch.new_empty(like->object, shape, ndim);
    return torch.new_empty(call.seen[0].object, shape, ndim, output.torch_dtype.ptr());
  }

  void put(const Call& call, const Fill& fill, void* const* outputs, char* params, Lists& lists) const {
    const auto [field, source, index] = fill;
    const auto store = [to = params + field->offset](auto value) { std::memcpy(to, &value, sizeof(value)); };
    if (source == 's') {
      const int64_t value = call.slots[index];
      if (field->kind == Field::kInteger) return store(value);
      return field->kind == Field::kBool ? store(value != 0) : store(int32_t(value));
    }
    if (source == 'f') return store(float(call.number(index)));
    if (source == 'd') return store(call.dtype());
    if (source == 'o') return store(outputs[index]);
    const Seen* seen = call.tensors(index);
    if (field->most == 1) return store(seen ? seen->t.data : nullptr);
    lists.emplace_back();
    for (int i = 0; i < call.count[index]; ++i) lists.back().push_back(int64_t(seen[i].t.data));
    store(lists.back().data());
  }

  // Of each argument its kind, t(ensor), i(nteger), b(ool), f(loat), c(hoice) or o(ther), and its slot or -1.
  std::vector<std::pair<char, int>> arguments_;
  std::vector<TensorRule> tensors_;
  std::vector<Program> rules_;
  std::vector<std::pair<int, Program>> derived_;
  std::vector<Output> outputs_;
  std::vector<PyObject*> parameters_, names_;                    // of the arguments and of the slots
  std::vector<std::vector<std::pair<PyObject*, int>>> choices_;  // of each argument: its strings and their codes
  int format_;                                                   // the slot of the weights' format, or -1
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
