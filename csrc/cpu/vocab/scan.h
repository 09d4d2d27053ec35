// Rows of logits in blocks of 64 tokens, for kernels that look for few of them: the noise and the maximum of each
// block, which of its tokens may matter, and the best so far.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>

#include "common/noise.h"
#include "cpu/base/parallel.h"

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

constexpr int kVecs = kBlock / kWidth;

struct Block {
  Vec v[kVecs];
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

// The sum of exp(x.v[i]) over all blocks; `block(b)` gives x. Lanes go into a double now and then, so that the error
// does not grow with the vocabulary.
template <typename F>
static double sum_exp(int64_t blocks, F&& block) {
  double total = 0.0;
  Sum16 part;
  for (int64_t b = 0; b < blocks; ++b) {
    const Block x = block(b);
    for (int i = 0; i < kVecs; ++i) part.of(i * kWidth) += exp_vec(x.v[i]);
    if (b % 32 == 31 || b == blocks - 1) total += part.total(), part = {};
  }
  return total;
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

// A row, and how its tokens are drawn.
struct Row {
  Draw draw;
  int64_t vocab, blocks;
  uint64_t position, seed;
};

// Calls f(id, z, sharpness * z, word) for those tokens of a block.
template <typename T, typename F>
static inline void for_reaching(const T* logits, const Row& row, int64_t b, float best, float floor, const F& f) {
  float z[kBlock], a[kBlock];
  uint32_t word[kBlock];
  int32_t hit[kBlock];
  scaled_block(logits, row.vocab, row.draw.temperature, b, z);
  block_words(uint32_t(b * (kBlock / 4)), row.position, row.seed, word);
  if (!may_reach(z, word, row.draw.sharpness, best, floor, a, hit)) return;
  for (int i = 0; i < kBlock; ++i)
    if (hit[i]) f(b * kBlock + i, z[i], a[i], word[i]);
}

// ---- the best tokens of a row

constexpr float kLargestFloat = std::numeric_limits<float>::max();

// Types of this namespace, as standard templates need (vec.h). What is better comes first.
struct Maximum {
  float value;
  friend bool operator<(Maximum a, Maximum b) { return a.value > b.value; }
};

struct Candidate {
  float score;
  int32_t id;
  friend bool operator<(const Candidate& a, const Candidate& b) {
    return a.score > b.score || (a.score == b.score && a.id < b.id);
  }
};

// The best so far of candidates that come in the order of their ids.
struct Best {
  Candidate kept[4 * kMaxCandidates];
  int64_t count, size = 0;
  float floor = -kLargestFloat;  // what is below cannot be among the best

  explicit Best(int64_t count) : count(count) {}

  void add(float score, int64_t id) {
    if (!(score >= floor)) return;
    kept[size++] = {score, int32_t(id)};
    if (size == 4 * count) cut();
  }

  void cut() {
    const int64_t left = least(size, count);
    std::partial_sort(kept, kept + left, kept + size);
    size = left;
    if (size == count) floor = std::nextafter(kept[count - 1].score, kInf);  // later ones that are equal lose
  }
};

// The count-th largest maximum of 4 * count interleaved slices of values, or fewer if there are not as many values:
// `count` of the values reach it, and hardly more are above it.
template <typename T>
static float reached_by_enough(const T* values, int64_t total, int64_t count) {
  Maximum maxima[4 * kMaxCandidates];
  const int64_t size = least(4 * count, total);
  if (size < count) return -kLargestFloat;
  for (int64_t i = 0; i < size; ++i) maxima[i].value = to_float(values[i]);
  for (int64_t begin = size; begin < total; begin += size)
    for (int64_t i = 0, left = least(size, total - begin); i < left; ++i) {
      const float value = to_float(values[begin + i]);
      maxima[i].value = value > maxima[i].value ? value : maxima[i].value;
    }
  std::nth_element(maxima, maxima + (count - 1), maxima + size);
  const float reached = maxima[count - 1].value;
  return reached > -kLargestFloat ? reached : -kLargestFloat;
}

// The `count` best tokens of all rows of `p`, in ids and `out` [rows, count]. best_of(row, logits, ids, out) writes
// those of a row and returns how many there are.
template <typename Params, typename F>
static void best_of_rows(const Params& p, int64_t rows_per_sequence, const float* sharpness, float* out,
                         const F& best_of) {
  const int64_t rows = p.batch * rows_per_sequence;
  parallel_rows(p, rows, rows * p.vocab, [&](auto type, int64_t i) {
    const int64_t b = i / rows_per_sequence;
    const Row row{draw_of(p.temperature[b], sharpness ? sharpness[b] : 1.0f), p.vocab, ceil_div(p.vocab, kBlock),
                  uint64_t(p.positions[i]), uint64_t(p.seeds[b])};
    int64_t* ids = p.ids + i * p.count;
    float* values = out + i * p.count;
    const int64_t found = best_of(row, static_cast<const decltype(type)*>(p.logits) + i * p.vocab, ids, values);
    for (int64_t k = found; k < p.count; ++k) ids[k] = -1, values[k] = -kInf;
  });
}

DFLASH_NAMESPACE_END
