// A short fp32 vector, as wide as the instruction set this file is compiled for (GCC/Clang vector extensions, so that
// aarch64 builds too), bf16 conversion and a fixed-order horizontal sum. Every kernel is written once on this.
#pragma once
#include <cstdint>
#include <cstring>

#include "binding/params.h"

// GCC 12 warns about uninitialised vectors in its own intrinsics, and about the sums of rows without columns, which
// nobody asks for.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
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
typedef float Vec __attribute__((vector_size(4 * DFLASH_WIDTH), aligned(4), may_alias));
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

// Lanes are added pairwise, in an order that does not depend on the data.
static inline float sum(Vec x) {
  float lane[kWidth];
  std::memcpy(lane, &x, sizeof(x));
  for (int step = kWidth / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lane[i] += lane[i + step];
  return lane[0];
}

// A running sum in 16 lanes whatever the width, so that the error does not grow on narrow instruction sets.
struct Sum16 {
  static constexpr int kVecs = 16 / kWidth;
  Vec lanes[kVecs] = {};
  float total() const {
    Vec x = lanes[0];
    for (int i = 1; i < kVecs; ++i) x += lanes[i];
    return sum(x);
  }
};

// The sum of x[i]^2.
template <typename T>
static inline float sum_of_squares(const T* x, int64_t n) {
  Sum16 squares;
  float tail = 0.0f;
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) {
    const Vec v = load(x + i);
    squares.lanes[i / kWidth % Sum16::kVecs] += v * v;
  }
  for (; i < n; ++i) tail += to_float(x[i]) * to_float(x[i]);
  return squares.total() + tail;
}

// ((first x + next) x + next) ...
template <typename... Next>
static inline Vec horner(Vec x, Vec sum, Next... next) {
  ((sum = sum * x + next), ...);
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
  Vec n = (x * 1.44269504f + magic) - magic;
  Vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Vec p = horner(r, splat(1.9875691500e-4f), 1.3981999507e-3f, 8.3334519073e-3f, 4.1665795894e-2f, 1.6666665459e-1f,
                 5.0000001201e-1f);
  p = p * (r * r) + r + 1.0f;
  IVec exponent = (__builtin_convertvector(n, IVec) + 127) << 23;
  Vec y = p * reinterpret_cast<Vec&>(exponent);
  return reinterpret_cast<Vec>(reinterpret_cast<IVec>(y) & ~under);
}

// x / (1 + exp(-x)). exp_vec saturates, but far below zero silu is 0, and NaN at -infinity.
static inline Vec silu(Vec x) { return x < splat(-104.0f) ? x - x : x / (exp_vec(-x) + 1.0f); }

// a * b + c with one rounding wherever the instruction set can, written out so that no compiler decides which of two
// products it fuses: for sums whose bits must be the same in every loop they are part of.
static inline Vec fma_vec(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__) && defined(__FMA__)
  return (Vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__)
  return (Vec)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__aarch64__)
  return (Vec)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Multiply-add of one lane.
static inline float fma_one(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

DFLASH_NAMESPACE_END
