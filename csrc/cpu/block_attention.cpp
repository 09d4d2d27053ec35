// o_i = sum_j p_ij v_j / (sum_j p_ij + exp(sink - top)),  p_ij = exp(s_ij - top),  s_ij = cap(scale * q_i .
// k_j)
//
// The queries that share a kv head are packed into vector lanes, one query per lane, so one load of K or V
// serves them all. A lane's result depends neither on its place nor on the other lanes.
//
// Keys are processed in tiles of 64 slots with an online softmax. Tiles form chunks of 256 slots, and the
// chunks' (top, sum, o) are combined in ascending order. Tiles and chunks start at multiples of their size in
// absolute slots, and one without a visible key changes no bit. The result therefore does not depend on how
// the work is split. Threads share (sequence, kv head, lane group), and chunks too if there are few of those.
//
// A row of a tree is a key of the tile of its position: after the slots before the block, in the order of
// rows, which along a path is the order of positions. Between the keys of a path stand keys with weight zero,
// which change no bit, so the sums are those of a chain.
#include <cmath>
#include <cstdlib>
#include <type_traits>

#include "cpu/attention_group.h"
#include "cpu/parallel.h"

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kSegment = 32;
// Above 64 MB of partial sums, threads do not share chunks.
constexpr int64_t kMaxPartialFloats = int64_t(1) << 24;
constexpr int kRows = kWidth == 16 ? 6 : 4;  // rows and vectors of accumulators held in registers
constexpr int kVecs = kWidth == 16 ? 4 : kWidth == 8 ? 3 : 2;

static inline Vec select(IVec mask, Vec a, Vec b) { return mask ? a : b; }
static inline Vec max_vec(Vec a, Vec b) { return select(a > b, a, b); }

// tanh(x): a polynomial near 0, 1 - 2 / (exp(2|x|) + 1) elsewhere.
static inline Vec tanh_vec(Vec x) {
  const Vec z = x * x, size = max_vec(x, -x);
  Vec p = splat(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z - 5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z - 3.33332819422e-1f;
  const Vec far = 1.0f - 2.0f / (exp_vec(size * 2.0f) + 1.0f);
  return select(size < 0.625f, p * z * x + x, select(x < 0.0f, -far, far));
}

static float* thread_scratch(int64_t floats) {
  static thread_local Buffer<float> buffer;
  return buffer.reserve(floats);
}

// acc[i][v] = sum over k of a[i][k * a_step] * b[k * b_step + lane]. Both products use this loop nest.
template <int NV>
static inline void multiply(const float* const (&a)[kRows], int64_t a_step, const float* b, int64_t b_step,
                            int64_t n, Vec (&acc)[kRows][NV]) {
#pragma GCC unroll 8
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) acc[i][v] = Vec{};
  for (int64_t k = 0; k < n; ++k) {
    Vec lanes[NV];
#pragma GCC unroll 8
    for (int v = 0; v < NV; ++v) lanes[v] = load(b + k * b_step + v * kWidth);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      const Vec x = splat(a[i][k * a_step]);
#pragma GCC unroll 8
      for (int v = 0; v < NV; ++v) acc[i][v] += x * lanes[v];
    }
  }
}

// scores [keys, lanes] = k [keys, dim] q, q packed as [dim, lanes]; NV vectors of lanes. Partial sums of
// kSegment products are added up, because one long sum has twice the error.
template <int NV>
static void score_tile(const float* k, int64_t k_step, int64_t keys, const float* q, int64_t dim,
                       int64_t lanes, float* scores) {
  for (int64_t key = 0; key < keys; key += kRows) {
    const int64_t rows = least(kRows, keys - key);
    for (int64_t from = 0; from < dim; from += kSegment) {
      const float* at[kRows];  // past the end: repeat the last key and drop its scores
      for (int i = 0; i < kRows; ++i) at[i] = k + least(key + i, keys - 1) * k_step + from;
      Vec acc[kRows][NV];
      multiply<NV>(at, 1, q + from * lanes, lanes, least(kSegment, dim - from), acc);
      float* out = scores + key * lanes;
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i, out += lanes) {
        if (i >= rows) break;
#pragma GCC unroll 8
        for (int v = 0; v < NV; ++v)
          store(out + v * kWidth, from ? load(out + v * kWidth) + acc[i][v] : acc[i][v]);
      }
    }
  }
}

