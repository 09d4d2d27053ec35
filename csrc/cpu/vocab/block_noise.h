// The Philox words of 64 tokens at a time.
#pragma once
#include <cstdint>
#include <cstring>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "common/noise.h"
#include "cpu/base/vec.h"

DFLASH_NAMESPACE_BEGIN

constexpr int kBlock = 64;

typedef uint64_t LVec __attribute__((vector_size(4 * DFLASH_WIDTH)));

// The product of the low 32 bits of each lane.
static inline LVec multiply_low(LVec a, LVec b) {
#if defined(__AVX512F__)
  // GCC 12 warns about the unmasked intrinsic.
  return LVec(_mm512_maskz_mul_epu32(0xff, __m512i(a), __m512i(b)));
#elif defined(__AVX2__)
  return LVec(_mm256_mul_epu32(__m256i(a), __m256i(b)));
#elif defined(__SSE2__)
  return LVec(_mm_mul_epu32(__m128i(a), __m128i(b)));
#else
  return (a & 0xffffffffu) * (b & 0xffffffffu);
#endif
}

// noise_words for a full block, one counter per 64-bit lane. Only the low halves matter, so the high halves are never
// masked off.
static void block_words(uint32_t group, uint64_t position, uint64_t seed, uint32_t* words) {
  constexpr int kLanes = kWidth / 2;
  uint64_t pairs[2][kBlock / 4];  // the first two words of each counter, the last two; little endian
  LVec lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  for (int g = 0; g < kBlock / 4; g += kLanes) {
    LVec c0 = lane + (group + g), c1 = LVec{} + uint32_t(position), c2 = LVec{} + (position >> 32), c3 = {};
    uint32_t k0 = uint32_t(seed), k1 = uint32_t(seed >> 32);
    for (int round = 0; round < 10; ++round) {
      const LVec p0 = multiply_low(c0, LVec{} + kPhiloxM0), p1 = multiply_low(c2, LVec{} + kPhiloxM1);
      c0 = (p1 >> 32) ^ c1 ^ uint64_t(k0);
      c2 = (p0 >> 32) ^ c3 ^ uint64_t(k1);
      c1 = p1;
      c3 = p0;
      k0 += kPhiloxW0;
      k1 += kPhiloxW1;
    }
    const LVec first = (c0 & 0xffffffffu) | (c1 << 32), second = (c2 & 0xffffffffu) | (c3 << 32);
    std::memcpy(pairs[0] + g, &first, sizeof(first));
    std::memcpy(pairs[1] + g, &second, sizeof(second));
  }
  uint64_t interleaved[kBlock / 2];
  for (int g = 0; g < kBlock / 4; ++g) {
    interleaved[2 * g] = pairs[0][g];
    interleaved[2 * g + 1] = pairs[1][g];
  }
  std::memcpy(words, interleaved, sizeof(interleaved));
}

DFLASH_NAMESPACE_END
