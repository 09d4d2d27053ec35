// The queries that share a kv head are packed into vector lanes, so one load of K or V serves them all. With few
// queries the lanes hold keys and columns instead, with the same sums (AVX2, AVX-512). bf16 values are multiplied in
// fp32: weights would have to be rounded, and a pair of bf16 would tie a key to the next one in memory, which in a tree
// may be on another path. Scores do without AMX, whose sums have an order of their own: answers of int8 weights have
// the same bits with every instruction set.
//
// Keys are processed in tiles of 64 slots with an online softmax; chunks of 256 slots are combined in ascending order.
// Both start at multiples of their size in absolute slots, and one without a visible key changes no bit, so the result
// does not depend on how threads share (sequence, kv head, lane group), and chunks too if there are few of those.
//
// A row of a tree is a key of the tile of its position, after the slots before the block, in the order of rows: along a
// path, that of positions. Keys of other paths have weight zero and change no bit, so the sums are those of a chain.
#include <cmath>
#include <cstdlib>

#include "cpu/base/parallel.h"
#include "cpu/linear/linear_tile.h"
#include "cpu/tree/tree.h"

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kTileSlots = 64;
constexpr int64_t kChunk = 256;
constexpr int64_t kMaxLanes = 64;
constexpr float kInfinity = __builtin_inff();

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

// ---- q k^T: the queries of a group times the keys of a tile are a product like those of linear.cpp, with keys in
// place of weights, and go through the same kernels

// Calls fn(first lane, number of vectors as a constant) over all lanes.
template <int NV, typename Fn>
static inline void over_lanes(int64_t lane, int64_t lanes, const Fn& fn) {
  for (; lane + NV * kWidth <= lanes; lane += NV * kWidth) fn(lane, std::integral_constant<int, NV>{});
  if constexpr (NV > 1) over_lanes<NV - 1>(lane, lanes, fn);
}

// True if a group has too few queries to fill the lanes, which then hold keys in the product with these, and columns in
// that with values.
static inline bool has_few(const Group& g) { return kWidth >= 8 && g.live <= kWidth / 2; }
static inline bool has_few_for_values(const Group& g) { return kWidth >= 8 && g.live <= kFewRows; }

// A group's queries, packed once for the kernel that multiplies them. The choice of kernel does not affect the bits.
template <typename T>
class Queries {
 public:
  Queries(const BlockAttentionParams& p, const Group& g)
      : live_(g.live), lanes_(g.lanes), dim_(p.head_dim), words_(words_of<T>(dim_)), few_(has_few(g)) {
    static thread_local Buffer<T> row_buffer;
    static thread_local Buffer<Word<T>> buffer;
    T* rows = row_buffer.reserve(live_ * dim_);
    copy_queries(p, g, rows);
    packed_ = buffer.reserve(words_ * (few_ ? kFewRows : lanes_));
    if (few_)
      copy_rows(rows, live_, kFewRows, dim_, words_, packed_);
    else
      over_lanes<kMostVecs>(0, lanes_, [&](int64_t lane, auto vecs) {
        const int64_t count = least(vecs * kWidth, live_ - lane);
        pack_rows(rows + lane * dim_, count, dim_, vecs * kWidth, packed_ + lane * words_);
      });
  }

  // scores [keys, lanes] of k [keys, head_dim]
  void score(const T* k, int64_t keys, float* scores) const {
#if defined(__AVX2__)
    if (few_) return score_few(k, keys, scores);
#endif
    over_lanes<kMostVecs>(0, lanes_, [&](int64_t lane, auto vecs) {
      alignas(64) float sums[kTile * vecs * kWidth];
      for (int64_t key = 0; key < keys; key += kTile) {
        const int64_t count = least(kTile, keys - key);
        multiply_in_lanes<T, vecs>(packed_ + lane * words_, dim_, k + key * dim_, count, sums);
        for (int64_t i = 0; i < count; ++i)
          for (int v = 0; v < vecs; ++v)
            store(scores + (key + i) * lanes_ + lane + v * kWidth, load(sums + (i * vecs + v) * kWidth));
      }
    });
  }