// out [dim, lanes] = out * alpha + v^T [dim, keys] weights [keys, lanes]
template <int NV>
static void value_tile(const float* v, int64_t v_step, int64_t keys, const float* weights, const float* alpha,
                       int64_t dim, int64_t lanes, float* out) {
  for (int64_t column = 0; column < dim; column += kRows) {
    const float* columns[kRows];
    for (int i = 0; i < kRows; ++i) columns[i] = v + least(column + i, dim - 1);
    Vec acc[kRows][NV];
    multiply<NV>(columns, v_step, weights, lanes, keys, acc);
#pragma GCC unroll 8
    for (int i = 0; i < kRows; ++i) {
      if (column + i >= dim) break;
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) {
        float* o = out + (column + i) * lanes + j * kWidth;
        store(o, load(o) * load(alpha + j * kWidth) + acc[i][j]);
      }
    }
  }
}

// Calls fn(first lane, number of vectors as a constant) over all lanes.
template <int NV, typename Fn>
static inline void over_lanes(int64_t lane, int64_t lanes, const Fn& fn) {
  for (; lane + NV * kWidth <= lanes; lane += NV * kWidth) fn(lane, std::integral_constant<int, NV>{});
  if constexpr (NV > 1) over_lanes<NV - 1>(lane, lanes, fn);
}

