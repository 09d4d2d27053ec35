// A path through the candidates of each slot, or all links between them (params.h has the formulas). A path is walked
// by one thread; the rows of the next slot are on their way meanwhile. Choices have the bits of select_tokens given
// equal scores.
#include <algorithm>
#include <cmath>

#include "common/noise.h"
#include "cpu/base/parallel.h"

DFLASH_NAMESPACE_BEGIN

constexpr float kInf = __builtin_inff();

// The sum of a[i] * b[i].
template <typename T>
static float dot(const float* a, const T* b, int64_t size) {
  Sum16 lanes;
  over_vectors(
      size, [&](int64_t i, auto count) { lanes.of(i) = fma_vec(load(a + i, count), load(b + i, count), lanes.of(i)); });
  return lanes.total();
}

struct Choice {
  Draw draw;
  Filters filters;
  uint64_t seed;
  uint32_t stream;
};

// The best of a slot's candidates; -1 if there is none. `score` holds S, -inf where there is no candidate, and gets S /
// temperature, -inf where filtered.
static int64_t choose(const Choice& c, const int64_t* ids, int64_t count, uint64_t position, float* score) {
  // 1. S / temperature, and what is a candidate
  bool live[kMaxCandidates];
  bool any = false, nan = false;
  float top = -kInf;
  for (int64_t k = 0; k < count; ++k) {
    nan |= score[k] != score[k];
    any |= live[k] = score[k] > -kInf;
    if (live[k] && !c.draw.greedy) score[k] = score[k] / c.draw.temperature;
    if (live[k]) top = std::max(top, score[k]);
  }
  if (nan || !any) return -1;

  // 2. What the filters keep
  if (!c.draw.greedy && any_filter(c.filters)) {
    int64_t weight[kMaxCandidates];
    for (int64_t k = 0; k < count; ++k) weight[k] = weight_in_top_k(score, int(count), int(k), top, c.filters);
    for (int64_t k = 0; k < count; ++k) live[k] = live[k] && is_kept(score, weight, int(count), int(k), top, c.filters);
    for (int64_t k = 0; k < count; ++k) score[k] = live[k] ? score[k] : -kInf;
  }

  // 3. The best, with noise
  float best = -kInf;
  int64_t best_id = -1;
  for (int64_t k = 0; k < count; ++k) {
    if (!live[k]) continue;
    float value = score[k];
    if (!c.draw.greedy) {
      const Words4 words = noise_words(uint32_t(ids[k] >> 2), position, c.stream, c.seed);
      value = sharpened(c.draw, value) + gumbel(words.word[ids[k] & 3]);
    }
    if (best_id < 0 || value > best || (value == best && ids[k] < best_id)) best = value, best_id = ids[k];
  }
  return best_id;
}

template <typename T>
static void walk(const WalkCandidatesParams& p, int64_t b) {
  // 1. How this sequence chooses
  const Choice c{draw_of(p.temperature[b], p.sharpness[b]),
                 {p.top_k[b], p.top_p[b], p.min_p[b]},
                 uint64_t(p.seeds[b]),
                 uint32_t(p.stream)};
  const T *predecessors = static_cast<const T*>(p.predecessors), *successors = static_cast<const T*>(p.successors);
  const auto known = [&](int64_t id) { return id >= 0 && id < p.codes; };
  const auto fetch = [&](const T* row) __attribute__((always_inline)) {
    for (int64_t i = 0; i < p.rank; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i);
  };
  static thread_local Buffer<float> memory;
  float* product = memory.reserve(p.rank);

  // 2. Slot by slot
  int64_t previous = p.anchor[b];
  bool alive = true;
  for (int64_t slot = 0; slot < p.slots; ++slot) {
    const int64_t row = b * p.slots + slot, first = row * p.count;
    const int64_t* ids = p.ids + first;
    const float* logits = p.logits + first;
    float* score = p.scores + first;
    if (alive) {
      for (int64_t k = 0; k < p.count && slot + 1 < p.slots; ++k) {
        if (known(ids[k])) fetch(predecessors + ids[k] * p.rank);
        if (known(ids[p.count + k])) fetch(successors + ids[p.count + k] * p.rank);
      }
      const bool paired = known(previous);
      const T* hidden = static_cast<const T*>(p.hidden) + row * p.rank;
      for (int64_t i = 0; i < p.rank && paired; ++i)
        product[i] = to_float(predecessors[previous * p.rank + i]) * to_float(hidden[i]);
      for (int64_t k = 0; k < p.count; ++k) {
        score[k] = known(ids[k]) ? logits[k] : -kInf;
        if (paired && known(ids[k])) score[k] += dot(product, successors + ids[k] * p.rank, p.rank);
      }
      previous = choose(c, ids, p.count, uint64_t(p.positions[row]), score);
      alive = previous >= 0;
    }
    if (!alive)
      for (int64_t k = 0; k < p.count; ++k) score[k] = -kInf;
    p.path[row] = alive ? previous : -1;
  }
}