 private:
  static constexpr int kMostVecs = kWidth == 16 ? 4 : 2;

  void copy_queries(const BlockAttentionParams& p, const Group& g, T* rows) const {
    const int64_t heads = p.num_heads / p.num_kv_heads;
    for (int64_t query = g.first; query < g.first + g.live; ++query, rows += p.head_dim)
      std::memcpy(rows,
                  static_cast<const T*>(p.q) + g.batch * p.q_stride_batch + query / heads * p.q_stride_row +
                      (g.kv_head * heads + query % heads) * p.q_stride_head,
                  p.head_dim * sizeof(T));
  }

#if defined(__AVX2__)
  void score_few(const T* k, int64_t keys, float* scores) const {
    live_ == 1   ? score_rows<1>(k, keys, scores)
    : live_ == 2 ? score_rows<2>(k, keys, scores)
    : live_ <= 4 ? score_rows<4>(k, keys, scores)
                 : score_rows<kFewRows>(k, keys, scores);
  }

  // Scores of the first ROWS lanes at most; those of the others are zero.
  template <int ROWS>
  void score_rows(const T* k, int64_t keys, float* scores) const {
    std::memset(scores, 0, keys * lanes_ * sizeof(float));
    for (int64_t key = 0; key < keys; key += kTile) {
      const int64_t count = least(kTile, keys - key);
      alignas(64) float sums[ROWS * kTile];
      multiply_few<T, ROWS>(packed_, words_, dim_, k + key * dim_, count, sums);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t row = 0; row < live_; ++row) scores[(key + i) * lanes_ + row] = sums[row * kTile + i];
    }
  }
#endif

  int64_t live_, lanes_, dim_, words_;
  bool few_;
  Word<T>* packed_;  // [words, lanes] of each kMostVecs vectors of lanes, or [kFewRows, words]
};

// ---- softmax, and the weighted sum of values

// Above 64 MB of partial sums, threads do not share chunks.
constexpr int64_t kMaxPartialFloats = int64_t(1) << 24;
constexpr int kRows = kWidth == 16 ? 6 : 4;  // rows and vectors of accumulators held in registers
constexpr int kVecs = kWidth == 16 ? 4 : kWidth == 8 ? 3 : 2;

static inline Vec select(IVec mask, Vec a, Vec b) { return mask ? a : b; }
static inline Vec max_vec(Vec a, Vec b) { return select(a > b, a, b); }

// tanh(x): a polynomial near 0, 1 - 2 / (exp(2|x|) + 1) elsewhere.
static inline Vec tanh_vec(Vec x) {
  const Vec z = x * x, size = max_vec(x, -x);
  const Vec p = horner(z, splat(-5.70498872745e-3f), 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                       -3.33332819422e-1f);
  const Vec far = 1.0f - 2.0f / (exp_vec(size * 2.0f) + 1.0f);
  return select(size < 0.625f, fma_vec(p * z, x, x), select(x < 0.0f, -far, far));
}

template <int N>
using Count = std::integral_constant<int, N>;

// out [dim, lanes] = out * alpha + v^T [dim, keys] weights [keys, lanes]
template <int NV>
static void value_tile(const float* v, int64_t v_step, int64_t keys, const float* weights, const float* alpha,
                       int64_t dim, int64_t lanes, float* out) {
  for (int64_t column = 0; column < dim; column += kRows) {
    const float* columns[kRows];  // past the end: repeat the last, and drop its sums
    for (int i = 0; i < kRows; ++i) columns[i] = v + least(column + i, dim - 1);
    Sums acc[kRows][NV] = {};
    for (int64_t key = 0; key < keys; ++key) {
      Vec weight[NV];
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) weight[j] = load(weights + key * lanes + j * kWidth);
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) {
        const Vec x = splat(columns[i][key * v_step]);
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) acc[i][j] = fma_vec(x, weight[j], acc[i][j]);
      }
    }
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      if (column + i >= dim) break;
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) {
        float* o = out + (column + i) * lanes + j * kWidth;
        store(o, fma_vec(load(o), load(alpha + j * kWidth), acc[i][j]));
      }
    }
  }
}

