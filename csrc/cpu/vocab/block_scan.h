// A row of logits in blocks of 64, for kernels that look for few of its tokens: the maximum of each block, and which
// tokens of a block may matter once their keyed noise is added.
#pragma once
#include <limits>

#include "cpu/vocab/block_noise.h"

DFLASH_NAMESPACE_BEGIN

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLargestNoise = 22.875f;  // above 33 ln2

// The largest lane of a vector without NaN.
static inline float largest_lane(Vec v) {
  typedef float Quarter __attribute__((vector_size(16), may_alias));
  alignas(64) float lanes[kWidth];
  std::memcpy(lanes, &v, sizeof(v));
  Quarter top = *reinterpret_cast<const Quarter*>(lanes);
#pragma GCC unroll 4
  for (int i = 4; i < kWidth; i += 4) {
    const Quarter next = *reinterpret_cast<const Quarter*>(lanes + i);
    top = next > top ? next : top;
  }
  const float a = top[1] > top[0] ? top[1] : top[0], b = top[3] > top[2] ? top[3] : top[2];
  return b > a ? b : a;
}

// Computes the maximum of every block; returns true if the row has no NaN.
template <typename T>
static bool scan(const T* logits, int64_t vocab, float* block_max) {
  IVec largest_bits = {};
  const int64_t whole = vocab / kBlock;
  for (int64_t b = 0; b < whole; ++b) {
    const T* x = logits + b * kBlock;
    Vec top = load(x);
    for (int i = 0; i < kBlock; i += kWidth) {
      const Vec v = load(x + i);
      const IVec bits = reinterpret_cast<const IVec&>(v) & 0x7fffffff;
      top = v > top ? v : top;
      largest_bits = bits > largest_bits ? bits : largest_bits;
    }
    block_max[b] = largest_lane(top);
  }
  bool clean = true;
  for (int i = 0; i < kWidth; ++i) clean &= largest_bits[i] <= 0x7f800000;
  if (whole * kBlock < vocab) {
    float top = -kInf;
    for (int64_t i = whole * kBlock; i < vocab; ++i) {
      const float v = to_float(logits[i]);
      clean &= v == v;
      top = v > top ? v : top;
    }
    block_max[whole] = top;
  }
  return clean;
}

struct Block {
  Vec v[kBlock / kWidth];
};

// One block of logits, padded with -inf.
template <typename T>
static inline Block load_block(const T* logits, int64_t vocab, int64_t block) {
  const T* x = logits + block * kBlock;
  const int64_t left = vocab - block * kBlock;
  Block loaded;
  if (left >= kBlock) {
    for (int i = 0; i < kBlock; i += kWidth) loaded.v[i / kWidth] = load(x + i);
    return loaded;
  }
  float padded[kBlock];
  for (int i = 0; i < kBlock; ++i) padded[i] = i < left ? to_float(x[i]) : -kInf;
  std::memcpy(&loaded, padded, sizeof(padded));
  return loaded;
}

// z = logits / temperature of one block, padded with -inf.
template <typename T>
static void scaled_block(const T* logits, int64_t vocab, float temperature, int64_t block, float* z) {
  const Block x = load_block(logits, vocab, block);
  for (int i = 0; i < kBlock; i += kWidth) store(z + i, x.v[i / kWidth] / splat(temperature));
}

// Which tokens of a block have z >= floor and may score at least `best`: writes sharpness * z to `a` and the flags to
// `hit`; returns true if there are any. `word` holds the block's Philox words.
//
// -ln(word / 2^32) <= ln2 (151 - bits / 2^23), where bits are those of float(word >> 8), because
// log2(1 + f) >= f for the mantissa f.
static inline bool may_reach(const float* z, const uint32_t* word, float sharpness, float best, float floor, float* a,
                             int32_t* hit) {
  IVec any = {};
  for (int i = 0; i < kBlock; i += kWidth) {
    const Vec v = load(z + i);
    const IVec infinite = (reinterpret_cast<const IVec&>(v) & 0x7fffffff) == 0x7f800000;
    const Vec score = infinite ? v : v * splat(sharpness);
    const UVec high = *reinterpret_cast<const UVec*>(word + i) >> 8;
    const Vec wide = __builtin_convertvector(reinterpret_cast<const IVec&>(high), Vec);
    const Vec bits = __builtin_convertvector(reinterpret_cast<const IVec&>(wide), Vec);
    const Vec bound = splat(104.6663f) - bits * splat(8.2629582e-8f);
    const IVec live = (score + bound >= splat(best)) & (v >= splat(floor));
    store(a + i, score);
    *reinterpret_cast<IVec*>(hit + i) = live;
    any |= live;
  }
  int32_t found = 0;
  for (int i = 0; i < kWidth; ++i) found |= any[i];
  return found != 0;
}

DFLASH_NAMESPACE_END
