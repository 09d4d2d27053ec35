// The best tokens of each row by score. With d = z - max and the noise -ln(e), e a standard exponential draw, a score
// is logaddexp(plain, noisy), where
//   plain = d - ln(sum of exp(d)) + ln(1 - w), noisy = d / T - ln(e) - ln(sum of exp(d / T) / e) + ln(w).
// At T <= 0 there is plain alone, with w = 0. No sum overflows: d <= 0 and e > 2^-33. A score lies between m =
// max(plain, noisy) and m + ln2. `count` blocks or tokens reach a certain m, so only tokens that may reach it get a
// score.
#include "cpu/vocab/scan.h"

DFLASH_NAMESPACE_BEGIN

constexpr float kAboveLn2 = 0.6932f;

// z - top; the largest logit gives 0 even if it is infinite.
static inline Vec vec_below_top(Vec z, float top) { return z == splat(top) ? Vec{} : z - splat(top); }

// ln(x) for positive normal x, absolute error below 1e-7 near 1, relative 2e-7 (Cephes). Step by step on all vectors of
// a block: each step waits for the one before.
static inline Block log_block(const Block& x) {
  constexpr float kSeries[] = {-1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f, 1.4249322787e-1f,
                               -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f};
  Block f, k, p, out;
  for (int i = 0; i < kVecs; ++i) {
    const IVec bits = reinterpret_cast<const IVec&>(x.v[i]) + (0x3f800000 - 0x3f3504f3);
    const IVec mantissa = (bits & 0x7fffff) + 0x3f3504f3;
    k.v[i] = __builtin_convertvector((bits >> 23) - 127, Vec);
    f.v[i] = reinterpret_cast<const Vec&>(mantissa) - 1.0f;
    p.v[i] = splat(7.0376836292e-2f);
  }
#pragma GCC unroll 8
  for (int term = 0; term < 8; ++term)
    for (int i = 0; i < kVecs; ++i) p.v[i] = fma_vec(p.v[i], f.v[i], splat(kSeries[term]));
  for (int i = 0; i < kVecs; ++i) {
    const Vec square = f.v[i] * f.v[i];
    const Vec y = fma_vec(square, splat(-0.5f), fma_vec(k.v[i], splat(-2.12194440e-4f), square * f.v[i] * p.v[i]));
    out.v[i] = fma_vec(k.v[i], splat(0.693359375f), f.v[i] + y);
  }
  return out;
}

// ln(e) of the Philox words of a block; the noise is -ln(e): e = -ln(1 - u), u = (word + 0.5) / 2^32. For small u the
// ratio of u to the rounded 1 - (1 - u) makes up for the rounding.
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

template <typename T>
static Block plain_block(const T* logits, const Row& row, int64_t b, float top) {
  Block d = load_block(logits, row.vocab, b);
  for (Vec& v : d.v) v = vec_below_top(v, top);
  return d;
}

// d / T - ln(e) of a block.
template <typename T>
static Block noisy_block(const T* logits, const Row& row, int64_t b, float top) {
  Block d = plain_block(logits, row, b, top);
  uint32_t word[kBlock];
  block_words(uint32_t(b * (kBlock / 4)), row.position, row.seed, word);
  const Block log = log_of_draws(word);
  for (int i = 0; i < kVecs; ++i) d.v[i] = d.v[i] / splat(row.draw.temperature) - log.v[i];
  return d;
}

// log(exp(a) + exp(b)), at most 0.
static inline Block add_exp(const Block& a, const Block& b) {
  Block high, sum;
  for (int i = 0; i < kVecs; ++i) {
    high.v[i] = b.v[i] > a.v[i] ? b.v[i] : a.v[i];
    sum.v[i] = exp_vec((b.v[i] > a.v[i] ? a.v[i] : b.v[i]) - high.v[i]) + 1.0f;
  }
  Block score = log_block(sum);
  for (int i = 0; i < kVecs; ++i) {
    score.v[i] = high.v[i] + score.v[i];
    score.v[i] = score.v[i] > Vec{} ? Vec{} : score.v[i];
  }
  return score;
}

static inline float& lane_of(Block& block, int64_t i) { return reinterpret_cast<float*>(&block)[i]; }