// The same sums of QUERIES queries, with NV vectors of columns in the lanes: out [QUERIES, out_step].
template <int QUERIES, int NV, typename V>
static void value_few(const V* v, int64_t v_step, int64_t keys, const float* weights, const float* alpha, int64_t lanes,
                      int64_t out_step, float* out) {
  Sums acc[QUERIES][NV] = {};
  for (int64_t key = 0; key < keys; ++key) {
    Vec x[NV];
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) x[j] = load(v + key * v_step + j * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < QUERIES; ++i) {
      const Vec weight = splat(weights[key * lanes + i]);
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) acc[i][j] = fma_vec(weight, x[j], acc[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < QUERIES; ++i)
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) {
      float* o = out + i * out_step + j * kWidth;
      store(o, fma_vec(load(o), splat(alpha[i]), acc[i][j]));
    }
}

// Turns scores [keys, lanes], times `scale`, into weights exp(score - top), and updates the state's top and sum. alpha
// [lanes] rescales sums that used the old top.
__attribute__((noinline)) static void softmax_tile(const BlockAttentionParams& p, const Group& g, const Keys& keys,
                                                   float scale, float* scores, float* alpha, const State& state) {
  for (int64_t lane = 0; lane < g.lanes; lane += kWidth) {
    const IVec lo = *reinterpret_cast<const IVec*>(g.lo + lane), hi = *reinterpret_cast<const IVec*>(g.hi + lane);
    const Vec old_top = load(state.top + lane);
    Vec top = old_top;
    for (int64_t key = 0; key < keys.count; ++key) {
      float* at = scores + key * g.lanes + lane;
      Vec x = load(at) * scale;
      if (p.softcap != 0.0f) x = tanh_vec(x) * p.softcap;
      if (keys.masked) {
        const IVec slot = IVec{} + int32_t(keys.first + key);
        const IVec seen =
            key < keys.slots ? (slot >= lo) & (slot < hi) : lanes_of(keys.rows[key - keys.slots]->seen_by, lane);
        x = select(seen, x, splat(-kInfinity));
      }
      store(at, x);
      top = max_vec(x, top);
    }
    const Vec base = select(top == -kInfinity, Vec{}, top), factor = exp_vec(old_top - base);
    Vec sum = {};
    for (int64_t key = 0; key < keys.count; ++key) {
      float* at = scores + key * g.lanes + lane;
      const Vec weight = exp_vec(load(at) - base);
      store(at, weight);
      sum += weight;
    }
    store(state.sum + lane, fma_vec(load(state.sum + lane), factor, sum));
    store(state.top + lane, top);
    store(alpha + lane, factor);
  }
}

// into = into + other, both rescaled to the larger top.
__attribute__((noinline)) static void combine(const State& into, const State& other, int64_t lanes,
                                              int64_t v_head_dim) {
  for (int64_t lane = 0; lane < lanes; lane += kWidth) {
    const Vec a = load(into.top + lane), b = load(other.top + lane), top = max_vec(a, b);
    const Vec base = select(top == -kInfinity, Vec{}, top);
    const Vec keep = exp_vec(a - base), add = exp_vec(b - base);
    store(into.top + lane, top);
    store(into.sum + lane, fma_vec(load(into.sum + lane), keep, load(other.sum + lane) * add));
    for (int64_t column = 0; column < v_head_dim; ++column) {
      float* o = into.out + column * lanes + lane;
      store(o, fma_vec(load(o), keep, load(other.out + column * lanes + lane) * add));
    }
  }
}

