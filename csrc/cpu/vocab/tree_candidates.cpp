// The best tokens of each row by score. With d = z - max and the noise -ln(e), e a standard exponential draw,
// a score is logaddexp(plain, noisy), where
//   plain = d - ln(sum of exp(d)) + ln(1 - w), noisy = d / T - ln(e) - ln(sum of exp(d / T) / e) + ln(w).
// At T <= 0 there is plain alone, with w = 0. No sum overflows: d <= 0 and e > 2^-33.
//
// A score lies between m = max(plain, noisy) and m + ln2. The row is cut into 64 interleaved slices: `count`
// of them reach the count-th largest of the slices' largest m, so no token below that is among the best, and
// hardly more than `count` are above it. Only these get a score and an order.
#include <algorithm>
#include <cmath>
#include <limits>

#include "binding/params.h"
#include "common/filters.h"
#include "cpu/base/buffer.h"
#include "cpu/base/parallel.h"
#include "cpu/vocab/block_noise.h"

DFLASH_NAMESPACE_BEGIN

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kLargestFloat = std::numeric_limits<float>::max();
constexpr float kAboveLn2 = 0.6932f;
constexpr int kVecs = kBlock / kWidth;
constexpr int64_t kRoom = 4 * kMaxTreeRows;  // for candidates before they are cut to the best

struct Block {
  Vec v[kVecs];
};

struct Row {
  float temperature, noise_weight;  // noise_weight is 0 at T <= 0
  int64_t vocab, blocks, count;
  uint64_t position, seed;
};

static inline Vec larger(Vec a, Vec b) { return b > a ? b : a; }

static inline Block filled(float x) {
  Block block;
  for (Vec& v : block.v) v = splat(x);
  return block;
}

static inline float largest(const Block& block) {
  Vec top = block.v[0];
  for (int i = 1; i < kVecs; ++i) top = larger(top, block.v[i]);
  float lane[kWidth];
  std::memcpy(lane, &top, sizeof(top));
  for (int step = kWidth / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) lane[i] = lane[i + step] > lane[i] ? lane[i + step] : lane[i];
  return lane[0];
}

// 64 logits, padded with -inf.
template <typename T>
static inline Block load_block(const T* logits, const Row& row, int64_t b) {
  Block block;
  const T* x = logits + b * kBlock;
  const int64_t left = row.vocab - b * kBlock;
  if (left >= kBlock) {
    for (int i = 0; i < kVecs; ++i) block.v[i] = load(x + i * kWidth);
    return block;
  }
  float z[kBlock];
  for (int i = 0; i < kBlock; ++i) z[i] = i < left ? to_float(x[i]) : -kInf;
  for (int i = 0; i < kVecs; ++i) block.v[i] = load(z + i * kWidth);
  return block;
}

// z - top; the largest logit gives 0 even if it is infinite.
static inline Vec below_top(Vec z, float top) { return z == splat(top) ? Vec{} : z - splat(top); }

