// An interpreter of PTX, written from NVIDIA's "PTX ISA" 9.0. Barriers, warp operations, asynchronous copies, atomics
// and the order of threads are the machine's; what an instruction computes is said here, and not taken from the twins
// of csrc/cuda/base/ptx.cuh.
#include "ptx.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cfenv>
#include <cmath>
#include <cstring>
#include <limits>
#include <set>
#include <stdexcept>
#include <type_traits>

#include "machine.h"

namespace emulation::ptx {

class Thread {
 public:
  char* slots;
  const Program& program;
  size_t next = 0;  // instruction

  template <typename T>
  T get(const Operand& o) const {
    T value;
    std::memcpy(&value, slots + o.slot, sizeof(T));
    return value;
  }
  bool predicate(const Operand& o) const { return (get<uint32_t>(o) != 0) != (o.extra == 1); }

  // A value of fewer bytes than the register is extended by its own type.
  template <typename T>
  void put(const Operand& o, T value) {
    char* to = slots + o.slot;
    if constexpr (std::is_integral_v<T>) {
      const int64_t wide = int64_t(value);
      std::memcpy(to, &wide, o.width);
    } else {
      std::memcpy(to, &value, sizeof(T));
    }
  }
};

namespace {

using std::string;
using Run = std::function<void(Thread&)>;
using Operands = std::vector<Operand>;

// Calls f with a value of the C++ type that a PTX type names.
template <typename F>
Run typed(const string& type, F f) {
  if (type == "u8" || type == "b8") return f(uint8_t());
  if (type == "s8") return f(int8_t());
  if (type == "u16" || type == "b16") return f(uint16_t());
  if (type == "s16") return f(int16_t());
  if (type == "u32" || type == "b32") return f(uint32_t());
  if (type == "s32") return f(int32_t());
  if (type == "u64" || type == "b64") return f(uint64_t());
  if (type == "s64") return f(int64_t());
  if (type == "f32") return f(float());
  if (type == "f64") return f(double());
  return nullptr;
}
template <typename F>
Run integer(const string& type, F f) {
  return typed(type, [&](auto x) -> Run {
    if constexpr (std::is_integral_v<decltype(x)>) return f(x);
    return nullptr;
  });
}

// d = f(a), f(a, b), f(a, b, c)
template <typename T, typename F>
Run unary(const Operands& o, F f) {
  return [d = o[0], a = o[1], f](Thread& t) { t.put(d, f(t.get<T>(a))); };
}
template <typename T, typename F>
Run binary(const Operands& o, F f) {
  return [d = o[0], a = o[1], b = o[2], f](Thread& t) { t.put(d, f(t.get<T>(a), t.get<T>(b))); };
}
template <typename T, typename F>
Run ternary(const Operands& o, F f) {
  return [d = o[0], a = o[1], b = o[2], c = o[3], f](Thread& t) { t.put(d, f(t.get<T>(a), t.get<T>(b), t.get<T>(c))); };
}

template <typename T>
struct Wider;
template <>
struct Wider<uint16_t> {
  using Type = uint32_t;
};
template <>
struct Wider<int16_t> {
  using Type = int32_t;
};
template <>
struct Wider<uint32_t> {
  using Type = uint64_t;
};
template <>
struct Wider<int32_t> {
  using Type = int64_t;
};
template <>
struct Wider<uint64_t> {
  using Type = unsigned __int128;
};
template <>
struct Wider<int64_t> {
  using Type = __int128;
};

// An opcode: its name, its modifiers, and the last of these, which is most often the type.
struct Opcode {
  string name, type;
  std::vector<string> parts;
  mutable std::set<string> asked;  // the modifiers that were looked for
  explicit Opcode(const string& text) {
    for (size_t at = 0; at <= text.size();) {
      const size_t end = std::min(text.find('.', at), text.size());
      parts.push_back(text.substr(at, end - at));
      at = end + 1;
    }
    name = parts.front(), type = parts.back();
  }
  bool has(const string& modifier) const {
    asked.insert(modifier);
    return std::find(parts.begin(), parts.end(), modifier) != parts.end();
  }
};

// ---- arithmetic

// Computes f() in a rounding mode of the processor.
template <typename F>
auto rounded(int mode, F f) {
  std::fesetround(mode);
  const volatile auto value = f();
  std::fesetround(FE_TONEAREST);
  return value;
}
int rounding(const Opcode& op) {
  return op.has("rm") ? FE_DOWNWARD : op.has("rp") ? FE_UPWARD : op.has("rz") ? FE_TOWARDZERO : FE_TONEAREST;
}

float flushed(float x) { return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x; }

// The functions of floating point; approximations are computed exactly.
template <typename T>
Run real(const Opcode& op, const Operands& o) {
  const int mode = rounding(op);
  const bool flushes = op.has("ftz");
  const auto one = [&](auto f) -> Run {
    if (mode != FE_TONEAREST) return nullptr;
    if (!flushes) return unary<T>(o, [f](T x) { return T(f(x)); });
    return unary<float>(o, [f](float x) { return flushed(float(f(flushed(x)))); });
  };
  const auto two = [&](auto f) -> Run {
    if (mode != FE_TONEAREST)
      return binary<T>(o, [f, mode](volatile T x, volatile T y) { return rounded(mode, [&] { return T(f(x, y)); }); });
    if (!flushes) return binary<T>(o, [f](T x, T y) { return T(f(x, y)); });
    return binary<float>(o, [f](float x, float y) { return flushed(float(f(flushed(x), flushed(y)))); });
  };
  const string& n = op.name;
  if (n == "add") return two([](T x, T y) { return x + y; });
  if (n == "sub") return two([](T x, T y) { return x - y; });
  if (n == "mul") return two([](T x, T y) { return x * y; });
  if (n == "div") return two([](T x, T y) { return x / y; });
  if (n == "copysign") return two([](T x, T y) { return std::copysign(y, x); });
  if (n == "min" || n == "max") {
    const bool least = n == "min", keeps = op.has("NaN");
    return two([least, keeps](T x, T y) {
      if (keeps && (std::isnan(x) || std::isnan(y))) return std::numeric_limits<T>::quiet_NaN();
      return least ? std::fmin(x, y) : std::fmax(x, y);
    });
  }
  if (n == "neg") return one([](T x) { return -x; });
  if (n == "abs") return one([](T x) { return std::fabs(x); });
  if (n == "sqrt") return one([](T x) { return std::sqrt(x); });
  if (n == "rsqrt") return one([](T x) { return 1 / std::sqrt(x); });
  if (n == "rcp") return one([](T x) { return 1 / x; });
  if (n == "ex2") return one([](T x) { return std::exp2(double(x)); });
  if (n == "lg2") return one([](T x) { return std::log2(double(x)); });
  if ((n == "fma" || n == "mad") && !flushes) {
    if (mode == FE_TONEAREST) return ternary<T>(o, [](T x, T y, T z) { return std::fma(x, y, z); });
    return ternary<T>(o, [mode](T x, T y, T z) { return rounded(mode, [&] { return std::fma(x, y, z); }); });
  }
  return nullptr;
}

// Those of integers. Built with -fwrapv: they wrap.
template <typename T>
Run whole(const Opcode& op, const Operands& o) {
  const string& n = op.name;
  if (n == "and") return binary<T>(o, [](T x, T y) { return T(x & y); });
  if (n == "or") return binary<T>(o, [](T x, T y) { return T(x | y); });
  if (n == "xor") return binary<T>(o, [](T x, T y) { return T(x ^ y); });
  if (n == "not") return unary<T>(o, [](T x) { return T(~x); });
  if (n == "shl" || n == "shr")
    return [d = o[0], a = o[1], b = o[2], left = n == "shl"](Thread& t) {
      constexpr unsigned kBits = 8 * sizeof(T);
      const T x = t.get<T>(a);
      const unsigned by = t.get<uint32_t>(b);
      if (left)
        t.put(d, T(by < kBits ? x << by : 0));
      else
        t.put(d, T(x >> std::min(by, kBits - 1) >> (by >= kBits ? 1 : 0)));
    };
  if constexpr (sizeof(T) > 1) {
    using W = typename Wider<T>::Type;
    if (n == "add") return binary<T>(o, [](T x, T y) { return T(x + y); });
    if (n == "sub") return binary<T>(o, [](T x, T y) { return T(x - y); });
    if (n == "neg") return unary<T>(o, [](T x) { return T(-x); });
    if (n == "abs") return unary<T>(o, [](T x) { return T(x < T(0) ? -x : x); });
    if (n == "min") return binary<T>(o, [](T x, T y) { return std::min(x, y); });
    if (n == "max") return binary<T>(o, [](T x, T y) { return std::max(x, y); });
    const auto is_minus_1 = [](T y) { return std::is_signed_v<T> && y == T(-1); };  // the smallest by it wraps
    if (n == "div") return binary<T>(o, [=](T x, T y) { return T(!y ? T(-1) : is_minus_1(y) ? -x : x / y); });
    if (n == "rem") return binary<T>(o, [=](T x, T y) { return T(!y ? x : is_minus_1(y) ? T(0) : x % y); });
    if (n == "mul" && op.has("hi")) return binary<T>(o, [](T x, T y) { return T(W(W(x) * y) >> 8 * sizeof(T)); });
    if (n == "mul" && op.has("lo")) return binary<T>(o, [](T x, T y) { return T(W(x) * y); });
    if (n == "mad" && op.has("lo")) return ternary<T>(o, [](T x, T y, T z) { return T(W(x) * y + z); });
    if constexpr (sizeof(T) < 8) {
      if (n == "mul" && op.has("wide")) return binary<T>(o, [](T x, T y) { return W(W(x) * y); });
      if (n == "mad" && op.has("wide"))
        return [d = o[0], a = o[1], b = o[2], c = o[3]](Thread& t) {
          t.put(d, W(W(t.get<T>(a)) * t.get<T>(b) + t.get<W>(c)));
        };
    }
  }
  return nullptr;
}

template <typename T, typename F>
Run comparison(const Opcode& op, const Operands& o, F f) {
  const bool ends_in_or = op.has("or"), ends_in_and = op.has("and"), ends_in_xor = op.has("xor");
  return [=, d = o[0], a = o[1], b = o[2], c = o.back()](Thread& t) {
    bool is = f(t.get<T>(a), t.get<T>(b));
    if (ends_in_or) is |= t.predicate(c);
    if (ends_in_and) is &= t.predicate(c);
    if (ends_in_xor) is ^= t.predicate(c);
    t.put(d, uint32_t(is));
  };
}

template <typename T>
Run compared(const Opcode& op, const Operands& o) {
  const string& how = op.parts[1];
  op.asked.insert(how);
  if (o.size() != 3u + (op.has("and") || op.has("or") || op.has("xor"))) return nullptr;  // no second result
  const auto nan = [](T x) {
    if constexpr (std::is_floating_point_v<T>) return std::isnan(x);
    return false;
  };
  if (how == "eq") return comparison<T>(op, o, [](T x, T y) { return x == y; });
  if (how == "ne") return comparison<T>(op, o, [=](T x, T y) { return x != y && !nan(x) && !nan(y); });
  if (how == "lt" || how == "lo") return comparison<T>(op, o, [](T x, T y) { return x < y; });
  if (how == "le" || how == "ls") return comparison<T>(op, o, [](T x, T y) { return x <= y; });
  if (how == "gt" || how == "hi") return comparison<T>(op, o, [](T x, T y) { return x > y; });
  if (how == "ge" || how == "hs") return comparison<T>(op, o, [](T x, T y) { return x >= y; });
  if (how == "equ") return comparison<T>(op, o, [=](T x, T y) { return x == y || nan(x) || nan(y); });
  if (how == "neu") return comparison<T>(op, o, [](T x, T y) { return x != y; });
  if (how == "ltu") return comparison<T>(op, o, [](T x, T y) { return !(x >= y); });
  if (how == "leu") return comparison<T>(op, o, [](T x, T y) { return !(x > y); });
  if (how == "gtu") return comparison<T>(op, o, [](T x, T y) { return !(x <= y); });
  if (how == "geu") return comparison<T>(op, o, [](T x, T y) { return !(x < y); });
  if (how == "num") return comparison<T>(op, o, [=](T x, T y) { return !nan(x) && !nan(y); });
  if (how == "nan") return comparison<T>(op, o, [=](T x, T y) { return nan(x) || nan(y); });
  return nullptr;
}

// ---- conversions

uint16_t half_bits(float x, const string& type) {
  uint16_t bits;
  const __half half = __float2half_rn(x);
  const __nv_bfloat16 brain = __float2bfloat16_rn(x);
  std::memcpy(&bits, type[0] == 'f' ? static_cast<const void*>(&half) : &brain, 2);
  return bits;
}
template <typename H>
float widened(uint16_t bits) {
  H x;
  std::memcpy(static_cast<void*>(&x), &bits, 2);
  return float(x);
}

// To an integer by a rounding modifier; what does not fit becomes the nearest that does. NaN becomes 0, or from or to
// 64 bits the integer with the highest bit alone.
template <typename To, typename From>
To integral(From x, int mode) {
  if (std::isnan(x)) return sizeof(From) == 8 || sizeof(To) == 8 ? To(uint64_t(1) << (8 * sizeof(To) - 1)) : To(0);
  const double whole = mode == FE_TOWARDZERO ? std::trunc(x)
                       : mode == FE_DOWNWARD ? std::floor(x)
                       : mode == FE_UPWARD   ? std::ceil(x)
                                             : std::nearbyint(x);
  if (whole <= double(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (whole >= double(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return To(whole);
}

// Arithmetic on two pairs of numbers of 16 bits. Each result is rounded to float and then to 16 bits.
Run of_pairs(const Opcode& op, const Operands& o) {
  const auto part = [is_half = op.type == "f16x2"](uint32_t word, int i) -> double {
    const uint16_t bits = uint16_t(word >> 16 * i);
    return is_half ? widened<__half>(bits) : widened<__nv_bfloat16>(bits);
  };
  return [=, n = op.name, type = op.type, d = o[0], a = o[1], b = o[2], c = o.back()](Thread& t) {
    uint32_t out = 0;
    for (int i = 0; i < 2; ++i) {
      const double x = part(t.get<uint32_t>(a), i), y = part(t.get<uint32_t>(b), i), z = part(t.get<uint32_t>(c), i);
      const double exact = n == "add" ? x + y : n == "sub" ? x - y : n == "mul" ? x * y : x * y + z;
      out |= uint32_t(half_bits(float(exact), type)) << 16 * i;
    }
    t.put(d, out);
  };
}

Run converted(const Opcode& op, const Operands& o) {
  const string &to = op.parts[op.parts.size() - 2], &from = op.type;
  const bool is_short = to.find("f16") < 2 || from.find("f16") < 2;
  if (is_short && (to == "f32") == (from == "f32")) return nullptr;
  if (to == "f16x2" || to == "bf16x2")
    return [=, d = o[0], high = o[1], low = o[2]](Thread& t) {
      t.put(d, uint32_t(half_bits(t.get<float>(high), to)) << 16 | half_bits(t.get<float>(low), to));
    };
  if (to == "f16" || to == "bf16")
    return [=, d = o[0], a = o[1]](Thread& t) { t.put(d, half_bits(t.get<float>(a), to)); };
  if (from == "f16") return unary<uint16_t>(o, widened<__half>);
  if (from == "bf16") return unary<uint16_t>(o, widened<__nv_bfloat16>);
  const int mode = op.has("rzi")   ? FE_TOWARDZERO
                   : op.has("rmi") ? FE_DOWNWARD
                   : op.has("rpi") ? FE_UPWARD
                                   : FE_TONEAREST;
  const bool saturates = op.has("sat"), rounds = op.has("rzi") || op.has("rni") || op.has("rmi") || op.has("rpi");
  return typed(to, [&](auto y) {
    return typed(from, [&](auto x) -> Run {
      using To = decltype(y);
      using From = decltype(x);
      if constexpr (std::is_floating_point_v<From> && std::is_integral_v<To>)
        return unary<From>(o, [mode](From x) { return integral<To>(x, mode); });
      else if constexpr (std::is_floating_point_v<From>)
        return unary<From>(o, [=](From x) {
          if (saturates) return To(std::isnan(x) ? From(0) : std::clamp(x, From(0), From(1)));
          if (rounds)
            return To(mode == FE_TOWARDZERO ? std::trunc(x)
                      : mode == FE_DOWNWARD ? std::floor(x)
                      : mode == FE_UPWARD   ? std::ceil(x)
                                            : std::nearbyint(x));
          return To(x);
        });
      else
        return unary<From>(o, [](From x) { return To(x); });
    });
  });
}

// ---- memory

enum class Space { kGeneric, kShared, kParameter };

// Where an access of `bytes` goes, which has to be aligned; an address of shared memory counts from its beginning.
char* place(const Thread& t, const Operand& o, Space space, size_t bytes) {
  const uint64_t base = o.width == 8 ? t.get<uint64_t>(o) : t.get<uint32_t>(o);
  char* at = reinterpret_cast<char*>(base + uint64_t(o.extra));
  if (space == Space::kShared) {
    at += reinterpret_cast<uintptr_t>(dynamic_shared());
    expect_shared(at, bytes, "an access of shared memory");
  }
  expect_aligned(at, bytes, "an access of memory");
  return at;
}

Space space_of(const Opcode& op) {
  return op.has("param") ? Space::kParameter : op.has("shared") ? Space::kShared : Space::kGeneric;
}

Run moved_memory(const Opcode& op, const Operands& o) {
  const bool loads = op.name == "ld";
  const int n = op.has("v2") ? 2 : op.has("v4") ? 4 : 1;
  const Space space = space_of(op);
  Operands values = o;
  const Operand address = loads ? o.back() : o.front();
  values.erase(loads ? values.end() - 1 : values.begin());
  if (int(values.size()) != n || op.has("acquire") || op.has("release")) return nullptr;
  return typed(op.type, [&](auto x) -> Run {
    using T = decltype(x);
    return [=](Thread& t) {
      char* at = place(t, address, space, n * sizeof(T));
      if (space == Space::kGeneric) touch(at, n * sizeof(T), !loads);
      for (int i = 0; i < n; ++i, at += sizeof(T)) {
        T value = t.get<T>(values[i]);
        std::memcpy(loads ? static_cast<void*>(&value) : at, loads ? at : static_cast<void*>(&value), sizeof(T));
        if (loads) t.put(values[i], value);
      }
    };
  });
}

Run atomic(const Opcode& op, const Operands& o) {
  const Space space = space_of(op);
  const bool orders = op.has("acq_rel");
  if (op.has("acquire") || op.has("release")) return nullptr;
  return typed(op.type, [&](auto x) -> Run {
    using T = decltype(x);
    std::function<T(T, T, T)> change;
    if (op.has("add")) change = [](T old, T y, T) { return T(old + y); };
    if (op.has("min")) change = [](T old, T y, T) { return std::min(old, y); };
    if (op.has("max")) change = [](T old, T y, T) { return std::max(old, y); };
    if (op.has("exch")) change = [](T, T y, T) { return y; };
    if (op.has("cas")) change = [](T old, T y, T z) { return old == y ? z : old; };
    if (op.has("inc")) change = [](T old, T y, T) { return old >= y ? T(0) : T(old + 1); };
    if constexpr (std::is_integral_v<T>) {
      if (op.has("or")) change = [](T old, T y, T) { return T(old | y); };
      if (op.has("and")) change = [](T old, T y, T) { return T(old & y); };
    }
    if (!change) return nullptr;
    return [=, d = o[0], a = o[1], b = o[2], c = o.back()](Thread& t) {
      char* at = place(t, a, space, sizeof(T));
      if (orders) fence();
      before_atomic(at);
      T old;
      std::memcpy(&old, at, sizeof(T));
      const T value = change(old, t.get<T>(b), t.get<T>(c));
      std::memcpy(at, &value, sizeof(T));
      after_atomic(at, sizeof(T));
      if (orders) fence();
      t.put(d, old);
    };
  });
}

Run copied(const Opcode& op, const Operands& o) {
  if (op.has("commit_group")) return [](Thread&) { commit_async(); };
  if (op.has("wait_all")) return [](Thread&) { wait_async(-1); };
  if (op.has("wait_group")) return [groups = o[0]](Thread& t) { wait_async(int(t.get<int32_t>(groups))); };
  const bool hinted = op.has("L2::cache_hint"), counted = o.size() == 4u + hinted;
  if (!counted && o.size() != 3u + hinted) return nullptr;
  return [=, to = o[0], from = o[1], size = o[2], valid = o[3 - !counted], policy = o.back()](Thread& t) {
    const unsigned bytes = t.get<uint32_t>(size), read = std::min(bytes, t.get<uint32_t>(valid));
    if (hinted && t.get<uint64_t>(policy) != kPolicy) fail("no cache policy");
    copy_async(place(t, to, Space::kShared, bytes), place(t, from, Space::kGeneric, bytes), read, bytes - read);
  };
}

// ---- warps

// A lane at an instruction of the whole warp.
struct Lane {
  Thread* thread;
  const Operands* operands;  // of the instruction
};
// The 32 lanes, which have to be at the same instruction.
std::vector<Lane> lanes(void* const* payloads) {
  std::vector<Lane> all;
  for (int l = 0; l < 32; ++l) all.push_back(*static_cast<Lane*>(payloads[l]));
  for (const Lane& one : all)
    if (one.operands != all[0].operands) fail("the lanes of a warp are at different instructions");
  return all;
}

// ldmatrix.m8n8.xN: thread 8 m + r has the address of row r of matrix m; register m of lane l has elements 2 (l % 4)
// and + 1 of row l / 4.
template <bool kTransposed>
void load_matrices(void* const* payloads) {
  const std::vector<Lane> all = lanes(payloads);
  const int many = int(all[0].operands->size()) - 1;
  uint16_t element[4][8][8];
  for (int m = 0; m < many; ++m)
    for (int r = 0; r < 8; ++r) {
      const Lane& owner = all[8 * m + r];
      std::memcpy(element[m][r], place(*owner.thread, owner.operands->back(), Space::kShared, 16), 16);
    }
  for (int l = 0; l < 32; ++l)
    for (int m = 0; m < many; ++m) {
      const int row = l / 4, column = 2 * (l % 4);
      const uint32_t low = kTransposed ? element[m][column][row] : element[m][row][column];
      const uint32_t high = kTransposed ? element[m][column + 1][row] : element[m][row][column + 1];
      all[l].thread->put((*all[l].operands)[m], high << 16 | low);
    }
}

// mma.m16n8k16 of 16-bit elements, figures "Fragment layout for A, B, C": with g = lane / 4 and p = lane % 4, element i
// of A is at row g (i = 0, 1, 4, 5) or g + 8, and column 2 p + i % 2, + 8 from i = 4; of B at row 2 p + i % 2, + 8 from
// i = 2, and column g; of C and D at row g, + 8 from i = 2, and column 2 p + i % 2.
template <typename H>
void multiply_matrices(void* const* payloads) {
  const std::vector<Lane> all = lanes(payloads);
  float a[16][16], b[16][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, p = l % 4;
    const auto element = [&](int first, int i) {
      const uint32_t word = all[l].thread->get<uint32_t>((*all[l].operands)[first + i / 2]);
      return widened<H>(uint16_t(i % 2 ? word >> 16 : word));
    };
    for (int i = 0; i < 8; ++i) a[g + (i / 2 % 2 ? 8 : 0)][2 * p + i % 2 + (i >= 4 ? 8 : 0)] = element(4, i);
    for (int i = 0; i < 4; ++i) b[2 * p + i % 2 + (i >= 2 ? 8 : 0)][g] = element(8, i);
  }
  for (int l = 0; l < 32; ++l)
    for (int i = 0; i < 4; ++i) {
      const int row = l / 4 + (i >= 2 ? 8 : 0), column = 2 * (l % 4) + i % 2;
      double sum = all[l].thread->get<float>((*all[l].operands)[10 + i]);
      for (int k = 0; k < 16; ++k) sum += double(a[row][k]) * b[k][column];
      all[l].thread->put((*all[l].operands)[i], float(sum));
    }
}

Run collective(void (*run)(void* const*), const Operands& o) {
  auto operands = std::make_shared<Operands>(o);
  return [=](Thread& t) {
    Lane me{&t, operands.get()};
    warp_collective(run, &me);
  };
}

Run shuffled(const Opcode& op, const Operands& o) {
  const string how = op.parts[2];
  op.asked.insert(how);
  const bool tells = o.size() == 6;
  return [=, d = o[0], p = o[1], a = o[1 + tells], b = o[2 + tells], c = o[3 + tells], m = o.back()](Thread& t) {
    const int by = int(t.get<uint32_t>(b) & 31), clamp = int(t.get<uint32_t>(c)), own = int(lane());
    const int segment = clamp >> 8 & 31, first = own & segment, last = first | (clamp & 31 & ~segment);
    int from = how == "up" ? own - by : how == "down" ? own + by : how == "bfly" ? own ^ by : first | (by & ~segment);
    const bool inside = how == "up" ? from >= last : from <= last;
    if (!inside) from = own;
    t.put(d, uint32_t(warp(WarpOp::kShuffle, t.get<uint32_t>(m), t.get<uint32_t>(a), from)));
    if (tells) t.put(p, uint32_t(inside));
  };
}

Run of_warp(const Opcode& op, const Operands& o) {
  if (op.name == "shfl") return shuffled(op, o);
  if (op.name == "ldmatrix") return collective(op.has("trans") ? load_matrices<true> : load_matrices<false>, o);
  if (op.name == "mma") {
    if (!op.has("m16n8k16") || o.size() != 14 || op.type != "f32") return nullptr;
    return collective(op.has("bf16") ? multiply_matrices<__nv_bfloat16> : multiply_matrices<__half>, o);
  }
  if (op.has("uni") || (op.name == "match" && op.has("all"))) return nullptr;
  if (op.name == "vote") {
    const WarpOp vote = op.has("ballot") ? WarpOp::kBallot : op.has("any") ? WarpOp::kAny : WarpOp::kAll;
    return [=, d = o[0], a = o[1], m = o[2]](Thread& t) {
      t.put(d, uint32_t(warp(vote, t.get<uint32_t>(m), t.predicate(a))));
    };
  }
  if (op.name == "match")
    return [=, d = o[0], a = o[1], m = o[2], wide = op.type == "b64"](Thread& t) {
      const uint64_t value = wide ? t.get<uint64_t>(a) : t.get<uint32_t>(a);
      t.put(d, uint32_t(warp(WarpOp::kMatch, t.get<uint32_t>(m), value)));
    };
  if (op.type != "b32" && op.type != "u32" && op.type != "s32") return nullptr;
  op.asked.insert("xor");
  const WarpOp all = op.has("add")   ? WarpOp::kAdd
                     : op.has("min") ? WarpOp::kMin
                     : op.has("max") ? WarpOp::kMax
                     : op.has("and") ? WarpOp::kAnd
                     : op.has("or")  ? WarpOp::kOr
                                     : WarpOp::kXor;
  return [=, d = o[0], a = o[1], m = o[2], has_sign = op.type == "s32"](Thread& t) {  // redux
    const uint64_t value = has_sign ? uint64_t(int64_t(t.get<int32_t>(a))) : t.get<uint32_t>(a);
    t.put(d, uint32_t(warp(all, t.get<uint32_t>(m), value, has_sign)));
  };
}

Run at_barrier(const Opcode& op, const Operands& o) {
  if (op.has("warp")) return [m = o[0]](Thread& t) { warp(WarpOp::kSync, t.get<uint32_t>(m), 0); };
  if (op.has("red")) {
    const bool counts = op.has("popc"), all = op.has("and"), any = op.has("or");
    if (o.size() != 3 || counts + all + any != 1) return nullptr;  // of all threads, as for sync
    const Barrier kind = counts ? Barrier::kCount : all ? Barrier::kAnd : Barrier::kOr;
    return [=, d = o[0], p = o.back()](Thread& t) { t.put(d, uint32_t(barrier(kind, t.predicate(p)))); };
  }
  if (!op.has("sync") || o.size() != 1) return nullptr;  // of all threads; ptx.py sees that it is barrier 0
  return [](Thread&) { barrier(Barrier::kSync, 0); };
}

// ---- bits, moves, choices, control

Run bits(const Opcode& op, const Operands& o) {
  const string& n = op.name;
  if (n == "prmt" && op.type == "b32")
    return ternary<uint32_t>(o, [](uint32_t x, uint32_t y, uint32_t how) {
      const uint64_t all = uint64_t(y) << 32 | x;
      uint32_t out = 0;
      for (int i = 0; i < 4; ++i, how >>= 4) {
        uint32_t byte = uint32_t(all >> 8 * (how & 7)) & 255;
        if (how & 8) byte = byte & 128 ? 255 : 0;
        out |= byte << 8 * i;
      }
      return out;
    });
  if (n == "shf")
    return ternary<uint32_t>(o, [left = op.has("l"), wraps = op.has("wrap")](uint32_t low, uint32_t high, uint32_t by) {
      by = wraps ? by & 31 : std::min(by, 32u);
      const uint64_t all = uint64_t(high) << 32 | low;
      return uint32_t(left ? all << by >> 32 : all >> by);
    });
  if (n == "lop3")
    return [d = o[0], a = o[1], b = o[2], c = o[3], table = o[4]](Thread& t) {
      const uint32_t x = t.get<uint32_t>(a), y = t.get<uint32_t>(b), z = t.get<uint32_t>(c);
      uint32_t out = 0;
      for (int row = 0; row < 8; ++row)
        if (t.get<uint32_t>(table) >> row & 1) out |= (row & 4 ? x : ~x) & (row & 2 ? y : ~y) & (row & 1 ? z : ~z);
      t.put(d, out);
    };
  return integer(op.type, [&](auto type) -> Run {
    using T = decltype(type);
    using U = std::make_unsigned_t<T>;
    constexpr unsigned kBits = 8 * sizeof(T);
    const auto length = [](U x) { return x ? 64u - unsigned(__builtin_clzll(x)) : 0u; };
    if (n == "popc") return unary<U>(o, [](U x) { return uint32_t(__builtin_popcountll(x)); });
    if (n == "clz") return unary<U>(o, [=](U x) { return kBits - length(x); });
    if (n == "bfind" && std::is_unsigned_v<T>)
      return unary<U>(o, [=, shift = op.has("shiftamt")](U x) {
        return !x ? ~0u : shift ? kBits - length(x) : length(x) - 1;
      });
    if (n == "brev")
      return unary<U>(o, [](U x) {
        U out = 0;
        for (unsigned i = 0; i < kBits; ++i) out = U(out << 1 | (x >> i & 1));
        return out;
      });
    if (n == "bfe" && std::is_unsigned_v<T>)
      return [d = o[0], a = o[1], b = o[2], c = o[3]](Thread& t) {
        const unsigned at = t.get<uint32_t>(b) & 255, many = t.get<uint32_t>(c) & 255;
        const uint64_t kept = at < kBits ? uint64_t(t.get<U>(a)) >> at : 0;
        t.put(d, U(many < 64 ? kept & ((uint64_t(1) << many) - 1) : kept));
      };
    if (n == "bfi" && sizeof(T) == 4)
      return [d = o[0], a = o[1], b = o[2], c = o[3], e = o[4]](Thread& t) {
        const unsigned at = t.get<uint32_t>(c) & 255, many = t.get<uint32_t>(e) & 255;
        const uint64_t mask = ((uint64_t(1) << std::min(many, 32u)) - 1) << std::min(at, 32u);
        t.put(d, U((t.get<U>(b) & ~mask) | ((uint64_t(t.get<U>(a)) << std::min(at, 32u)) & mask)));
      };
    return nullptr;
  });
}

Run moved(const Opcode& op, const Operands& o) {
  if (o.size() == 2)
    return [d = o[0], a = o[1]](Thread& t) { std::memmove(t.slots + d.slot, t.slots + a.slot, d.width); };
  // One register from several, or several from one; ptx.py says which.
  const int all = std::stoi(op.type.substr(1)) / 8, each = all / (int(o.size()) - 1);
  return [=, packs = op.has("pack")](Thread& t) {
    uint64_t whole = packs ? 0 : t.get<uint64_t>(o.back());
    for (size_t i = 0; i + 1 < o.size(); ++i) {
      char* part = reinterpret_cast<char*>(&whole) + i * each;
      if (packs)
        std::memcpy(part, t.slots + o[1 + i].slot, each);
      else
        std::memcpy(t.slots + o[i].slot, part, each);
    }
    if (packs) std::memcpy(t.slots + o[0].slot, &whole, all);
  };
}

Run of_predicates(const Opcode& op, const Operands& o) {
  const string& n = op.name;
  if (n == "mov" || n == "not")
    return [d = o[0], a = o[1], negates = n == "not"](Thread& t) { t.put(d, uint32_t(t.predicate(a) != negates)); };
  return [=, d = o[0], a = o[1], b = o[2]](Thread& t) {
    const bool x = t.predicate(a), y = t.predicate(b);
    t.put(d, uint32_t(n == "and" ? x && y : n == "or" ? x || y : x != y));
  };
}

Run compile_one(const Opcode& op, const Operands& o) {
  const string& n = op.name;
  const auto is = [&](std::initializer_list<const char*> names) {
    return std::find(names.begin(), names.end(), n) != names.end();
  };
  if (n == "bra") return [to = size_t(o[0].extra)](Thread& t) { t.next = to; };
  if (is({"ret", "exit"})) return [](Thread& t) { t.next = t.program.steps.size(); };
  if (is({"ld", "st"})) return moved_memory(op, o);
  if (n == "cp") return copied(op, o);
  if (n == "atom") return atomic(op, o);
  if (is({"bar", "barrier"})) return at_barrier(op, o);
  if (is({"shfl", "vote", "match", "redux", "ldmatrix", "mma"})) return of_warp(op, o);
  if (is({"membar", "fence"})) return op.has("cta") ? Run([](Thread&) {}) : Run([](Thread&) { fence(); });
  if (n == "griddepcontrol")
    return op.has("wait") ? Run([](Thread&) { dependency_wait(); }) : Run([](Thread&) { launch_dependents(); });
  if (n == "prefetch") return [](Thread&) {};
  if (n == "createpolicy") return [d = o[0]](Thread& t) { t.put(d, kPolicy); };
  if (n == "cvta") {
    const int sign = !op.has("shared") ? 0 : op.has("to") ? -1 : 1;
    return unary<uint64_t>(o, [sign](uint64_t x) { return x + sign * reinterpret_cast<uint64_t>(dynamic_shared()); });
  }
  if (n == "setp") return typed(op.type, [&](auto x) { return compared<decltype(x)>(op, o); });
  if (n == "selp")
    return [d = o[0], a = o[1], b = o[2], c = o[3]](Thread& t) {
      std::memmove(t.slots + d.slot, t.slots + (t.predicate(c) ? a : b).slot, d.width);
    };
  if (n == "cvt") return converted(op, o);
  if (op.type == "pred") return of_predicates(op, o);
  if (n == "mov") return moved(op, o);
  if (is({"prmt", "shf", "lop3", "popc", "clz", "bfind", "brev", "bfe", "bfi"})) return bits(op, o);
  if (is({"add", "sub", "mul", "fma"}) && (op.type == "f16x2" || op.type == "bf16x2")) return of_pairs(op, o);
  if (op.type == "f32") return real<float>(op, o);
  if (op.type == "f64") return real<double>(op, o);
  return integer(op.type, [&](auto x) { return whole<decltype(x)>(op, o); });
}

}  // namespace

// Whether all modifiers were looked for, or are types, the names that are left for "else" above, or words that change
// nothing here: spaces, scopes, hints, the nearest rounding, precision.
bool is_understood(const Opcode& op) {
  static const string silent =
      " u8 s8 b8 u16 s16 b16 u32 s32 b32 u64 s64 b64 f16 bf16 f32 f64 f16x2 bf16x2 pred all any"
      " launch_dependents global param shared gpu cta sys gl sc acq_rel relaxed volatile nc ca cg cs L2 L2::128B"
      " L2::evict_first fractional rn approx full uni to async sync aligned unpack row col m8n8 x1 x2 x4 ";
  return std::all_of(op.parts.begin() + 1, op.parts.end(), [&](const string& part) {
    return op.asked.count(part) || silent.find(" " + part + " ") != string::npos;
  });
}

Program::Step compile(const Line& line) {
  const Opcode op(line.opcode);
  Run run = compile_one(op, line.operands);
  if (!run || !is_understood(op))
    throw std::invalid_argument("the PTX instruction " + line.opcode + " is not known: add it to ptx.cpp");
  return {line.guard, line.negated, std::move(run)};
}

static Find programs;

void use(Find found) { programs = std::move(found); }

std::shared_ptr<const Program> find(const void* kernel) { return programs ? programs(kernel) : nullptr; }

void run(const Program& program, const Parameters& parameters) {
  Thread thread{thread_memory(program.slots.size()), program};
  std::memcpy(thread.slots, program.slots.data(), program.slots.size());
  for (const auto& [slot, name] : program.named) {
    const auto axis = [&](auto v) { return name.back() == 'x' ? v.x : name.back() == 'y' ? v.y : v.z; };
    uint64_t value = 0;
    if (name[0] != '%')
      value = reinterpret_cast<uint64_t>(parameters.data()) + std::stoul(name);
    else if (name == "%laneid")
      value = lane();
    else
      value = name.compare(0, 5, "%tid.") == 0     ? axis(thread_index)
              : name.compare(0, 6, "%ntid.") == 0  ? axis(block_dim)
              : name.compare(0, 7, "%ctaid.") == 0 ? axis(block_index)
                                                   : axis(grid_dim);
    std::memcpy(thread.slots + slot, &value, 8);
  }
  while (thread.next < program.steps.size()) {
    const Program::Step& step = program.steps[thread.next++];
    if (step.guard < 0 || thread.predicate({step.guard, 4, step.negated})) step.run(thread);
  }
}

}  // namespace emulation::ptx
