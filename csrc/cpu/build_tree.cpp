// Best-first with a heap. Scores fall along a list of candidates and from a parent to its children, so the
// frontier holds the best sibling not yet taken and the best child of every row. fp32 sums may make siblings
// equal whose own scores are not; such a run is taken in the order of its ids.
#include <algorithm>
#include <limits>

#include "cpu/vec.h"
#include "params.h"

DFLASH_NAMESPACE_BEGIN

struct Node {
  float score;
  int64_t depth, id, parent;
  int64_t run;  // the first candidate of its depth that has this score under this parent

  friend bool operator<(const Node& a, const Node& b) {  // a comes after b; a heap's first is the largest
    if (a.score != b.score) return a.score < b.score;
    if (a.depth != b.depth) return a.depth > b.depth;
    if (a.id != b.id) return a.id > b.id;
    return a.parent > b.parent;
  }
};

struct Siblings {
  const int64_t* ids;  // [count]
  const float* scores;
  int64_t count;
  float parent_score;

  // The score of candidate k under the parent; -inf if there is none.
  float at(int64_t k) const {
    constexpr float kNone = -std::numeric_limits<float>::infinity();
    if (k >= count || ids[k] < 0 || !(scores[k] > kNone)) return kNone;
    const float score = parent_score + scores[k];
    return score > kNone ? score : kNone;
  }

  // Sets the score, id and run of the best sibling of the run that starts at `run` with an id above `id`, or
  // else of the next run. False if there is none.
  bool next(int64_t run, int64_t id, Node& node) const {
    for (;; id = -1) {
      const float score = at(run);
      if (score == -std::numeric_limits<float>::infinity()) return false;
      int64_t best = -1, k = run;
      for (; at(k) == score; ++k)
        if (ids[k] > id && (best < 0 || ids[k] < best)) best = ids[k];
      if (best >= 0) {
        node.score = score, node.id = best, node.run = run;
        return true;
      }
      run = k;
    }
  }
};

static void build_one(const BuildTreeParams& p, int64_t b) {
  const int64_t words = (p.rows + 63) / 64;
  int64_t* ids = p.tree_ids + b * p.rows;
  int64_t* parents = p.parents + b * p.rows;
  int64_t* depth = p.depth + b * p.rows;
  int64_t* ancestors = p.ancestors + b * p.rows * words;
  float* scores = p.tree_scores + b * p.rows;
  const auto set_row = [&](int64_t row, const Node& node) {
    ids[row] = node.id, parents[row] = node.parent, depth[row] = node.depth, scores[row] = node.score;
    for (int64_t w = 0; w < words; ++w)
      ancestors[row * words + w] = node.parent < 0 ? 0 : ancestors[node.parent * words + w];
    ancestors[row * words + row / 64] |= int64_t(uint64_t(1) << row % 64);
  };

  Node heap[2 * kMaxTreeRows];
  int64_t size = 0;
  const auto push = [&](int64_t parent, int64_t level, int64_t run, int64_t id) {
    if (level >= p.depths) return;
    const int64_t first = (b * p.depths + level) * p.count;
    const Siblings siblings{p.ids + first, p.scores + first, p.count, scores[parent]};
    Node node{0.0f, level + 1, 0, parent, 0};
    if (!siblings.next(run, id, node)) return;
    heap[size++] = node;
    std::push_heap(heap, heap + size);
  };

  set_row(0, {0.0f, 0, p.anchor[b], -1, 0});
  push(0, 0, 0, -1);
  int64_t row = 1;
  for (; row < p.rows && size > 0; ++row) {
    std::pop_heap(heap, heap + size);
    const Node node = heap[--size];
    set_row(row, node);
    push(node.parent, node.depth - 1, node.run, node.id);
    push(row, node.depth, 0, -1);
  }
  for (; row < p.rows; ++row) set_row(row, {-std::numeric_limits<float>::infinity(), 0, -1, -1, 0});
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void build_tree(const BuildTreeParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) build_one(p, b);
}

}  // namespace dflash::DFLASH_ISA
