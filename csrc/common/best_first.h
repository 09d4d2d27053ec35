// The order in which the nodes of a draft tree are taken, for CPU and GPU. Scores fall along a list of candidates and
// from a parent to its children, so a frontier holds the best sibling not yet taken and the best child of every row.
// fp32 sums may make siblings equal whose own scores are not; such a run is taken in the order of its ids.
#pragma once
#include "binding/params.h"

namespace dflash {
namespace {  // code of one instruction set must not be merged with that of another, see cpu/base/vec.h

struct Node {
  float score;
  int32_t depth;
  int64_t id;
  int32_t parent;
  int32_t run;    // the first candidate of its list that has this score under this parent
  int32_t place;  // among the ids of its depth if its list has an order, else 0: the list of its children
};

DFLASH_ANYWHERE inline bool comes_before(const Node& a, const Node& b) {
  if (a.score != b.score) return a.score > b.score;
  if (a.depth != b.depth) return a.depth < b.depth;
  return a.id != b.id ? a.id < b.id : a.parent < b.parent;
}

constexpr float kNoScore = -__builtin_inff();

// The candidates of one depth, as children of one parent.
struct Siblings {
  const int64_t* ids;    // [count]
  const float* scores;   // [count]
  const uint8_t* order;  // [count], the places of the scores' tokens in `ids`; null: those of the scores
  int64_t count;
  float parent_score;

  DFLASH_ANYWHERE int64_t place(int64_t k) const {
    return order == nullptr ? k : order[k] < count ? order[k] : count - 1;
  }
  DFLASH_ANYWHERE int64_t id_of(int64_t k) const { return ids[place(k)]; }

  // The score of candidate k under the parent; kNoScore if there is none.
  DFLASH_ANYWHERE float at(int64_t k) const {
    if (k >= count || id_of(k) < 0 || !(scores[k] > kNoScore)) return kNoScore;
    const float score = parent_score + scores[k];
    return score > kNoScore ? score : kNoScore;
  }

  // Sets the score, id and run of the best sibling of the run that starts at `run` with an id above `id`, or else of
  // the next run. False if there is none.
  DFLASH_ANYWHERE bool next(int64_t run, int64_t id, Node& node) const {
    for (;; id = -1) {
      const float score = at(run);
      if (score == kNoScore) return false;
      int64_t best = -1, k = run;
      for (; at(k) == score; ++k)
        if (id_of(k) > id && (best < 0 || id_of(k) < id_of(best))) best = k;
      if (best >= 0) {
        node.score = score, node.id = id_of(best), node.run = int32_t(run);
        node.place = order == nullptr ? 0 : int32_t(place(best));
        return true;
      }
      run = k;
    }
  }
};

}  // namespace
}  // namespace dflash