struct Link {
  float score;
  int64_t id;
  uint8_t place;
};

// The lists of one slot of all sequences.
template <typename T>
static void link(const LinkCandidatesParams& p, int64_t row) {
  constexpr int64_t kPadded = (kMaxCandidates + 15) / 16 * 16;
  const int64_t *ids = p.ids + row * p.count, lists = row * p.count * p.count, slot = row % p.slots;
  const T *predecessors = static_cast<const T*>(p.predecessors), *successors = static_cast<const T*>(p.successors);
  const T* hidden = static_cast<const T*>(p.hidden) + row * p.rank;
  const auto known = [&](int64_t id) { return id >= 0 && id < p.codes; };
  // The sum of exp(x[k] - top) over candidates; past the last, x is -inf.
  const auto sum_exp = [&](const float* x, float top) {
    Sum16 lanes;
    for (int64_t i = 0; i < p.count; i += kWidth) lanes.of(i) += exp_vec(load(x + i) - splat(top));
    return lanes.total();
  };

  // 1. Which are candidates, and the probability of other tokens
  float own[kPadded], score[kPadded];
  for (int64_t k = 0; k < kPadded; ++k) own[k] = score[k] = -kInf;
  for (int64_t k = 0; k < p.count; ++k)
    if (known(ids[k]) && p.scores[row * p.count + k] > -kInf) own[k] = p.scores[row * p.count + k];
  const float rest = std::max(1.0f - sum_exp(own, 0.0f), 0.0f);

  static thread_local Buffer<float> memory;
  float* product = memory.reserve(p.rank);
  for (int64_t a = 0; a < p.count; ++a) {
    // 2. The scores after one token
    const int64_t previous = slot > 0 ? ids[a - p.count] : p.anchor[row / p.slots];
    const bool paired = known(previous);
    for (int64_t i = 0; i < p.rank && paired; ++i)
      product[i] = to_float(predecessors[previous * p.rank + i]) * to_float(hidden[i]);
    float top = rest > 0.0f ? 0.0f : -kInf;
    bool valid = paired || slot == 0;
    for (int64_t k = 0; k < p.count; ++k) {
      score[k] = own[k];
      if (paired && own[k] > -kInf) score[k] += dot(product, successors + ids[k] * p.rank, p.rank);
      valid &= score[k] < kInf;  // NaN is not
      top = std::max(top, score[k]);
    }
    valid &= top > -kInf;

    // 3. Their order, with the sum of probabilities at one
    const float shift = valid ? top + float(std::log(double(rest) * exp_one(-top) + sum_exp(score, top))) : 0.0f;
    Link found[kMaxCandidates];
    for (int64_t k = 0; k < p.count; ++k) {
      const bool live = valid && score[k] > -kInf;
      found[k] = {live ? std::min(score[k] - shift, 0.0f) : -kInf, ids[k], uint8_t(k)};
    }
    std::sort(found, found + p.count, [](const Link& x, const Link& y) {
      if (x.score != y.score) return x.score > y.score;
      return x.id != y.id ? x.id < y.id : x.place < y.place;
    });
    for (int64_t k = 0; k < p.count; ++k) {
      p.links[lists + a * p.count + k] = found[k].score;
      p.order[lists + a * p.count + k] = found[k].place;
    }
  }
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::link_candidates(const LinkCandidatesParams& p) {
  parallel_rows(p, p.batch * p.slots, p.batch * p.slots * p.count * p.count * p.rank,
                [&](auto type, int64_t row) { link<decltype(type)>(p, row); });
}

void dflash::DFLASH_ISA::walk_candidates(const WalkCandidatesParams& p) {
  parallel_rows(p, p.batch, p.batch * p.slots * p.count * p.rank,
                [&](auto type, int64_t b) { walk<decltype(type)>(p, b); });
}
