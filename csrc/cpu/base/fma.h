// a * b + c with one rounding wherever the instruction set can, written out so that no compiler decides which of two
// products it fuses: for sums whose bits must be the same in every loop they are part of.
#pragma once
#include "cpu/base/vec.h"
#if defined(__AVX512F__) || defined(__FMA__)
// GCC 12 warns about uninitialised vectors in its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

DFLASH_NAMESPACE_BEGIN

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
