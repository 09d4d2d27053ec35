// What the kernels that read logits share: bounds, keys that order floats, and the noise words of a token.
#pragma once
#include "cuda/device.cuh"
#include "noise.h"

namespace dflash {

constexpr float kLargestFloat = 3.4028234663852886e38f;
constexpr float kLargestNoise = 22.875f;  // above 33 ln2

static __device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// A runtime index would force the words out of registers into local memory.
static __device__ __forceinline__ uint32_t word_of(const Words4& words, uint32_t id) {
  const uint32_t low = id & 1 ? words.word[1] : words.word[0], high = id & 1 ? words.word[3] : words.word[2];
  return id & 2 ? high : low;
}

static __device__ __forceinline__ float scaled(float sharpness, float z) {
  return fabsf(z) == infinity() ? z : DFLASH_MUL32(sharpness, z);
}

// At least gumbel(word): -ln(word / 2^32) <= ln2 (151 - bits / 2^23), where bits are those of
// float(word >> 8), with some margin.
static __device__ __forceinline__ float noise_bound(uint32_t word) {
  return 104.6663f - float(__float_as_uint(float(word >> 8))) * 8.2629582e-8f;
}

// z - top; the largest logit gives 0 even if it is infinite.
static __device__ __forceinline__ float below_top(float z, float top) { return z == top ? 0.0f : z - top; }

// Grows with x, at least 1; both zeros have the same.
static __device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

}  // namespace dflash
