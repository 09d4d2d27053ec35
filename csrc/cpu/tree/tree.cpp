// Draft trees and what becomes of a block: a tree is built best-first with a heap (best_first.h), the target's choices
// along a path of rows are emitted, cut after the first stop token and to the room left, and rows of caches move there.
#include <algorithm>

#include "common/best_first.h"
#include "cpu/base/parallel.h"

DFLASH_NAMESPACE_BEGIN

// Emits the choices of row 0 and of the rows that continue it, and advances sequence b, unless it is done. next(row,
// token, count), called after each token with how many there are, returns the row that continues the path with it, or
// -1. Returns the count.
template <typename Next>
static inline int64_t emit(const Emission& p, int64_t b, const int64_t* choices, const Next& next) {
  int64_t count = 0;
  if (p.done[b] == kRunning) {
    const int64_t length = p.length[b], limit = least(p.limits[b], p.capacity);
    const int64_t room = length < 0 || length >= limit ? 0 : limit - 1 - length;
    int64_t* tokens = p.tokens + b * p.capacity + (room ? length + 1 : 0);
    int64_t state = room ? kRunning : kLimit;
    for (int64_t row = 0; state == kRunning && row >= 0;) {
      const int64_t token = choices[row];
      if (token < 0) {
        state = kInvalid;
        break;
      }
      tokens[count++] = token;
      row = next(row, token, count);
      state = p.stops(b, token) ? kStop : count >= room ? kLimit : kRunning;
    }
    p.length[b] = length + count;
    p.done[b] = state;
  }
  return p.num_context[b] = count;
}

static void build_one(const BuildTreeParams& p, int64_t b) {
  const int64_t words = (p.rows + 63) / 64, lists = p.order == nullptr ? 1 : p.count;
  int32_t list[kMaxTreeRows];  // of each row's children, at their depth
  int64_t* ids = p.tree_ids + b * p.rows;
  int64_t* parents = p.parents + b * p.rows;
  int64_t* depth = p.depth + b * p.rows;
  int64_t* ancestors = p.ancestors + b * p.rows * words;
  float* scores = p.tree_scores + b * p.rows;
  const auto set_row = [&](int64_t row, const Node& node) {
    ids[row] = node.id, parents[row] = node.parent, depth[row] = node.depth, scores[row] = node.score;
    list[row] = node.place;
    for (int64_t w = 0; w < words; ++w)
      ancestors[row * words + w] = node.parent < 0 ? 0 : ancestors[node.parent * words + w];
    ancestors[row * words + row / 64] |= int64_t(uint64_t(1) << row % 64);
  };

  const auto comes_after = [](const Node& a, const Node& b) { return comes_before(b, a); };
  Node heap[2 * kMaxTreeRows];  // the first comes before all others
  int64_t size = 0;
  const auto push = [&](int64_t parent, int64_t level, int64_t run, int64_t id) {
    if (level >= p.depths) return;
    const int64_t first = (b * p.depths + level) * p.count, own = first * lists + list[parent] * p.count;
    const uint8_t* order = p.order == nullptr ? nullptr : p.order + own;
    const Siblings siblings{p.ids + first, p.scores + own, order, p.count, scores[parent]};
    Node node{0.0f, int32_t(level + 1), 0, int32_t(parent), 0, 0};
    if (!siblings.next(run, id, node)) return;
    heap[size++] = node;
    std::push_heap(heap, heap + size, comes_after);
  };

  set_row(0, {0.0f, 0, p.anchor[b], -1, 0, 0});
  push(0, 0, 0, -1);
  int64_t row = 1;
  for (; row < p.rows && size > 0; ++row) {
    std::pop_heap(heap, heap + size, comes_after);
    const Node node = heap[--size];
    set_row(row, node);
    push(node.parent, node.depth - 1, node.run, node.id);
    push(row, node.depth, 0, -1);
  }
  for (; row < p.rows; ++row) set_row(row, {kNoScore, 0, -1, -1, 0, 0});
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::build_tree(const BuildTreeParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) build_one(p, b);
}

void dflash::DFLASH_ISA::accept_prefix(const AcceptPrefixParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t* ids = p.block_ids + b * p.rows;
    emit(p, b, p.posterior + b * p.rows,
         [&](int64_t row, int64_t token, int64_t) { return row + 1 < p.rows && ids[row + 1] == token ? row + 1 : -1; });
  }
}

// A child comes after its parent, so one pass over the rows finds the whole path.
void dflash::DFLASH_ISA::accept_path(const AcceptPathParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t *ids = p.ids + b * p.rows, *parents = p.parents + b * p.rows;
    int64_t *path = p.path + b * p.path_rows, *choices = p.chain_choices + b * p.path_rows;
    int64_t* drafts = p.chain_ids + b * p.path_rows;
    for (int64_t j = 0; j < p.path_rows; ++j) path[j] = j, choices[j] = drafts[j] = -1;
    drafts[0] = ids[0];
    emit(p, b, p.choices + b * p.rows, [&](int64_t row, int64_t token, int64_t count) -> int64_t {
      path[count - 1] = row, choices[count - 1] = token;
      if (count == p.path_rows) return -1;
      int64_t child = row + 1;
      while (child < p.rows && (parents[child] != row || ids[child] != token)) ++child;
      if (child == p.rows) return -1;
      drafts[count] = token;
      return child;
    });
  }
}

// (Cache, sequence) pairs over threads.
void dflash::DFLASH_ISA::compact_kv(const CompactKvParams& p) {
  int64_t moves = 0, bytes = 0;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t j = 1; j < p.path_rows; ++j) moves += p.source(b, j) >= 0;
  if (moves == 0) return;
  for (int64_t i = 0; i < p.num_caches; ++i) bytes += p.heads[i] * p.row_bytes[i];
  const auto compact = [&](int64_t index) {
    const int64_t i = index / p.batch, b = index % p.batch, heads = p.heads[i], size = p.row_bytes[i];
    char* cache = static_cast<char*>(p.caches[i]) + b * heads * p.capacity * size;
    for (int64_t j = 1; j < p.path_rows; ++j) {
      const int64_t from = p.source(b, j);
      if (from < 0) continue;
      const int64_t to = p.target(b, j);
      for (int64_t h = 0; h < heads; ++h) {
        char* head = cache + h * p.capacity * size;
        std::memcpy(head + to * size, head + from * size, size);
      }
    }
  };
  parallel_for(p.num_caches * p.batch, moves * bytes / 4, p.threads, compact);
}

void dflash::DFLASH_ISA::gather_rows(const GatherRowsParams& p) {
  const auto gather = [&](int64_t index) {
    const int64_t b = index / p.path_rows, j = index % p.path_rows;
    const int64_t row = std::clamp(p.path[index], int64_t(0), p.rows - 1);
    std::memcpy(static_cast<char*>(p.out) + (b * p.out_rows + j) * p.row_bytes,
                static_cast<const char*>(p.x) + (b * p.rows + row) * p.row_bytes, p.row_bytes);
  };
  const int64_t n = p.batch * p.path_rows;
  parallel_for(n, n * p.row_bytes / 4, p.threads, gather);
}
