// An op's contract: the shapes, dtypes and layouts that its tensors must have, the rules that its sizes must
// keep, and what a kernel's fields are made of. Python parses it once (ops/contract.py, which also says what
// is wrong with a call that does not fit). Here a call is matched and, for tensors on the CPU, run: checks
// and allocations in Python take longer than a small kernel.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "cpu/base/table.h"
#include "binding/params.h"
#include "binding/tensors.h"

namespace dflash {

// ---- kernels as a contract sees them: fields by place and kind

struct Field {
  enum Kind { kPointer, kPointers, kInteger, kFloat, kBool, kCode, kOther };
  std::string name;
  size_t offset;
  Kind kind;
  pybind11::object initial;  // what a call passes for a field that nothing sets
};

template <typename T>
constexpr Field::Kind kind_of() {
  if constexpr (std::is_pointer_v<T>)
    return std::is_pointer_v<std::remove_pointer_t<T>> ? Field::kPointers : Field::kPointer;
  else if constexpr (std::is_same_v<T, int64_t>)
    return Field::kInteger;
  else if constexpr (std::is_same_v<T, float>)
    return Field::kFloat;
  else if constexpr (std::is_same_v<T, bool>)
    return Field::kBool;
  else
    return std::is_enum_v<T> ? Field::kCode : Field::kOther;
}

template <typename T>
pybind11::object initial_of(const T& field) {
  constexpr Field::Kind kind = kind_of<T>();
  if constexpr (kind == Field::kPointers)
    return pybind11::list();
  else if constexpr (kind == Field::kInteger || kind == Field::kFloat || kind == Field::kBool)
    return pybind11::cast(field);
  else
    return pybind11::none();
}

// The fields of each kernel's params in the order of wire(), by name.
inline const char* field_names(const std::string& kernel) {
  static const std::map<std::string, const char*> names{
      {"rms_norm",
       "x, residual, weight, counts, front, out, residual_out, tap, tap_stride, rows, hidden, "
       "rows_per_sequence, sequences, front_rows, eps, zero_centered, dtype"},
      {"dynamic_conv",
       "x, base, dynamic, front, out, dynamic_stride_block, dynamic_stride_row, rows, block_rows, "
       "hidden, width, groups, sequences, front_rows, dtype"},
      {"conv_add_rms_norm",
       "x, base, dynamic, residual, weight, out, residual_out, tap, tap_stride, dynamic_stride_block, "
       "dynamic_stride_row, rows, block_rows, hidden, width, groups, eps, zero_centered, dtype"},
      {"draft_rows",
       "tokens, length, drafts, table, mask_embedding, embeds, anchor, positions, table_stride, batch, "
       "capacity, rows, num_drafts, vocab, hidden, mask_id, scale, dtype"},
      {"silu_mul", "gate_up, out, rows, width, dtype"},
      {"sigmoid_mul", "x, gate, out, gate_stride_row, gate_stride_head, rows, heads, width, dtype"},
      {"qkv_norm_rope_append",
       "qkv, lengths, num_context, depth, cos, sin, q_norm_weight, k_norm_weight, q_out, k_cache, "
       "v_cache, batch, rows, q_rows, num_heads, num_kv_heads, head_dim, half, positions, capacity, eps, "
       "zero_centered, gated, prefetch, dtype"},
      {"append_context_kv",
       "kv, positions, cos, sin, k_norm_weight, k_caches, v_caches, num_layers, batch, rows, "
       "num_kv_heads, head_dim, half, capacity, eps, dtype"},
      {"append_kv",
       "key, value, positions, k_cache, v_cache, k_stride_batch, k_stride_head, k_stride_row, "
       "v_stride_batch, v_stride_head, v_stride_row, batch, rows, num_kv_heads, head_dim, v_head_dim, "
       "capacity, dtype"},
      {"block_attention",
       "q, k_cache, v_cache, lengths, sinks, ancestors, out, q_stride_batch, q_stride_row, "
       "q_stride_head, batch, rows, num_heads, num_kv_heads, head_dim, v_head_dim, capacity, window, "
       "scale, softcap, causal, workspace, splits, fresh, dtype"},
      {"linear",
       "x, num_weights, weights, scales, biases, features, out, rows, in, out_features, workspace, "
       "counters, splits, prefetch, gated, dtype"},
      {"experts",
       "x, ids, scores, gate_up, down, gate_up_bias, down_bias, out, workspace, rows, top_k, "
       "num_experts, hidden, width, gate, alpha, limit, transposed, float_scores, dtype"},
      {"delta_net_inputs",
       "qkv, b, a, a_log, dt_bias, q, k, v, log_decay, beta, b_stride, a_stride, rows, key_heads, heads, "
       "key_dim, value_dim, eps, dtype"},
      {"gated_rms_norm", "x, z, weight, out, z_stride, rows, heads, width, eps, dtype"},
      {"select_tokens",
       "logits, positions, seeds, temperature, top_k, top_p, min_p, sharpness, ids, workspace, batch, "
       "rows, vocab, consecutive, dtype"},
      {"accept_prefix",
       "block_ids, posterior, stop_token_ids, limits, tokens, length, num_context, done, batch, rows, "
       "num_stop_tokens, capacity"},
      {"accept_path",
       "ids, parents, choices, stop_token_ids, limits, tokens, length, num_context, done, path, "
       "chain_choices, chain_ids, batch, rows, path_rows, num_stop_tokens, capacity"},
      {"compact_kv", "path, counts, first, caches, heads, row_bytes, num_caches, batch, path_rows, capacity"},
      {"gather_rows", "x, path, out, batch, rows, path_rows, out_rows, row_bytes"},
      {"tree_candidates",
       "logits, positions, seeds, temperature, ids, scores, workspace, batch, depths, vocab, count, "
       "noise_weight, dtype"},
      {"build_tree",
       "anchor, ids, scores, tree_ids, parents, depth, ancestors, tree_scores, batch, depths, count, "
       "rows"},
      {"top_candidates",
       "logits, positions, seeds, temperature, sharpness, ids, candidate_logits, workspace, batch, "
       "levels, rows, vocab, count, dtype"},
      {"walk_candidates",
       "hidden, predecessors, successors, anchor, ids, logits, positions, seeds, temperature, top_k, "
       "top_p, min_p, sharpness, path, scores, batch, levels, sets, slots, count, codes, rank, stream, "
       "dtype"},
      {"gated_recurrence",
       "q, k, v, log_decay, beta, state, saved_k, saved_d, saved_a, pending, keep, out, batch, rows, "
       "key_heads, heads, key_dim, value_dim, decay_dim, block, counters"},
      {"causal_conv",
       "x, weight, bias, window, pending, keep, out, x_stride_batch, x_stride_row, batch, rows, "
       "channels, width, block, silu, dtype"},
      {"decoder_layers",
       "layers, k_caches, v_caches, windows, states, saved_k, saved_d, saved_a, pending, keep, hidden, "
       "context, num_context, lengths, ancestors, cos, sin, norm, out, taps, num_layers, batch, rows, "
       "context_rows, hidden_size, width, num_heads, num_kv_heads, head_dim, half, positions, capacity, "
       "num_taps, key_heads, delta_heads, key_dim, value_dim, conv_width, block, scale, eps, "
       "zero_centered, dtype"},
  };
  return names.at(kernel);
}

struct CpuKernel {
  static constexpr size_t kLargest = 512;
  std::vector<Field> fields;
  void (*make)(void* params);
  void (*run)(void* params, int threads);
};

template <typename Params, void (*CpuKernels::*KERNEL)(const Params&)>
CpuKernel cpu_kernel(const char* name) {
  static_assert(sizeof(Params) <= CpuKernel::kLargest && alignof(Params) <= 16);
  CpuKernel kernel;
  Params p{};
  std::vector<std::string> names(1);
  for (const char* c = field_names(name); *c; ++c) {
    if (*c == ',')
      names.emplace_back();
    else if (*c != ' ')
      names.back() += *c;
  }
  size_t i = 0;
  const auto add = [&](auto& field) {
    const size_t offset = reinterpret_cast<char*>(&field) - reinterpret_cast<char*>(&p);
    using T = std::remove_reference_t<decltype(field)>;
    kernel.fields.push_back({names.at(i++), offset, kind_of<T>(), initial_of<T>(field)});
  };
  std::apply([&](auto... field) { (add(p.*field), ...); }, Params::wire());
  kernel.make = [](void* params) { new (params) Params{}; };
  kernel.run = [](void* params, int threads) {
    Params& filled = *static_cast<Params*>(params);
    filled.threads = threads;
    (cpu_kernels().*KERNEL)(filled);
  };
  return kernel;
}

inline const std::map<std::string, CpuKernel>& kernels() {
  static const auto* found = new std::map<std::string, CpuKernel>{
#define KERNEL(name, Params) {#name, cpu_kernel<Params, &CpuKernels::name>(#name)},
#define CPU_KERNEL KERNEL
#include "binding/kernels.def"
  };
  return *found;
}

// ---- a contract

// Instructions of a stack machine on 64-bit integers: pairs of an Operation and its operand.
using Program = std::vector<int64_t>;
enum class Operation : int64_t {
  kConstant,
  kSlot,
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kModulo,
  kMinimum,
  kMaximum,
  kEqual,
  kUnequal,
  kLess,
  kAtMost,
  kAnd,
  kOr,
  kNot,
  kHas,
  kDimensions,
  kSize,
  kStride,
  kRowStride,
  kItemSize,
  kIsFloat32,
  kIsInt8,
  kFloatAtLeast,
  kFloatAtMost
};

class Contract {
 public:
  // What ops/contract.py made of the text; the names are those of its dictionary.
  explicit Contract(const pybind11::dict& spec) {
    const auto get = [&spec](const char* name) { return spec[name]; };
    for (pybind11::handle kind : get("arguments")) kinds_.push_back(kind.cast<std::string>()[0]);
    argument_slots_ = get("argument_slots").cast<std::vector<int>>();
    for (pybind11::handle entry : get("tensors")) tensors_.push_back(TensorRule(entry));
    rules_ = get("rules").cast<std::vector<Program>>();
    derived_ = get("derived").cast<std::vector<std::pair<int, Program>>>();
    for (pybind11::handle entry : get("outputs")) outputs_.push_back(Output(entry));
    for (pybind11::handle name : get("names"))
      names_.push_back(PyUnicode_InternFromString(name.cast<std::string>().c_str()));
    constants_ = get("constants").cast<std::vector<float>>();
    choices_ = get("choices");
    if (names_.size() > kMaxSlots || tensors_.size() > kMaxTensors || outputs_.size() > kMaxOutputs)
      throw std::length_error("a contract has too many names, tensors or outputs");
    const auto found = kernels().find(get("kernel").cast<std::string>());
    if (found == kernels().end()) return;
    kernel_ = &found->second;
    has_dtype_ = std::any_of(kernel_->fields.begin(), kernel_->fields.end(),
                             [](const Field& field) { return field.name == "dtype"; });
    for (const auto& [name, source, index] :
         get("fields").cast<std::vector<std::tuple<std::string, char, int>>>())
      for (const Field& field : kernel_->fields)
        if (field.name == name) fills_.push_back({&field, source, index});
  }

