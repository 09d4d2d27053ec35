// A short fp32 vector, as wide as the instruction set this file is compiled for (GCC/Clang vector extensions, so that
// aarch64 builds too), bf16 conversion and a fixed-order horizontal sum. Every kernel is written once on this.
//
// Results have the same bits with every width: sums over a row have 16 lanes and one tree (Sum16), the last vector of a
// row is padded and not computed one element at a time (over_vectors), and only fma_vec fuses a product and a sum: the
// compiler must not (-ffp-contract=off).
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#include "binding/params.h"

// GCC 12 warns about uninitialised vectors in its own intrinsics, and about the sums of rows without columns, which
// nobody asks for.
#ifndef __clang__  // which does not know the first name
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#pragma GCC diagnostic ignored "-Wuninitialized"
#if defined(__SSE2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
#define DFLASH_WIDTH 16
#elif defined(__AVX2__)
#define DFLASH_WIDTH 8
#else
#define DFLASH_WIDTH 4
#endif

// Each instruction set has its own namespace, and all but the kernels themselves has internal linkage: the linker must
// never merge code across files, nor across instruction sets. Standard templates are therefore instantiated on types of
// this namespace only, never on float or int64_t.
#define DFLASH_NAMESPACE_BEGIN   \
  namespace dflash::DFLASH_ISA { \
  namespace {
#define DFLASH_NAMESPACE_END \
  }                          \
  }

DFLASH_NAMESPACE_BEGIN

constexpr int kWidth = DFLASH_WIDTH;
#if defined(__aarch64__)
constexpr bool kOnArm = true;  // 32 vector registers
#else
constexpr bool kOnArm = false;
#endif
typedef float Vec __attribute__((vector_size(4 * DFLASH_WIDTH), aligned(4), may_alias));
// For arrays of sums: of a type that may alias, GCC 12 also stores them to memory in every turn of a loop.
typedef float Sums __attribute__((vector_size(4 * DFLASH_WIDTH)));
typedef int32_t IVec __attribute__((vector_size(4 * DFLASH_WIDTH), aligned(4), may_alias));
typedef uint32_t UVec __attribute__((vector_size(4 * DFLASH_WIDTH), aligned(4), may_alias));
typedef uint16_t HVec __attribute__((vector_size(2 * DFLASH_WIDTH), aligned(2), may_alias));

static inline constexpr int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline constexpr int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
static inline constexpr int64_t clamped(int64_t x, int64_t last) { return most(0, least(x, last)); }
static inline constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct bf16 {
  uint16_t bits;
};

// A product with one: GCC keeps an addition of zero, because of -0.
static inline Vec splat(float x) { return (Vec{} + 1.0f) * x; }

