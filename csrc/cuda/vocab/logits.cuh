// What the kernels that read logits share: keys that order floats, a row's keyed noise, and its scores.
#pragma once
#include "common/noise.h"
#include "cuda/base/device.cuh"

namespace dflash {

constexpr float kLargestFloat = 3.4028234663852886e38f;
constexpr float kLargestNoise = 22.875f;  // above 33 ln2

// A key that grows with x, at least 1, the same for both zeros; and back.
static __device__ __forceinline__ uint32_t key_of(float x) {
  const uint32_t bits = __float_as_uint(x == 0.0f ? 0.0f : x);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
static __device__ __forceinline__ float from_key(uint32_t key) {
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The Philox words of a row's tokens. Four neighbors share theirs, so the last ones are kept.
struct RowNoise {
  uint64_t position, seed;
  uint32_t stream, group = 0xffffffffu;
  Words4 words{};

  __device__ __forceinline__ RowNoise(uint64_t position, uint64_t seed, uint32_t stream = 0)
      : position(position), seed(seed), stream(stream) {}

  __device__ __forceinline__ uint32_t word(uint32_t id) {
    if (id >> 2 != group) group = id >> 2, words = noise_words(group, position, stream, seed);
    // A runtime index would force the words out of registers into local memory.
    const uint32_t low = id & 1 ? words.word[1] : words.word[0];
    const uint32_t high = id & 1 ? words.word[3] : words.word[2];
    return id & 2 ? high : low;
  }
};

// At least gumbel(word): -ln(word / 2^32) <= ln2 (151 - bits / 2^23), where bits are those of
// float(word >> 8), with some margin.
static __device__ __forceinline__ float noise_bound(uint32_t word) {
  return 104.6663f - float(__float_as_uint(float(word >> 8))) * 8.2629582e-8f;
}

// The score of a token with noise, if keep() and it may be `floor` or more, else NaN, which no score is compared with.
// Its Philox word is only needed if the score plus the largest possible noise reaches that, and the logarithm if the
// bound of the word does too. fp32 addition is monotone, so a token that is left out is below `floor`.
template <typename Keep>
static __device__ __forceinline__ float noisy_score(const Draw& draw, RowNoise& noise, float z, uint32_t id,
                                                    float floor, Keep&& keep) {
  const float score = sharpened(draw, z);
  if (DFLASH_ADD32(score, kLargestNoise) < floor) return not_a_number();
  const uint32_t word = noise.word(id);
  if (DFLASH_ADD32(score, noise_bound(word)) < floor || !keep()) return not_a_number();
  return DFLASH_ADD32(score, gumbel(word));
}

}  // namespace dflash
