// Best-first with a heap (best_first.h).
#include <algorithm>

#include "common/best_first.h"
#include "cpu/base/vec.h"

DFLASH_NAMESPACE_BEGIN

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

  const auto comes_after = [](const Node& a, const Node& b) { return comes_before(b, a); };
  Node heap[2 * kMaxTreeRows];  // the first comes before all others
  int64_t size = 0;
  const auto push = [&](int64_t parent, int64_t level, int64_t run, int64_t id) {
    if (level >= p.depths) return;
    const int64_t first = (b * p.depths + level) * p.count;
    const Siblings siblings{p.ids + first, p.scores + first, p.count, scores[parent]};
    Node node{0.0f, int32_t(level + 1), 0, int32_t(parent), 0};
    if (!siblings.next(run, id, node)) return;
    heap[size++] = node;
    std::push_heap(heap, heap + size, comes_after);
  };

  set_row(0, {0.0f, 0, p.anchor[b], -1, 0});
  push(0, 0, 0, -1);
  int64_t row = 1;
  for (; row < p.rows && size > 0; ++row) {
    std::pop_heap(heap, heap + size, comes_after);
    const Node node = heap[--size];
    set_row(row, node);
    push(node.parent, node.depth - 1, node.run, node.id);
    push(row, node.depth, 0, -1);
  }
  for (; row < p.rows; ++row) set_row(row, {kNoScore, 0, -1, -1, 0});
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void build_tree(const BuildTreeParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) build_one(p, b);
}

}  // namespace dflash::DFLASH_ISA