// Turns scores [keys, lanes] into weights exp(score - top), and updates the state's top and sum. alpha
// [lanes] rescales sums that used the old top.
__attribute__((noinline)) static void softmax_tile(const BlockAttentionParams& p, const Group& g,
                                                   const Keys& keys, float* scores, float* alpha,
                                                   const State& state) {
  for (int64_t lane = 0; lane < g.lanes; lane += kWidth) {
    const IVec lo = *reinterpret_cast<const IVec*>(g.lo + lane),
               hi = *reinterpret_cast<const IVec*>(g.hi + lane);
    const Vec old_top = load(state.top + lane);
    Vec top = old_top;
    for (int64_t key = 0; key < keys.count; ++key) {
      float* at = scores + key * g.lanes + lane;
      Vec x = load(at);
      if (p.softcap != 0.0f) x = tanh_vec(x) * p.softcap;
      if (keys.masked) {
        const IVec slot = IVec{} + int32_t(keys.first + key);
        const IVec seen = key < keys.slots ? (slot >= lo) & (slot < hi)
                                           : lanes_of(keys.rows[key - keys.slots]->seen_by, lane);
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
    store(state.sum + lane, load(state.sum + lane) * factor + sum);
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
    store(into.sum + lane, load(into.sum + lane) * keep + load(other.sum + lane) * add);
    for (int64_t column = 0; column < v_head_dim; ++column) {
      float* o = into.out + column * lanes + lane;
      store(o, load(o) * keep + load(other.out + column * lanes + lane) * add);
    }
  }
}

// One call's view of a group: its packed queries and the tile buffers.
template <typename T>
struct Worker {
  const BlockAttentionParams& p;
  const Group& g;
  float* q;       // [head_dim, lanes], scaled
  float* scores;  // [most_keys, lanes]
  float* alpha;   // [lanes]
  float* k_tile;  // [most_keys, head_dim]
  float* v_tile;  // [most_keys, v_step]: read by columns, so the row stride must avoid cache-set conflicts
  int64_t v_step;
  const TreeRow** rows;  // [p.rows], a tile's
  State chunk, total;

  Worker(const BlockAttentionParams& p, const Group& g) : p(p), g(g) {
    const int64_t state = State::floats(g.lanes, p.v_head_dim);
    v_step = ceil_div(p.v_head_dim, 16) * 16 + 16;
    const int64_t most_keys = g.tree ? kTile + p.rows : kTile;
    float* data = thread_scratch(g.lanes * (p.head_dim + most_keys + 1) + most_keys * (p.head_dim + v_step) +
                                 2 * state);
    static thread_local Buffer<const TreeRow*> buffer;
    rows = g.tree ? buffer.reserve(p.rows) : nullptr;
    q = data, data += g.lanes * p.head_dim;
    scores = data, data += g.lanes * most_keys;
    alpha = data, data += g.lanes;
    chunk = State::at(data, g.lanes), data += state;
    total = State::at(data, g.lanes), data += state;
    k_tile = data, data += most_keys * p.head_dim;
    v_tile = data;
    pack_queries();
  }

  void pack_queries() const {
    const int64_t heads = p.num_heads / p.num_kv_heads;
    const float scale = p.softcap != 0.0f ? p.scale / p.softcap : p.scale;
    for (int64_t lane = 0; lane < g.lanes; ++lane) {
      if (lane >= g.live) {
        for (int64_t i = 0; i < p.head_dim; ++i) q[i * g.lanes + lane] = 0.0f;
        continue;
      }
      const int64_t row = (g.first + lane) / heads, head = g.kv_head * heads + (g.first + lane) % heads;
      const T* from = static_cast<const T*>(p.q) + g.batch * p.q_stride_batch + row * p.q_stride_row +
                      head * p.q_stride_head;
      for (int64_t i = 0; i < p.head_dim; ++i) q[i * g.lanes + lane] = to_float(from[i]) * scale;
    }
  }

  static const float* widen(const float* from, int64_t, float*) { return from; }
  static const float* widen(const bf16* from, int64_t n, float* to) {
    copy(from, n, to);
    return to;
  }
  static void copy(const T* from, int64_t n, float* to) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) store(to + i, load(from + i));
    for (; i < n; ++i) to[i] = to_float(from[i]);
  }

  // v_tile = v. Slots hidden from some queries may hold anything, and a weight of zero does not cancel NaN or
  // infinity, so non-finite rows are zeroed. Queries that do see such a row become NaN.
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
    const int64_t slots = most(0, least(kTile, least(end, g.slots) - first));
    int64_t count = slots;
    for (int64_t row = 0; g.tree && g.slots < first + kTile && row < p.rows; ++row) {
      const TreeRow& key = g.tree[row];
      const bool is_key = key.slot >= 0 && key.slot < p.capacity && key.position >= first;
      if (is_key && key.position < first + kTile) rows[count++ - slots] = &key;
    }
    return {first, slots, count, count > slots || first < g.lo_max || first + slots > g.hi_min, rows};
  }

  // scores = q k^T
  void score(const T* k, const Keys& keys) const {
    const auto run = [&](const float* from, int64_t count, float* to) {
      over_lanes<kVecs>(0, g.lanes, [&](int64_t lane, auto vecs) {
        score_tile<vecs>(from, p.head_dim, count, q + lane, p.head_dim, g.lanes, to + lane);
      });
    };
    run(widen(k + keys.first * p.head_dim, keys.slots * p.head_dim, k_tile), keys.slots, scores);
    if (keys.count == keys.slots) return;
    for (int64_t key = keys.slots; key < keys.count; ++key)
      copy(k + keys.slot(key) * p.head_dim, p.head_dim, k_tile + (key - keys.slots) * p.head_dim);
    run(k_tile, keys.count - keys.slots, scores + keys.slots * g.lanes);
  }

  // chunk = the state over the visible keys at [begin, begin + kChunk); returns false if there are none
  bool attend(int64_t begin) const {
    const int64_t end = least(begin + kChunk, g.hi_max), lanes = g.lanes;
    if (end <= most(begin, g.lo_min)) return false;
    chunk.clear(lanes, p.v_head_dim);
    const int64_t cache = (g.batch * p.num_kv_heads + g.kv_head) * p.capacity;
    for (int64_t first = most(begin, g.lo_min / kTile * kTile); first < end; first += kTile) {
      const Keys keys = keys_at(first, end);
      score(static_cast<const T*>(p.k_cache) + cache * p.head_dim, keys);
      softmax_tile(p, g, keys, scores, alpha, chunk);
      copy_values(static_cast<const T*>(p.v_cache) + cache * p.v_head_dim, keys);
      over_lanes<kVecs>(0, lanes, [&](int64_t lane, auto vecs) {
        value_tile<vecs>(v_tile, v_step, keys.count, scores + lane, alpha + lane, p.v_head_dim, lanes,
                         chunk.out + lane);
      });
    }
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
  const int64_t chunks = ceil_div(keys, kChunk),
                work = pairs * queries * keys * (p.head_dim + p.v_head_dim) / 16;
  const int64_t threads = p.threads;
  int64_t groups = ceil_div(queries, kMaxLanes);
  while (pairs * groups * most(chunks, 1) < threads && groups < ceil_div(queries, 16)) ++groups;
  const int64_t width = ceil_div(ceil_div(queries, groups), kWidth) * kWidth;
  groups = ceil_div(queries, width);
  const int64_t tasks = pairs * groups, size = State::floats(width, p.v_head_dim);
  const bool share_chunks = chunks > 1 && tasks < 4 * threads && tasks % threads != 0 &&
                            work >= kParallelElements && tasks * chunks * size <= kMaxPartialFloats;
  if (!share_chunks) {
    parallel_for(tasks, work, p.threads,
                 [&](int64_t task) { attend_group<T>(p, Group(p, task, groups, width)); });
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

namespace dflash::DFLASH_ISA {

void block_attention(const BlockAttentionParams& p) {
  p.dtype == DType::kFloat32 ? attend_all<float>(p) : attend_all<bf16>(p);
}

}  // namespace dflash::DFLASH_ISA