// One call's view of a group: its packed queries and the tile buffers.
template <typename T>
struct Worker {
  const BlockAttentionParams& p;
  const Group& g;
  const Queries<T> queries;
  const bool few;  // `read` is used, not `chunk.out`
  float* scores;   // [most_keys, lanes]
  float* alpha;    // [lanes]
  float* read;     // [kFewRows, v_head_dim]
  float* v_tile;   // [most_keys, v_step]: read by columns, so rows must not share cache sets
  int64_t v_step;
  const TreeRow** rows;  // [p.rows], the tree's rows in a tile
  T* tree_keys;          // [p.rows, head_dim], the keys of those rows
  State chunk, total;

  Worker(const BlockAttentionParams& p, const Group& g)
      : p(p), g(g), queries(p, g), few(has_few_for_values(g) && p.v_head_dim % kWidth == 0) {
    v_step = ceil_div(p.v_head_dim, 16) * 16 + 16;
    const int64_t most_keys = kTileSlots + (g.tree ? p.rows : 0);
    const int64_t state = State::floats(g.lanes, p.v_head_dim), few_floats = few ? kFewRows * p.v_head_dim : 0;
    static thread_local Buffer<float> buffer;
    float* data = buffer.reserve(g.lanes * (most_keys + 1) + 2 * state + few_floats + most_keys * v_step);
    scores = data, data += g.lanes * most_keys;
    alpha = data, data += g.lanes;
    chunk = State::at(data, g.lanes), data += state;
    total = State::at(data, g.lanes), data += state;
    read = data, data += few_floats;
    v_tile = data;
    static thread_local Buffer<const TreeRow*> row_buffer;
    static thread_local Buffer<T> key_buffer;
    rows = g.tree ? row_buffer.reserve(p.rows) : nullptr;
    tree_keys = g.tree ? key_buffer.reserve(p.rows * p.head_dim) : nullptr;
  }

  static void copy(const T* from, int64_t n, float* to) {
    over_vectors(n, [&](int64_t i, auto count) { store(to + i, load(from + i, count), count); });
  }

  // v_tile = v. Slots hidden from some queries may hold anything, and a weight of zero does not cancel NaN or infinity,
  // so non-finite rows are zeroed. Queries that do see such a row become NaN.
  void copy_values(const T* v, const Keys& keys) const {
    const int64_t n = p.v_head_dim;
    for (int64_t key = 0; key < keys.count; ++key) {
      float* row = v_tile + key * v_step;
      copy(v + keys.slot(key) * n, n, row);
      if (!keys.masked) continue;
      bool finite = true;
      for (int64_t i = 0; i < n; ++i) finite &= std::fabs(row[i]) < kInfinity;
      if (finite) continue;
      std::memset(row, 0, n * sizeof(float));
      for (int64_t lane = 0; lane < g.lanes; ++lane)
        if (scores[key * g.lanes + lane] != 0.0f) chunk.sum[lane] = __builtin_nanf("");
    }
  }

  // The keys at positions first .. end - 1, within one tile.
  Keys keys_at(int64_t first, int64_t end) const {
    const int64_t slots = most(0, least(kTileSlots, least(end, g.slots) - first));
    int64_t count = slots;
    for (int64_t row = 0; g.tree && g.slots < first + kTileSlots && row < p.rows; ++row) {
      const TreeRow& key = g.tree[row];
      const bool is_key = key.slot >= 0 && key.slot < p.capacity && key.position >= first;
      if (is_key && key.position < first + kTileSlots) rows[count++ - slots] = &key;
    }
    return {first, slots, count, count > slots || first < g.lo_max || first + slots > g.hi_min, rows};
  }

  // scores = q k^T
  void score(const T* k, const Keys& keys) const {
    queries.score(k + keys.first * p.head_dim, keys.slots, scores);
    const int64_t others = keys.count - keys.slots;
    for (int64_t i = 0; i < others; ++i)
      std::memcpy(tree_keys + i * p.head_dim, k + keys.slot(keys.slots + i) * p.head_dim, p.head_dim * sizeof(T));
    queries.score(tree_keys, others, scores + keys.slots * g.lanes);
  }