// ln(x) for positive normal x, absolute error below 1e-7 near 1, relative 2e-7 (Cephes). Step by step on all
// vectors of a block: each step waits for the one before.
static inline Block log_block(const Block& x) {
  constexpr float kSeries[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                               -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  Block f, k, p, out;
  for (int i = 0; i < kVecs; ++i) {
    const IVec bits = reinterpret_cast<const IVec&>(x.v[i]) + (0x3f800000 - 0x3f3504f3);
    const IVec mantissa = (bits & 0x7fffff) + 0x3f3504f3;
    k.v[i] = __builtin_convertvector((bits >> 23) - 127, Vec);
    f.v[i] = reinterpret_cast<const Vec&>(mantissa) - 1.0f;
    p.v[i] = f.v[i] * 7.0376836292e-2f;
  }
#pragma GCC unroll 8
  for (int term = 0; term < 8; ++term)
    for (int i = 0; i < kVecs; ++i)
      p.v[i] = term == 7 ? p.v[i] + kSeries[7] : (p.v[i] + kSeries[term]) * f.v[i];
  for (int i = 0; i < kVecs; ++i) {
    const Vec square = f.v[i] * f.v[i];
    const Vec y = square * f.v[i] * p.v[i] - k.v[i] * 2.12194440e-4f - square * 0.5f;
    out.v[i] = (f.v[i] + y) + k.v[i] * 0.693359375f;
  }
  return out;
}

// ln(e) of the Philox words of a block; the noise is -ln(e): e = -ln(1 - u), u = (word + 0.5) / 2^32. For
// small u the ratio of u to the rounded 1 - (1 - u) makes up for the rounding.
static inline Block log_of_draws(const uint32_t* words) {
  Block rest, e;
  for (int i = 0; i < kVecs; ++i) {
    const UVec word = *reinterpret_cast<const UVec*>(words + i * kWidth);
    rest.v[i] = (__builtin_convertvector(~word, Vec) + 0.5f) * 2.3283064365386963e-10f;
  }
  const Block log = log_block(rest);
  for (int i = 0; i < kVecs; ++i) {
    const UVec word = *reinterpret_cast<const UVec*>(words + i * kWidth);
    const Vec u = (__builtin_convertvector(word, Vec) + 0.5f) * 2.3283064365386963e-10f;
    const Vec off = 1.0f - rest.v[i];
    e.v[i] = off == Vec{} ? u : log.v[i] * u / -off;
  }
  return log_block(e);
}

// Finds the largest logit of each slice; returns true if the row has no NaN.
template <typename T>
static bool scan(const T* logits, const Row& row, Block& slices) {
  IVec largest_bits = {};
  slices = filled(-kInf);
  for (int64_t b = 0; b < row.blocks; ++b) {
    const Block z = load_block(logits, row, b);
    for (int i = 0; i < kVecs; ++i) {
      const IVec bits = reinterpret_cast<const IVec&>(z.v[i]) & 0x7fffffff;
      slices.v[i] = larger(slices.v[i], z.v[i]);
      largest_bits = bits > largest_bits ? bits : largest_bits;
    }
  }
  bool clean = true;
  for (int i = 0; i < kWidth; ++i) clean &= largest_bits[i] <= 0x7f800000;
  return clean;
}

// The sum of exp(x.v[i]) over all blocks; `block(b)` gives x. Lanes go into a double now and then, so that
// the error does not grow with the vocabulary.
template <typename F>
static double sum_exp(int64_t blocks, F&& block) {
  double total = 0.0;
  Sum16 part;
  for (int64_t b = 0; b < blocks; ++b) {
    const Block x = block(b);
    for (int i = 0; i < kVecs; ++i) part.lanes[i % Sum16::kVecs] += exp_vec(x.v[i]);
    if (b % 32 == 31 || b == blocks - 1) total += part.total(), part = {};
  }
  return total;
}

template <typename T>
static Block plain_block(const T* logits, const Row& row, int64_t b, float top) {
  Block d = load_block(logits, row, b);
  for (Vec& v : d.v) v = below_top(v, top);
  return d;
}

// d / T - ln(e) of a block.
template <typename T>
static Block noisy_block(const T* logits, const Row& row, int64_t b, float top) {
  Block d = plain_block(logits, row, b, top);
  uint32_t word[kBlock];
  block_words(uint32_t(b * (kBlock / 4)), row.position, row.seed, word);
  const Block log = log_of_draws(word);
  for (int i = 0; i < kVecs; ++i) d.v[i] = d.v[i] / splat(row.temperature) - log.v[i];
  return d;
}

// The k-th largest lane: the least of those that fewer than k are above. No branch depends on the values.
static float kth_lane(const Block& block, int64_t k) {
  float lanes[kBlock], kth = kInf;
  int32_t above[kBlock];
  IVec counts[kVecs] = {};
  std::memcpy(lanes, &block, sizeof(lanes));
  for (float x : lanes)
    for (int i = 0; i < kVecs; ++i) counts[i] -= block.v[i] < x;
  std::memcpy(above, &counts, sizeof(above));
  for (int i = 0; i < kBlock; ++i) kth = above[i] < k && lanes[i] < kth ? lanes[i] : kth;
  return kth;
}

static bool any(IVec x) {
  int32_t lane[kWidth], found = 0;
  std::memcpy(lane, &x, sizeof(x));
  for (int32_t hit : lane) found |= hit;
  return found;
}

// The best so far of candidates that come in the order of their ids.
struct Best {
  float plain[kRoom], noisy[kRoom];
  int32_t ids[kRoom];
  int64_t count, size = 0;
  float floor;  // what is below cannot be among the best

  void add(float plain_share, float noisy_share, int64_t id) {
    if (size == kRoom) cut();
    plain[size] = plain_share, noisy[size] = noisy_share, ids[size++] = int32_t(id);
  }

  // Keeps the best in their order, with their scores in `plain`.
  void cut() {
    // 1. Scores
    float scores[kRoom], kept_scores[kMaxTreeRows] = {};
    int32_t ranks[kRoom], kept_ids[kMaxTreeRows];
    for (int64_t i = size; i % kBlock != 0; ++i) plain[i] = 0.0f, noisy[i] = -kInf, ids[i] = 0;
    for (int64_t first = 0; first < size; first += kBlock) {
      Block high, sum;
      for (int i = 0; i < kVecs; ++i) {
        const Vec a = load(plain + first + i * kWidth), b = load(noisy + first + i * kWidth);
        high.v[i] = larger(a, b);
        sum.v[i] = exp_vec((b > a ? a : b) - high.v[i]) + 1.0f;
      }
      const Block log = log_block(sum);
      for (int i = 0; i < kVecs; ++i) {
        const Vec score = high.v[i] + log.v[i];
        store(scores + first + i * kWidth, score > Vec{} ? Vec{} : score);
      }
    }
    // 2. How many are better than each
    for (int64_t i = 0; i < size; i += kWidth) {
      const Vec own = load(scores + i);
      const IVec id = *reinterpret_cast<const IVec*>(ids + i);
      IVec rank = {};
      for (int64_t j = 0; j < size; ++j) rank -= (own < scores[j]) | ((own == scores[j]) & (id > ids[j]));
      *reinterpret_cast<IVec*>(ranks + i) = rank;
    }
    // 3. The best in their places
    for (int64_t i = 0; i < size; ++i)
      if (ranks[i] < count) kept_scores[ranks[i]] = scores[i], kept_ids[ranks[i]] = ids[i];
    if (size >= count)
      floor = std::nextafter(kept_scores[count - 1], kInf);  // equal ones that come later lose
    size = size < count ? size : count;
    for (int64_t i = 0; i < size; ++i) plain[i] = kept_scores[i], noisy[i] = -kInf, ids[i] = kept_ids[i];
  }
};

// Writes the best into ids and scores; returns how many there are.
template <typename T>
static int64_t best_of_row(const T* logits, const Row& row, Buffer<float>& scratch, int64_t* ids,
                           float* scores) {
  // 1. The largest logits, and both sums
  Block slices;
  if (!scan(logits, row, slices)) return 0;
  const float top = largest(slices);
  if (top == -kInf) return 0;
  const auto plain = [&](int64_t b) { return plain_block(logits, row, b, top); };
  const bool is_noisy = row.noise_weight > 0.0f;
  const double weight = row.noise_weight;
  const float plain_shift = float(std::log(1.0 - weight) - std::log(sum_exp(row.blocks, plain)));
  float* noisy = nullptr;
  float noisy_shift = -kInf;
  if (is_noisy) {
    noisy = scratch.reserve(row.blocks * kBlock);
    const double sum = sum_exp(row.blocks, [&](int64_t b) {
      const Block a = noisy_block(logits, row, b, top);
      for (int i = 0; i < kVecs; ++i) store(noisy + b * kBlock + i * kWidth, a.v[i]);
      return a;
    });
    noisy_shift = float(std::log(weight) - std::log(sum));
  }
  const auto noisy_at = [&](int64_t b, int i) {
    return load(noisy + b * kBlock + i * kWidth) + splat(noisy_shift);
  };

  // 2. A score that `count` tokens reach
  Best best;
  best.count = row.count;
  best.floor = -kLargestFloat;
  if (row.count <= kBlock) {
    for (Vec& v : slices.v) v = below_top(v, top) + splat(plain_shift);
    for (int64_t b = 0; is_noisy && b < row.blocks; ++b)
      for (int i = 0; i < kVecs; ++i) slices.v[i] = larger(slices.v[i], noisy_at(b, i));
    best.floor = std::clamp(kth_lane(slices, row.count), -kLargestFloat, 0.0f);
  }

  // 3. The tokens that may reach it
  const Vec slack = splat(is_noisy ? kAboveLn2 : 0.0f);
  for (int64_t b = 0; b < row.blocks; ++b) {
    const Block d = plain(b);
    Block x, y = filled(-kInf);
    IVec hits[kVecs], found = {};
    for (int i = 0; i < kVecs; ++i) {
      x.v[i] = d.v[i] + splat(plain_shift);
      if (is_noisy) y.v[i] = noisy_at(b, i);
      hits[i] = larger(x.v[i], y.v[i]) + slack >= splat(best.floor);
      found |= hits[i];
    }
    if (!any(found)) continue;
    float one[kBlock], other[kBlock];
    int32_t hit[kBlock];
    std::memcpy(one, &x, sizeof(one));
    std::memcpy(other, &y, sizeof(other));
    std::memcpy(hit, &hits, sizeof(hit));
    for (int i = 0; i < kBlock; ++i)
      if (hit[i]) best.add(one[i], other[i], b * kBlock + i);
  }

  // 4. Their order
  best.cut();
  for (int64_t k = 0; k < best.size; ++k) ids[k] = best.ids[k], scores[k] = best.plain[k];
  return best.size;
}

template <typename T>
static void candidates(const TreeCandidatesParams& p) {
  parallel_for(p.batch * p.depths, p.batch * p.depths * p.vocab, p.threads, [&](int64_t i) {
    static thread_local Buffer<float> scratch;
    const int64_t b = i / p.depths;
    const float temperature = p.temperature[b];
    const Row row{draw_of(temperature, 1.0f).temperature,
                  temperature > 0.0f ? p.noise_weight : 0.0f,
                  p.vocab,
                  (p.vocab + kBlock - 1) / kBlock,
                  p.count,
                  uint64_t(p.positions[i]),
                  uint64_t(p.seeds[b])};
    int64_t* ids = p.ids + i * p.count;
    float* scores = p.scores + i * p.count;
    const int64_t found =
        best_of_row(static_cast<const T*>(p.logits) + i * p.vocab, row, scratch, ids, scores);
    for (int64_t k = found; k < p.count; ++k) ids[k] = -1, scores[k] = -kInf;
  });
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void tree_candidates(const TreeCandidatesParams& p) {
  p.dtype == DType::kFloat32 ? candidates<float>(p) : candidates<bf16>(p);
}

}  // namespace dflash::DFLASH_ISA
