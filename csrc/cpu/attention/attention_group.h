// A group of queries of block_attention.cpp: which positions its lanes see, the keys of a tile, and the state of the
// softmax.
#pragma once
#include "cpu/base/parallel.h"
#include "cpu/tree/tree.h"

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kTileSlots = 64;
constexpr int64_t kChunk = 256;
constexpr int64_t kMaxLanes = 64;
constexpr float kInfinity = __builtin_inff();

// The length, clamped to -rows .. 2 * capacity + rows, so that no sum overflows. A window is at most capacity + rows,
// and what is farther out sees the same slots.
static inline int64_t length_of(const BlockAttentionParams& p, int64_t b) {
  return most(-p.rows, least(p.lengths[b], 2 * p.capacity + p.rows));
}

// The softmax state of a group's lanes over some keys.
struct State {
  float* top;  // [lanes] largest score, -infinity before the first
  float* sum;  // [lanes] sum of exp(score - top)
  float* out;  // [v_head_dim, lanes] sum of exp(score - top) * v
  static int64_t floats(int64_t lanes, int64_t v_head_dim) { return lanes * (v_head_dim + 2); }
  static State at(float* data, int64_t lanes) { return {data, data + lanes, data + 2 * lanes}; }
  void clear(int64_t lanes, int64_t v_head_dim) const {
    for (int64_t i = 0; i < lanes; ++i) top[i] = -kInfinity;
    std::memset(sum, 0, sizeof(float) * lanes * (v_head_dim + 1));
  }
};

struct TreeRow {
  int64_t slot, position;
  uint64_t seen_by;  // bits of a group's lanes
};

// Up to 64 of the rows * (num_heads / num_kv_heads) queries of one sequence and kv head, row-major.
struct Group {
  int64_t batch, kv_head, first, live, lanes;  // lanes: live ones, rounded up to full vectors
  int32_t lo[kMaxLanes], hi[kMaxLanes];        // the lane sees positions lo .. hi - 1
  int64_t lo_min, lo_max, hi_min, hi_max;
  int64_t slots;            // slots 0 .. slots - 1 hold the keys of their own positions
  TreeRow* tree = nullptr;  // [rows], the keys after these; null for a chain

  Group(const BlockAttentionParams& p, int64_t index, int64_t groups, int64_t width) {
    const int64_t heads = p.num_heads / p.num_kv_heads;
    batch = index / (p.num_kv_heads * groups);
    kv_head = index / groups % p.num_kv_heads;
    first = index % groups * width;
    live = most(0, least(width, p.rows * heads - first));
    lanes = ceil_div(live, kWidth) * kWidth;
    const int64_t length = length_of(p, batch), valid = most(0, least(length + p.rows, p.capacity));
    slots = p.ancestors ? most(0, least(length, p.capacity)) : valid;
    if (p.ancestors) find_tree(p, length);
    lo_min = hi_min = INT32_MAX, lo_max = hi_max = 0;
    for (int64_t lane = 0; lane < lanes; ++lane) {
      const int64_t row = least(first + lane, first + live - 1) / heads;
      const int64_t query = tree ? tree[row].position : length + row;
      int64_t from = 0, to = valid;
      if (p.causal) to = least(to, query + 1);
      if (p.window) from = most(from, query - p.window + 1);
      if (p.window && !p.causal) to = least(to, query + p.window);
      if (from >= to) from = INT32_MAX, to = 0;
      lo[lane] = int32_t(from), hi[lane] = int32_t(to);
      lo_min = least(lo_min, from), lo_max = most(lo_max, from);
      hi_min = least(hi_min, to), hi_max = most(hi_max, to);
      if (tree && lane < live) mark_ancestors(p, row, lane);
    }
  }

  // A thread has one group at a time.
  void find_tree(const BlockAttentionParams& p, int64_t length) {
    static thread_local Buffer<TreeRow> buffer;
    tree = buffer.reserve(p.rows);
    for (int64_t row = 0; row < p.rows; ++row)
      tree[row] = {length + row, length + depth_of(p.ancestors, p.rows, batch * p.rows + row), 0};
  }

  void mark_ancestors(const BlockAttentionParams& p, int64_t row, int64_t lane) {
    for (int64_t from = 0; from < p.rows; from += 64) {
      uint64_t bits = ancestor_word(p.ancestors, p.rows, batch * p.rows + row, from / 64);
      for (; bits; bits &= bits - 1) {
        TreeRow& key = tree[from + __builtin_ctzll(bits)];
        if (!p.window || tree[row].position - key.position < p.window) key.seen_by |= uint64_t(1) << lane;
      }
    }
  }
};

// The keys of a tile: those in slots first .. first + slots - 1, then rows of a tree.
struct Keys {
  int64_t first, slots, count;
  bool masked;                 // some lane may not see some key
  const TreeRow* const* rows;  // [count - slots]

  int64_t slot(int64_t key) const { return key < slots ? first + key : rows[key - slots]->slot; }
};

// The lanes from `lane` on whose bits are set.
static inline IVec lanes_of(uint64_t bits, int64_t lane) {
  static const int32_t kBits[16] = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                                    1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  return ((IVec{} + int32_t(bits >> lane)) & *reinterpret_cast<const IVec*>(kBits)) != 0;
}

DFLASH_NAMESPACE_END
