// The best tokens of a row: which scores are enough, and the candidates kept so far.
#pragma once
#include <algorithm>
#include <cmath>

#include "binding/params.h"
#include "cpu/vocab/block_scan.h"

DFLASH_NAMESPACE_BEGIN

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

DFLASH_NAMESPACE_END