// Writes the best into ids and scores; returns how many there are. noise_weight is 0 at T <= 0.
template <typename T>
static int64_t best_of_row(const T* logits, const Row& row, float noise_weight, int64_t count, int64_t* ids,
                           float* scores) {
  // 1. The largest logits, and both sums
  static thread_local Buffer<float> scratch;
  const bool is_noisy = noise_weight > 0.0f;
  float* most = scratch.reserve(row.blocks * (is_noisy ? 1 + kBlock : 1));  // of a block: the largest logit, then m
  float* noisy = most + row.blocks;
  if (!scan(logits, row.vocab, most)) return 0;
  float top = -kInf;
  for (int64_t b = 0; b < row.blocks; ++b) top = most[b] > top ? most[b] : top;
  if (top == -kInf) return 0;
  const auto plain = [&](int64_t b) { return plain_block(logits, row, b, top); };
  const double weight = noise_weight;
  const float plain_shift = float(std::log(1.0 - weight) - std::log(sum_exp(row.blocks, plain)));
  for (int64_t b = 0; b < row.blocks; ++b) most[b] = below_top(most[b], top) + plain_shift;
  float noisy_shift = -kInf;
  if (is_noisy) {
    const double sum = sum_exp(row.blocks, [&](int64_t b) {
      const Block a = noisy_block(logits, row, b, top);
      std::memcpy(noisy + b * kBlock, &a, sizeof(a));
      return a;
    });
    noisy_shift = float(std::log(weight) - std::log(sum));
    for (int64_t b = 0; b < row.blocks; ++b) {
      Vec largest = load(noisy + b * kBlock);
      for (int i = kWidth; i < kBlock; i += kWidth) {
        const Vec next = load(noisy + b * kBlock + i);
        largest = next > largest ? next : largest;
      }
      const float reached = largest_lane(largest) + noisy_shift;
      most[b] = reached > most[b] ? reached : most[b];
    }
  }

  // 2. What `count` tokens reach: by the largest of their blocks, and of single tokens where blocks are few
  Best best(count);
  float reached = reached_by_enough(most, row.blocks, count);
  const auto raise = [&reached](float score) { reached = score > reached ? score : reached; };
  if (row.blocks < 4 * count) {
    raise(below_top(reached_by_enough(logits, row.vocab, count), top) + plain_shift);
    if (is_noisy) raise(reached_by_enough(noisy, row.blocks * kBlock, count) + noisy_shift);
  }
  best.floor = reached < 0.0f ? reached : 0.0f;

  // 3. The tokens that may reach it, and their order
  const float slack = is_noisy ? kAboveLn2 : 0.0f;
  Block one = {}, other = {};  // of tokens that have no score yet
  int64_t found[kBlock], size = 0;
  const auto add = [&] {
    Block score = add_exp(one, other);
    for (int64_t i = 0; i < size; ++i) best.add(lane_of(score, i), found[i]);
    size = 0;
  };
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (!(most[b] + slack >= best.floor)) continue;
    Block x = plain(b), y;
    for (int i = 0; i < kVecs; ++i) {
      x.v[i] += splat(plain_shift);
      y.v[i] = is_noisy ? load(noisy + b * kBlock + i * kWidth) + splat(noisy_shift) : splat(-kInf);
    }
    int32_t hit[kBlock];
    for (int i = 0; i < kVecs; ++i)
      *reinterpret_cast<IVec*>(hit + i * kWidth) =
          (x.v[i] > y.v[i] ? x.v[i] : y.v[i]) + splat(slack) >= splat(best.floor);
    for (int i = 0; i < kBlock; ++i) {
      if (!hit[i]) continue;
      const float a = lane_of(x, i), c = lane_of(y, i);
      lane_of(one, size) = a, lane_of(other, size) = c, found[size++] = b * kBlock + i;
      if (size == kBlock) add();
    }
  }
  add();
  best.cut();
  for (int64_t k = 0; k < best.size; ++k) ids[k] = best.kept[k].id, scores[k] = best.kept[k].score;
  return best.size;
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::tree_candidates(const TreeCandidatesParams& p) {
  best_of_rows(p, p.depths, nullptr, p.scores, [&](const Row& row, const auto* logits, int64_t* ids, float* scores) {
    return best_of_row(logits, row, row.draw.temperature > 0.0f ? p.noise_weight : 0.0f, p.count, ids, scores);
  });
}