  // Rescales chunk.out (or `read`) by alpha and adds v^T weights.
  void add_values(const T* v, const Keys& keys) const {
    if (few && !keys.masked) return add_few(v + keys.first * p.v_head_dim, p.v_head_dim, keys.count);
    copy_values(v, keys);
    if (few) return add_few(v_tile, v_step, keys.count);
    over_lanes<kVecs>(0, g.lanes, [&](int64_t lane, auto vecs) {
      value_tile<vecs>(v_tile, v_step, keys.count, scores + lane, alpha + lane, p.v_head_dim, g.lanes,
                       chunk.out + lane);
    });
  }

  template <typename V>
  void add_few(const V* v, int64_t step, int64_t keys) const {
    const auto run = [&](auto queries, auto most_vecs) {
      over_lanes<most_vecs>(0, p.v_head_dim, [&](int64_t column, auto vecs) {
        value_few<queries, vecs>(v + column, step, keys, scores, alpha, g.lanes, p.v_head_dim, read + column);
      });
    };
    constexpr int kHeld = kWidth == 16 ? 16 : 8;  // vectors of sums
    g.live <= 2   ? run(Count<2>{}, Count<kHeld / 2>{})
    : g.live <= 4 ? run(Count<4>{}, Count<kHeld / 4>{})
                  : run(Count<kFewRows>{}, Count<kHeld / kFewRows>{});
  }

  void store_few() const {
    for (int64_t lane = 0; lane < g.live; ++lane)
      for (int64_t i = 0; i < p.v_head_dim; ++i) chunk.out[i * g.lanes + lane] = read[lane * p.v_head_dim + i];
  }

  // chunk = the state over the visible keys at [begin, begin + kChunk); returns false if there are none
  bool attend(int64_t begin) const {
    const int64_t end = least(begin + kChunk, g.hi_max), lanes = g.lanes;
    if (end <= most(begin, g.lo_min)) return false;
    chunk.clear(lanes, p.v_head_dim);
    if (few) std::memset(read, 0, kFewRows * p.v_head_dim * sizeof(float));
    const float scale = p.softcap != 0.0f ? p.scale / p.softcap : p.scale;
    const int64_t sequence = p.sequences ? p.sequences[g.batch] : g.batch;
    const int64_t cache = (sequence * p.num_kv_heads + g.kv_head) * p.capacity;
    for (int64_t first = most(begin, g.lo_min / kTileSlots * kTileSlots); first < end; first += kTileSlots) {
      const Keys keys = keys_at(first, end);
      score(static_cast<const T*>(p.k_cache) + cache * p.head_dim, keys);
      softmax_tile(p, g, keys, scale, scores, alpha, chunk);
      add_values(static_cast<const T*>(p.v_cache) + cache * p.v_head_dim, keys);
    }
    if (few) store_few();
    return true;
  }

  // Adds the sinks to `total`, and writes the output.
  void finish() const {
    const int64_t heads = p.num_heads / p.num_kv_heads, dim = p.v_head_dim, lanes = g.lanes;
    if (p.sinks) {
      chunk.clear(lanes, dim);
      for (int64_t lane = 0; lane < g.live; ++lane) {
        chunk.top[lane] = p.sinks[g.kv_head * heads + (g.first + lane) % heads];
        chunk.sum[lane] = 1.0f;
      }
      combine(total, chunk, lanes, dim);
    }
    for (int64_t lane = 0; lane < g.live; ++lane) {
      const float factor = total.sum[lane] == 0.0f ? 0.0f : 1.0f / total.sum[lane];
      T* to = static_cast<T*>(p.out) + ((g.batch * p.rows + (g.first + lane) / heads) * p.num_heads +
                                        g.kv_head * heads + (g.first + lane) % heads) *
                                           dim;
      for (int64_t i = 0; i < dim; ++i) store_one(to + i, total.out[i * lanes + lane] * factor);
    }
  }
};