  size_t arity() const { return kinds_.size(); }

  // The sizes and fields by name, if the call fits as it is; else null, without an error set. With `on_cpu`
  // all tensors must be on the CPU.
  PyObject* match(PyObject* const* arguments, bool on_cpu) const {
    const Torch::ModesOff guard(torch);
    Call call(arguments);
    if (!fits(call, on_cpu)) return nullptr;
    PyObject* sizes = PyDict_New();
    for (size_t i = 0; sizes && i < names_.size(); ++i) {
      PyObject* value = PyLong_FromLongLong(call.slots[i]);
      PyDict_SetItem(sizes, names_[i], value);
      Py_XDECREF(value);
    }
    return sizes;
  }

  // Runs the CPU kernel; null, without an error set, if the call does not fit as it is.
  PyObject* run(PyObject* const* arguments) const {
    const Torch::ModesOff guard(torch);
    Call call(arguments);
    if (!fits(call, true)) return nullptr;
    pybind11::object made[kMaxOutputs];
    void* addresses[kMaxOutputs] = {};
    for (size_t i = 0; i < outputs_.size(); ++i) {
      made[i] = allocate(call, outputs_[i]);
      DLTensor t;
      if (!torch.is_exact(made[i].ptr()) || !torch.read(made[i].ptr(), t) || t.device_type != kDLCPU)
        return nullptr;
      addresses[i] = t.data;
    }
    alignas(16) char params[CpuKernel::kLargest];
    kernel_->make(params);
    std::vector<std::vector<void*>> lists;
    lists.reserve(fills_.size());
    for (const Fill& fill : fills_) put(call, fill, addresses, params, lists);
    const int threads = torch.num_threads();
    {
      const pybind11::gil_scoped_release release;
      kernel_->run(params, threads);
    }
    if (outputs_.empty()) Py_RETURN_NONE;
    if (outputs_.size() == 1) return made[0].release().ptr();
    pybind11::tuple results(outputs_.size());
    for (size_t i = 0; i < outputs_.size(); ++i) results[i] = made[i];
    return results.release().ptr();
  }