static inline float to_float(float x) { return x; }
static inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// Round to nearest even; NaN stays NaN.
static inline bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return bf16{uint16_t((bits >> 16) | 0x40)};
  return bf16{uint16_t((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}
static inline void store_one(float* p, float x) { *p = x; }
static inline void store_one(bf16* p, float x) { *p = to_bf16(x); }

static inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
static inline Vec load(const bf16* p) {
  UVec wide = __builtin_convertvector(*reinterpret_cast<const HVec*>(p), UVec) << 16;
  return reinterpret_cast<Vec&>(wide);
}
static inline void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }
// The upper half of each is a bf16.
static inline UVec rounded_bits(Vec x) {
  UVec bits = reinterpret_cast<UVec&>(x);
  UVec rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
  UVec is_nan = reinterpret_cast<UVec>((bits & 0x7fffffffu) > 0x7f800000u);
  return ((bits | 0x400000u) & is_nan) | (rounded & ~is_nan);
}
static inline void store(bf16* p, Vec x) {
  *reinterpret_cast<HVec*>(p) = __builtin_convertvector(rounded_bits(x) >> 16, HVec);
}

// A number as a type, of this namespace.
template <int I>
struct Constant {
  constexpr operator int() const { return I; }
};

// Calls fn(0), ..., fn(N - 1) with constants, unrolled.
template <typename Fn, int... I>
static inline void unroll(const Fn& fn, std::integer_sequence<int, I...>) {
  (fn(Constant<I>{}), ...);
}
template <int N, typename Fn>
static inline void unroll(const Fn& fn) {
  unroll(fn, std::make_integer_sequence<int, N>{});
}

// The first `count` elements of a vector, and zeros; a constant where it is the whole vector.
template <typename T>
static inline Vec load(const T* p, Constant<kWidth>) {
  return load(p);
}
template <typename T>
static inline Vec load(const T* p, int64_t count) {
  T some[kWidth] = {};
  std::memcpy(some, p, count * sizeof(T));
  return load(some);
}
template <typename T>
static inline void store(T* p, Vec x, Constant<kWidth>) {
  store(p, x);
}
template <typename T>
static inline void store(T* p, Vec x, int64_t count) {
  T some[kWidth];
  store(some, x);
  std::memcpy(p, some, count * sizeof(T));
}

// Calls fn(i, count) for the vectors of `size` elements: `count` elements from i on, fewer than kWidth in the last.
template <typename Fn>
static inline void over_vectors(int64_t size, const Fn& fn) {
  int64_t i = 0;
  for (; i + kWidth <= size; i += kWidth) fn(i, Constant<kWidth>{});
  if (i < size) fn(i, size - i);
}

// a * b + c with one rounding. Without an instruction for it, in doubles: the product is exact, and the sum is rounded
// to odd, from which rounding to float gives the result (Boldo and Melquiond, 2008).
static inline Vec fma_vec(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  typedef double Wide __attribute__((vector_size(8 * DFLASH_WIDTH)));
  typedef int64_t Bits __attribute__((vector_size(8 * DFLASH_WIDTH)));
  const Wide product = __builtin_convertvector(a, Wide) * __builtin_convertvector(b, Wide);
  const Wide added = __builtin_convertvector(c, Wide), sum = product + added, back = sum - product;
  const Wide lost = (product - (sum - back)) + (added - back), side = lost * sum;  // NaN if the sum is not finite
  const Bits bits = (Bits)sum, is_even = (bits & 1) - 1;
  return __builtin_convertvector((Wide)(bits + (is_even & ((side < 0.0) - (side > 0.0)))), Vec);
#endif
}
static inline float fma_one(float a, float b, float c) { return fma_vec(splat(a), splat(b), splat(c))[0]; }

// A running sum in 16 lanes, element i in lane i % 16.
struct Sum16 {
  static constexpr int kVecs = 16 / kWidth;
  Vec lanes[kVecs] = {};

  // The lanes of the vector that starts with element i.
  Vec& of(int64_t i) { return lanes[i / kWidth % kVecs]; }

  // Lane i and lane i + 8, then i + 4, i + 2 and i + 1.
  float total() const {
    float lane[16];
    std::memcpy(lane, lanes, sizeof(lane));
    for (int step = 8; step > 0; step /= 2)
      for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
    return lane[0];
  }
};

// The sum of x[i]^2.
template <typename T>
static inline float sum_of_squares(const T* x, int64_t n) {
  Sum16 squares;
  over_vectors(n, [&](int64_t i, auto count) {
    const Vec v = load(x + i, count);
    squares.of(i) = fma_vec(v, v, squares.of(i));
  });
  return squares.total();
}

// ((first x + next) x + next) ...
template <typename... Next>
static inline Vec horner(Vec x, Vec sum, Next... next) {
  ((sum = fma_vec(sum, x, splat(next))), ...);
  return sum;
}

// exp(x) for any x (0 below -87.3, saturating above 88): 2^n * p(r), |r| <= ln2 / 2, relative error < 2e-7.
static inline Vec exp_vec(Vec x) {
  const Vec low = splat(-87.33f), high = splat(88.37f);
  IVec under = x < low;
  x = reinterpret_cast<Vec>((reinterpret_cast<IVec>(low) & under) | (reinterpret_cast<IVec>(x) & ~under));
  IVec over = x > high;
  x = reinterpret_cast<Vec>((reinterpret_cast<IVec>(high) & over) | (reinterpret_cast<IVec>(x) & ~over));
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  Vec n = fma_vec(x, splat(1.44269504f), magic) - magic;
  Vec r = fma_vec(n, splat(2.12194440e-4f), fma_vec(n, splat(-0.693359375f), x));
  Vec p = horner(r, splat(1.9875691500e-4f), 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                 5.0000001201e-1f);
  p = fma_vec(p, r * r, r) + 1.0f;
  IVec exponent = (__builtin_convertvector(n, IVec) + 127) << 23;
  Vec y = p * reinterpret_cast<Vec&>(exponent);
  return reinterpret_cast<Vec>(reinterpret_cast<IVec>(y) & ~under);
}

// x / (1 + exp(-s)). exp_vec saturates, but far below zero the sigmoid is 0, and its product with -infinity NaN.
static inline Vec times_sigmoid(Vec x, Vec s) { return s < splat(-104.0f) ? x - x : x / (exp_vec(-s) + 1.0f); }

static inline Vec silu(Vec x) { return times_sigmoid(x, x); }

// The s of gelu(x) = x * sigmoid(s) by the approximation with tanh: sqrt(8 / pi) (x + 0.044715 x^3).
static inline Vec gelu_sigmoid(Vec x) { return x * 1.5957691216f * fma_vec(x * x, splat(0.044715f), splat(1.0f)); }

// exp_vec of one number.
static inline float exp_one(float x) { return exp_vec(splat(x))[0]; }

DFLASH_NAMESPACE_END