template <typename T>
static void attend_group(const BlockAttentionParams& p, const Group& g) {
  const Worker<T> worker(p, g);
  worker.total.clear(g.lanes, p.v_head_dim);
  for (int64_t begin = g.lo_min / kChunk * kChunk; begin < g.hi_max; begin += kChunk)
    if (worker.attend(begin)) combine(worker.total, worker.chunk, g.lanes, p.v_head_dim);
  worker.finish();
}

// partials [tasks, chunks, State::floats(width, v_head_dim)]. Both passes skip chunks without visible keys.
template <typename T>
static void attend_chunk(const BlockAttentionParams& p, const Group& g, int64_t chunk, float* partial) {
  if (least((chunk + 1) * kChunk, g.hi_max) <= most(chunk * kChunk, g.lo_min)) return;
  Worker<T> worker(p, g);
  worker.chunk = State::at(partial, g.lanes);
  worker.attend(chunk * kChunk);
}

template <typename T>
static void combine_chunks(const BlockAttentionParams& p, const Group& g, float* partials, int64_t size) {
  const Worker<T> worker(p, g);
  worker.total.clear(g.lanes, p.v_head_dim);
  for (int64_t chunk = g.lo_min / kChunk; chunk * kChunk < g.hi_max; ++chunk)
    combine(worker.total, State::at(partials + chunk * size, g.lanes), g.lanes, p.v_head_dim);
  worker.finish();
}

template <typename T>
static void attend_all(const BlockAttentionParams& p) {
  const int64_t queries = p.rows * (p.num_heads / p.num_kv_heads), pairs = p.batch * p.num_kv_heads;
  if (queries == 0 || pairs == 0) return;
  int64_t keys = 0;
  for (int64_t b = 0; b < p.batch; ++b) keys = most(keys, least(length_of(p, b) + p.rows, p.capacity));
  const int64_t chunks = ceil_div(keys, kChunk), work = pairs * queries * keys * (p.head_dim + p.v_head_dim) / 16;
  const int64_t threads = p.threads;
  int64_t groups = ceil_div(queries, kMaxLanes);
  // Enough groups for all threads. With fewer than four tasks per thread, as many for each: 3 tasks on 2 threads take
  // as long as 4.
  const auto lanes = [&] { return ceil_div(ceil_div(queries, groups), kWidth) * kWidth; };
  const auto is_even = [&] {
    const int64_t tasks = pairs * ceil_div(queries, lanes());
    return tasks * most(chunks, 1) >= 4 * threads || tasks % threads == 0;
  };
  while (!is_even() && groups < ceil_div(queries, 16)) ++groups;
  const int64_t width = lanes();
  groups = ceil_div(queries, width);
  const int64_t tasks = pairs * groups, size = State::floats(width, p.v_head_dim);
  const bool share_chunks = chunks > 1 && tasks < 4 * threads && tasks % threads != 0 && work >= kParallelElements &&
                            tasks * chunks * size <= kMaxPartialFloats;
  if (!share_chunks) {
    parallel_for(tasks, work, p.threads, [&](int64_t task) { attend_group<T>(p, Group(p, task, groups, width)); });
    return;
  }
  Buffer<float> memory;
  float* partials = memory.reserve(tasks * chunks * size);
  parallel_for(tasks * chunks, work, p.threads, [&](int64_t i) {
    attend_chunk<T>(p, Group(p, i % tasks, groups, width), i / tasks,
                    partials + (i % tasks * chunks + i / tasks) * size);
  });
  parallel_for(tasks, work, p.threads, [&](int64_t task) {
    combine_chunks<T>(p, Group(p, task, groups, width), partials + task * chunks * size, size);
  });
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::block_attention(const BlockAttentionParams& p) {
  p.dtype == DType::kFloat32 ? attend_all<float>(p) : attend_all<bf16>(p);
}