 private:
  static constexpr size_t kMaxSlots = 64, kMaxTensors = 24, kMaxOutputs = 8;
  // The dtype of a tensor: the op's storage type, or that or another; any; or one by its name.
  enum class Kind : int { kStorage, kStorageOrFloat32, kStorageOrInt8, kAny, kInt64, kFloat32, kInt8 };
  // Dense, written or read with evenly spaced rows, or with that many of its last dimensions dense.
  static constexpr int kDense = 0, kEvenRows = -1;

  struct Dimension {
    enum Kind : int { kSlot, kProgram, kAny, kOptional } kind;
    int slot = 0;
    Program program{};
  };
  static Dimension read_dimension(pybind11::handle entry) {
    const auto pair = entry.cast<pybind11::tuple>();
    Dimension dimension{Dimension::Kind(pair[0].cast<int>())};
    if (dimension.kind == Dimension::kProgram)
      dimension.program = pair[1].cast<Program>();
    else
      dimension.slot = pair[1].cast<int>();
    return dimension;
  }

  struct TensorRule {
    explicit TensorRule(pybind11::handle entry) {
      argument = entry["argument"].cast<int>(), kind = Kind(entry["kind"].cast<int>());
      layout = entry["layout"].cast<int>(), leading = entry["leading"].cast<int>();
      count = entry["count"].cast<int>(), optional = entry["optional"].cast<bool>();
      written = entry["written"].cast<bool>();
      for (pybind11::handle dimension : entry["shape"]) shape.push_back(read_dimension(dimension));
    }
    int argument, layout, leading, count;  // the slots of leading dimensions and of a list's length, or -1
    Kind kind;
    bool optional, written;
    std::vector<Dimension> shape;
  };
  struct Output {
    explicit Output(pybind11::handle entry) {
      kind = Kind(entry["kind"].cast<int>()), has_leading = entry["leading"].cast<bool>();
      for (pybind11::handle dimension : entry["shape"]) shape.push_back(read_dimension(dimension));
    }
    Kind kind;
    bool has_leading;
    std::vector<Dimension> shape;
  };
  struct Fill {
    const Field* field;
    char source;  // t: a tensor or list, o: an output, s: a slot, f: a float argument, k: a constant, d: the
                  // dtype
    int index;
  };

