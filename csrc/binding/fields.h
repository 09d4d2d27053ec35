// The fields of params structs by name, and how a Python object becomes the value of one.
#pragma once
#include <pybind11/pybind11.h>

#include <cstring>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "binding/params.h"

namespace dflash {

using Address = uintptr_t;

template <typename T>
T* ptr(Address address) {
  return reinterpret_cast<T*>(address);
}

// An address: None, an int, or an object with data_ptr(), such as a torch.Tensor.
inline void* address_of(PyObject* object) {
  static PyObject* const method = PyUnicode_InternFromString("data_ptr");
  if (object == Py_None) return nullptr;
  if (PyLong_Check(object)) return PyLong_AsVoidPtr(object);
  PyObject* address = PyObject_CallMethodNoArgs(object, method);
  void* const value = address ? PyLong_AsVoidPtr(address) : nullptr;
  Py_XDECREF(address);
  return value;
}

// Lists of addresses and sizes, which a struct points to until its kernel has run.
using Lists = std::vector<std::vector<int64_t>>;

struct Field;
using Record = std::vector<Field>;

struct Field {
  enum Kind { kPointer, kInteger, kInt32, kFloat, kBool, kRecord };

  PyObject* name;  // interned
  Kind kind;
  size_t offset;         // in its struct
  size_t most;           // 1: a value; more: so many at most, in place; 0: a pointer to a list
  const Record* record;  // its fields, if it has some

  // Stores a Python object in a struct.
  void store(PyObject* given, char* to, Lists& lists) const;

 private:
  void store_one(PyObject* given, char* to, Lists& lists) const;
};

// Stores the fields that a dict names, or those of a tuple in their order; None leaves the record as it is,
// and anything else is its first field. The others keep their values.
inline void store_record(const Record& record, PyObject* given, char* to, Lists& lists) {
  if (given == Py_None) return;
  if (PyDict_Check(given)) {
    for (const Field& field : record)
      if (PyObject* value = PyDict_GetItem(given, field.name)) field.store(value, to, lists);
  } else if (PyTuple_Check(given)) {
    if (PyTuple_GET_SIZE(given) != Py_ssize_t(record.size()))
      throw std::length_error("a record has " + std::to_string(record.size()) + " fields");
    for (size_t i = 0; i < record.size(); ++i) record[i].store(PyTuple_GET_ITEM(given, i), to, lists);
  } else {
    record[0].store(given, to, lists);
  }
}

inline void Field::store(PyObject* given, char* to, Lists& lists) const {
  to += offset;
  if (most == 1) return store_one(given, to, lists);
  const auto items = pybind11::reinterpret_steal<pybind11::object>(PySequence_Fast(given, "must be a list"));
  if (!items) throw pybind11::error_already_set();
  const size_t count = PySequence_Fast_GET_SIZE(items.ptr());
  if (most && count > most) throw std::length_error("at most " + std::to_string(most) + " fit");
  if (!most) {
    lists.emplace_back(count);
    const int64_t* const values = lists.back().data();
    std::memcpy(to, &values, sizeof(values));
    to = reinterpret_cast<char*>(lists.back().data());
  }
  for (size_t i = 0; i < count; ++i)
    store_one(PySequence_Fast_GET_ITEM(items.ptr(), i), to + i * sizeof(int64_t), lists);
}

inline void Field::store_one(PyObject* given, char* to, Lists& lists) const {
  const auto put = [to](auto value) { std::memcpy(to, &value, sizeof(value)); };
  if (kind == kPointer)
    put(address_of(given));
  else if (kind == kInteger)
    put(int64_t(PyLong_AsLongLong(given)));
  else if (kind == kInt32)
    put(int32_t(PyLong_AsLong(given)));
  else if (kind == kFloat)
    put(float(PyFloat_AsDouble(given)));
  else if (kind == kBool)
    put(PyObject_IsTrue(given) == 1);
  else
    store_record(*record, given, to, lists);
  if (PyErr_Occurred()) throw pybind11::error_already_set();
}

template <typename Params>
const Record& fields_of();

template <typename T>
Field field_of(PyObject* name, size_t offset) {
  using Item = std::remove_extent_t<T>;
  if constexpr (std::is_array_v<T>) {
    static_assert(sizeof(Item) == sizeof(int64_t), "lists hold addresses and sizes");
    Field field = field_of<Item>(name, offset);
    field.most = std::extent_v<T>;
    return field;
  } else if constexpr (std::is_pointer_v<T>) {
    return {name, Field::kPointer, offset, !std::is_pointer_v<std::remove_pointer_t<T>>, nullptr};
  } else if constexpr (std::is_same_v<T, Sizes>) {
    return {name, Field::kInteger, offset, 0, nullptr};
  } else if constexpr (std::is_class_v<T>) {
    return {name, Field::kRecord, offset, 1, &fields_of<T>()};
  } else {
    constexpr Field::Kind kind = std::is_same_v<T, bool>        ? Field::kBool
                                 : std::is_floating_point_v<T>  ? Field::kFloat
                                 : sizeof(T) == sizeof(int64_t) ? Field::kInteger
                                                                : Field::kInt32;
    return {name, kind, offset, 1, nullptr};
  }
}

// The fields of a struct, in the order of DFLASH_FIELDS.
template <typename Params>
const Record& fields_of() {
  static const Record record = [] {
    static Params p{};
    Record fields;
    const char* names = Params::kNames;
    const auto add = [&](auto& field) {
      names += std::strspn(names, ", ");
      const size_t length = std::strcspn(names, ",");
      PyObject* name = PyUnicode_FromStringAndSize(names, Py_ssize_t(length));
      PyUnicode_InternInPlace(&name);
      names += length;
      const size_t offset = reinterpret_cast<char*>(&field) - reinterpret_cast<char*>(&p);
      fields.push_back(field_of<std::remove_reference_t<decltype(field)>>(name, offset));
    };
    p.fields([&](auto&... field) { (add(field), ...); });
    return fields;
  }();
  return record;
}

}  // namespace dflash
