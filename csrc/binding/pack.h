// How arguments of a Python call become an op's parameters, and how an op is bound. Each params struct says
// in wire() which field takes which argument; the types below say how a field is read. The CPU's functions
// take a number of threads last, CUDA's a device and a stream. Python has checked and allocated everything.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "binding/params.h"

namespace dflash {

using Address = uintptr_t;

template <typename T>
T* ptr(Address address) {
  return reinterpret_cast<T*>(address);
}

// An argument that is an address: None, an int, or an object with data_ptr(), such as a torch.Tensor.
template <typename T>
struct Pointer {
  T* value = nullptr;
};

// Wire<Field>::Type is what a call passes for a field, and put() stores it. Numbers pass as they are.
template <typename Field>
struct Wire {
  using Type = Field;
  static void put(Field& field, const Type& given) { field = given; }
};

template <>
struct Wire<DType> {
  using Type = int;
  static void put(DType& field, int given) { field = DType(given); }
};

template <>
struct Wire<Gate> {
  using Type = int;
  static void put(Gate& field, int given) { field = Gate(given); }
};

template <typename T>
struct Wire<T*> {
  using Type = Pointer<T>;
  static void put(T*& field, Type given) { field = given.value; }
};

// A list of addresses, read where pybind11 keeps it for the length of the call.
template <typename T>
struct Wire<T* const*> {
  using Type = std::vector<Pointer<T>>;
  static_assert(sizeof(Pointer<T>) == sizeof(T*), "a list of pointers is read as an array");
  static void put(T* const*& field, const Type& given) { field = reinterpret_cast<T* const*>(given.data()); }
};

// A list of numbers, likewise.
template <>
struct Wire<Sizes> {
  using Type = std::vector<int64_t>;
  static void put(Sizes& field, const Type& given) { field.values = given.data(); }
};

// A list of at most N.
template <typename T, size_t N>
struct Wire<T[N]> {
  using Type = std::vector<typename Wire<T>::Type>;
  static void put(T (&field)[N], const Type& given) {
    if (given.size() > N) throw std::length_error("at most " + std::to_string(N) + " fit");
    for (size_t i = 0; i < given.size(); ++i) Wire<T>::put(field[i], given[i]);
  }
};

template <typename Params, typename... Fields>
Params pack(std::tuple<Fields Params::*...> fields, const typename Wire<Fields>::Type&... given) {
  Params p{};
  std::apply([&](auto... field) { (Wire<Fields>::put(p.*field, given), ...); }, fields);
  return p;
}

// The same from a Python tuple, for records that an op takes a list of.
template <typename Params, typename... Fields, size_t... I>
Params pack_tuple(std::tuple<Fields Params::*...> fields, const pybind11::tuple& given,
                  std::index_sequence<I...>) {
  if (given.size() != sizeof...(Fields))
    throw std::length_error("a record has " + std::to_string(sizeof...(Fields)) + " fields, got " +
                            std::to_string(given.size()));
  return pack(fields, given[I].template cast<typename Wire<Fields>::Type>()...);
}
template <typename Params, typename... Fields>
Params pack_tuple(std::tuple<Fields Params::*...> fields, const pybind11::tuple& given) {
  return pack_tuple(fields, given, std::index_sequence_for<Fields...>());
}

// A record inside a record: a tuple of its fields, or None if it is not there.
template <typename Record>
struct InnerWire {
  using Type = std::optional<pybind11::tuple>;
  static void put(Record& field, const Type& given) {
    if (given) field = pack_tuple(Record::wire(), *given);
  }
};
template <>
struct Wire<LinearWeight> : InnerWire<LinearWeight> {};
template <>
struct Wire<AttentionWeights> : InnerWire<AttentionWeights> {};
template <>
struct Wire<DeltaNetWeights> : InnerWire<DeltaNetWeights> {};
template <>
struct Wire<BlockConvWeights> : InnerWire<BlockConvWeights> {};

// module.name(the wire's arguments, threads) calls run(params).
template <typename Params, typename... Fields, typename Run>
void bind_cpu(pybind11::module_& m, const char* name, std::tuple<Fields Params::*...> fields, Run run) {
  m.def(name, [fields, run](const typename Wire<Fields>::Type&... given, int threads) {
    Params p = pack(fields, given...);
    p.threads = threads;
    pybind11::gil_scoped_release release;
    run(p);
  });
}

// module.name(the wire's arguments, device, stream) calls launch(params, stream).
template <typename Params, typename... Fields, typename Launch>
void bind_cuda(pybind11::module_& m, const char* name, std::tuple<Fields Params::*...> fields,
               Launch launch) {
  m.def(name, [fields, launch](const typename Wire<Fields>::Type&... given, int device, Address stream) {
    Params p = pack(fields, given...);
    p.device = device;
    pybind11::gil_scoped_release release;
    launch(p, stream);
  });
}

}  // namespace dflash

template <typename T>
struct pybind11::detail::type_caster<dflash::Pointer<T>> {
  PYBIND11_TYPE_CASTER(dflash::Pointer<T>, const_name("address"));

  bool load(handle source, bool) {
    if (source.is_none()) return true;
    if (PyLong_Check(source.ptr())) return read(source.ptr());
    static PyObject* const method = PyUnicode_InternFromString("data_ptr");
    const object address = reinterpret_steal<object>(PyObject_CallMethodNoArgs(source.ptr(), method));
    return address ? read(address.ptr()) : cleared();
  }

 private:
  bool read(PyObject* address) {
    value.value = static_cast<T*>(PyLong_AsVoidPtr(address));
    return !PyErr_Occurred() || cleared();
  }
  static bool cleared() {
    PyErr_Clear();
    return false;
  }
};