  struct Seen {
    PyObject* object;
    DLTensor t;
    Span span;
    bool written;
    bool is(uint8_t code, uint8_t bits) const { return t.code == code && t.bits == bits && t.lanes == 1; }
  };
  struct Call {
    explicit Call(PyObject* const* given) : arguments(given) { seen.reserve(16); }
    PyObject* const* arguments;
    std::vector<Seen> seen;
    std::vector<pybind11::object> held;  // lists, which other threads may empty while the kernel runs
    int first[kMaxTensors] = {}, count[kMaxTensors] = {};  // of each rule's tensors in `seen`
    int64_t slots[kMaxSlots] = {};
    uint64_t bound = 0;
    bool overflowed = false;
    int storage = -1, leading = -1, num_leading = 0;  // tensors in `seen`, and the leading dimensions of one
  };

  bool fits(Call& call, bool on_cpu) const {
    for (size_t i = 0; i < kinds_.size(); ++i)
      if (!read_argument(call, i)) return false;
    for (size_t i = 0; i < tensors_.size(); ++i)
      if (!read_tensors(call, i, on_cpu)) return false;
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
    const int slot = argument_slots_[i];
    if (slot >= 0) call.bound |= uint64_t(1) << slot;
    switch (kinds_[i]) {
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

  bool read_tensors(Call& call, size_t i, bool on_cpu) const {
    const TensorRule& rule = tensors_[i];
    PyObject* object = call.arguments[rule.argument];
    call.first[i] = int(call.seen.size());
    if (object == Py_None) return rule.optional;
    if (rule.count < 0) {
      call.count[i] = 1;
      return read_tensor(call, rule, object, on_cpu);
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
      if (!read_tensor(call, rule, PyTuple_GET_ITEM(list.ptr(), j), on_cpu)) return false;
    call.held.push_back(std::move(list));
    return true;
  }

  bool read_tensor(Call& call, const TensorRule& rule, PyObject* object, bool on_cpu) const {
    // 1. Its memory and dtype
    call.seen.push_back({object, {}, {}, rule.written});
    Seen& seen = call.seen.back();
    DLTensor& t = seen.t;
    if (!torch.is_exact(object) || !torch.read(object, t)) return false;
    if (on_cpu ? t.device_type != kDLCPU : t.device_type != call.seen[0].t.device_type) return false;
    if (t.device_id != call.seen[0].t.device_id || torch.is_negative(object)) return false;
    if (!torch.span_of(object, t, seen.span) || !has_kind(call, rule.kind, seen, on_cpu)) return false;
    // 2. Its layout
    const int dims = int(rule.shape.size()), leading = t.ndim - dims;
    if (t.ndim > kMaxDimensions || !has_layout(rule.layout, rule.written, t)) return false;
    // 3. The sizes that it gives names to
    if (rule.leading < 0) {
      const bool last_may_miss = dims > 0 && rule.shape.back().kind == Dimension::kOptional;
      if (leading != 0 && !(leading == -1 && last_may_miss)) return false;
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
      const Dimension& dimension = rule.shape[d];
      const bool names = dimension.kind == Dimension::kSlot || dimension.kind == Dimension::kOptional;
      if (names && !bind(call, dimension.slot, t.shape[d + skipped])) return false;
    }
    return true;
  }

  static bool bind(Call& call, int slot, int64_t value) {
    const uint64_t bit = uint64_t(1) << slot;
    if (call.bound & bit) return call.slots[slot] == value;
    call.bound |= bit;
    call.slots[slot] = value;
    return true;
  }

  bool has_kind(Call& call, Kind kind, const Seen& seen, bool on_cpu) const {
    switch (kind) {
      case Kind::kInt64:
        return seen.is(kDLInt, 64);
      case Kind::kFloat32:
        return seen.is(kDLFloat, 32);
      case Kind::kInt8:
        return seen.is(kDLInt, 8);
      case Kind::kAny:
        return true;
      default:
        break;
    }
    if (call.storage < 0) {
      call.storage = int(call.seen.size()) - 1;
      if (!has_dtype_) return true;
      return seen.is(kDLFloat, 32) || seen.is(kDLBfloat, 16) || (!on_cpu && seen.is(kDLFloat, 16));
    }
    const DLTensor& storage = call.seen[call.storage].t;
    return seen.is(storage.code, storage.bits) ||
           (kind == Kind::kStorageOrFloat32 && seen.is(kDLFloat, 32)) ||
           (kind == Kind::kStorageOrInt8 && seen.is(kDLInt, 8));
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

  // Between the rows [..., hidden] of a tensor if it is the same for all and each is dense; else -1.
  static int64_t row_stride(const DLTensor& t, bool written) {
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

  bool has_sizes(Call& call, const TensorRule& rule, const Seen& seen) const {
    const int skipped = rule.leading < 0 ? 0 : seen.t.ndim - int(rule.shape.size());
    for (int d = 0; d + skipped < seen.t.ndim; ++d)
      if (rule.shape[d].kind == Dimension::kProgram &&
          evaluate(call, rule.shape[d].program) != seen.t.shape[d + skipped])
        return false;
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
      const int64_t operand = program[i + 1];
      const auto tensor = [&]() -> const DLTensor* {
        return call.count[operand] ? &call.seen[call.first[operand]].t : nullptr;
      };
      switch (Operation(program[i])) {
        case Operation::kConstant:
          *++top = operand;
          continue;
        case Operation::kSlot:
          *++top = call.slots[operand];
          continue;
        case Operation::kHas:
          *++top = call.count[operand] > 0;
          continue;
        case Operation::kDimensions:
          *++top = tensor() ? tensor()->ndim : 0;
          continue;
        case Operation::kRowStride:
          *++top = tensor() ? row_stride(*tensor(), false) : 0;
          continue;
        case Operation::kItemSize:
          *++top = tensor() ? tensor()->element_size() : 0;
          continue;
        case Operation::kIsFloat32:
          *++top = tensor() && tensor()->code == kDLFloat && tensor()->bits == 32;
          continue;
        case Operation::kIsInt8:
          *++top = tensor() && tensor()->code == kDLInt && tensor()->bits == 8;
          continue;
        case Operation::kSize:
          *top = tensor() ? tensor()->shape[*top] : 0;
          continue;
        case Operation::kStride:
          *top = tensor() ? tensor()->strides[*top] : 0;
          continue;
        case Operation::kFloatAtLeast:
          *top = PyFloat_AsDouble(call.arguments[operand]) >= double(*top);
          continue;
        case Operation::kFloatAtMost:
          *top = PyFloat_AsDouble(call.arguments[operand]) <= double(*top);
          continue;
        case Operation::kNot:
          *top = !*top;
          continue;
        default:
          break;
      }
      const int64_t b = *top--, a = *top;
      bool over = false;
      switch (Operation(program[i])) {
        case Operation::kAdd:
          over = __builtin_add_overflow(a, b, top);
          break;
        case Operation::kSubtract:
          over = __builtin_sub_overflow(a, b, top);
          break;
        case Operation::kMultiply:
          over = __builtin_mul_overflow(a, b, top);
          break;
        case Operation::kDivide:
          *top = b > 0 ? (a - (a < 0 ? b - 1 : 0)) / b : 0;
          break;
        case Operation::kModulo:
          *top = b > 0 ? (a % b + b) % b : 0;
          break;
        case Operation::kMinimum:
          *top = std::min(a, b);
          break;
        case Operation::kMaximum:
          *top = std::max(a, b);
          break;
        case Operation::kEqual:
          *top = a == b;
          break;
        case Operation::kUnequal:
          *top = a != b;
          break;
        case Operation::kLess:
          *top = a < b;
          break;
        case Operation::kAtMost:
          *top = a <= b;
          break;
        case Operation::kAnd:
          *top = a && b;
          break;
        default:
          *top = a || b;
          break;
      }
      call.overflowed |= over;
    }
    return *top;
  }

  pybind11::object allocate(Call& call, const Output& output) const {
    // 1. Its shape
    int64_t shape[kMaxDimensions];
    int ndim = 0;
    if (output.has_leading)
      for (; ndim < call.num_leading; ++ndim) shape[ndim] = call.seen[call.leading].t.shape[ndim];
    for (const Dimension& d : output.shape)
      shape[ndim++] = d.kind == Dimension::kProgram ? evaluate(call, d.program) : call.slots[d.slot];
    // 2. A tensor of its dtype to make it like
    const auto [code, bits] = output.kind == Kind::kInt64 ? std::pair(kDLInt, uint8_t(64))
                              : output.kind == Kind::kFloat32
                                  ? std::pair(kDLFloat, uint8_t(32))
                                  : std::pair(call.seen[call.storage].t.code, call.seen[call.storage].t.bits);
    const Seen* like = nullptr;
    for (const Seen& seen : call.seen) {
      if (!seen.is(code, bits)) continue;
      if (!like) like = &seen;
      if (seen.t.ndim == ndim && std::equal(shape, shape + ndim, seen.t.shape) &&
          has_layout(kDense, false, seen.t))
        return torch.empty_like(seen.object);  // half the time of new_empty
    }
    if (like) return torch.new_empty(like->object, shape, ndim);
    return torch.new_empty(call.seen[0].object, shape, ndim, torch.dtype_of(code, bits));
  }

  void put(const Call& call, const Fill& fill, void* const* outputs, char* params,
           std::vector<std::vector<void*>>& lists) const {
    char* to = params + fill.field->offset;
    const auto store = [to](const auto& value) { std::memcpy(to, &value, sizeof(value)); };
    switch (fill.source) {
      case 't': {
        const Seen* seen = call.seen.data() + call.first[fill.index];
        const int count = call.count[fill.index];
        if (fill.field->kind == Field::kPointer) return store(count ? seen->t.data : nullptr);
        lists.emplace_back();
        for (int i = 0; i < count; ++i) lists.back().push_back(seen[i].t.data);
        return store(lists.back().data());
      }
      case 'o':
        return store(outputs[fill.index]);
      case 'f':
        return store(float(PyFloat_AsDouble(call.arguments[fill.index])));
      case 'k':
        return store(constants_[fill.index]);
      case 'd': {
        const DLTensor& t = call.seen[call.storage].t;
        return store(t.code == kDLFloat ? (t.bits == 32 ? DType::kFloat32 : DType::kFloat16)
                                        : DType::kBFloat16);
      }
      default: {
        const int64_t value = call.slots[fill.index];
        if (fill.field->kind == Field::kInteger) return store(value);
        if (fill.field->kind == Field::kBool) return store(value != 0);
        return store(int32_t(value));
      }
    }
  }

  std::vector<char> kinds_;  // of each argument: t(ensor), i(nteger), b(ool), f(loat), c(hoice), o(ther)
  std::vector<int> argument_slots_;  // of integers, bools and choices; else -1
  std::vector<TensorRule> tensors_;
  std::vector<Program> rules_;
  std::vector<std::pair<int, Program>> derived_;
  std::vector<Output> outputs_;
  std::vector<PyObject*> names_;  // of the slots
  std::vector<float> constants_;
  pybind11::dict choices_;
  const CpuKernel* kernel_ = nullptr;
  bool has_dtype_ = true;  // false for kernels that only move bytes, of any dtype
  std::vector<Fill> fills_;
};

// ---- as Python's functions, which cost less than pybind11's: (arguments...)

template <PyObject* (*CALL)(const Contract&, PyObject* const*)>
PyObject* call_contract(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
  try {
    const auto& contract = *static_cast<Contract*>(PyCapsule_GetPointer(self, nullptr));
    if (size_t(count) == contract.arity()) {
      if (PyObject* result = CALL(contract, arguments)) return result;
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

inline PyObject* run_contract(const Contract& c, PyObject* const* arguments) { return c.run(arguments); }
inline PyObject* match_on_cpu(const Contract& c, PyObject* const* arguments) {
  return c.match(arguments, true);
}
inline PyObject* match_anywhere(const Contract& c, PyObject* const* arguments) {
  return c.match(arguments, false);
}

// (run, match_on_cpu, match) of a contract. Each takes the op's arguments in order and returns NotImplemented
// for a call that does not fit as it is.
inline pybind11::tuple contract(const pybind11::dict& spec) {
  const auto fast = [](auto* function) {
    return reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(function));
  };
  static PyMethodDef methods[] = {
      {"run", fast(&call_contract<run_contract>), METH_FASTCALL, nullptr},
      {"match_on_cpu", fast(&call_contract<match_on_cpu>), METH_FASTCALL, nullptr},
      {"match", fast(&call_contract<match_anywhere>), METH_FASTCALL, nullptr},
  };
  const pybind11::capsule self(new Contract(spec));  // as long as the process
  pybind11::list made;
  for (PyMethodDef& method : methods)
    made.append(pybind11::reinterpret_steal<pybind11::object>(PyCFunction_New(&method, self.ptr())));
  return pybind11::tuple(made);
}

}  // namespace dflash
