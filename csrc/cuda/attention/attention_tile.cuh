// Attention of one tile of rows on tensor cores, see block_attention.cu.
#pragma once
#include "cuda/base/device.cuh"

namespace dflash {

// ---- the chunks of a cache, and which slots a query sees

constexpr float kLog2E = 1.4426950408889634f;

// The first 2048 slots of a cache are one octave, every later octave is as long as all that is before it, and the last
// has no end. Each is cut into chunks of a length of its own, sixteen per octave.
constexpr int kOctaves = 4;
constexpr int kPerOctave = 16;
struct Octave {
  int begin, chunk;  // its first slot, and the slots of its chunks
  __host__ __device__ explicit Octave(int i) : begin(i ? 1024 << i : 0), chunk(i ? 64 << i : 128) {}
};

// The first slot of a chunk, and the chunk of a slot.
static __host__ __device__ __forceinline__ int chunk_begin(int chunk) {
  const int i = min(chunk / kPerOctave, kOctaves - 1);
  const Octave octave(i);
  return octave.begin + (chunk - i * kPerOctave) * octave.chunk;
}
static __host__ __device__ __forceinline__ int chunk_of(int slot) {
  int i = 0;
  while (i + 1 < kOctaves && slot >= Octave(i + 1).begin) ++i;
  const Octave octave(i);
  return i * kPerOctave + (slot - octave.begin) / octave.chunk;
}

// A row of a tree sees the rows of its path. These stand in the sums where a chain would have them: at the positions
// from `length` on, in ascending order.
static_assert(kMaxTreeRows == 128, "bits of a path");
struct Path {
  uint64_t low, high;  // a bit per row of the block

  __device__ __forceinline__ int count() const { return __popcll(low) + __popcll(high); }
  __device__ __forceinline__ int depth() const { return max(count() - 1, 0); }
  __device__ __forceinline__ bool holds(int row) const { return (row < 64 ? low : high) >> row % 64 & 1; }
  // The depth at which it holds a row.
  __device__ __forceinline__ int depth_of(int row) const {
    const uint64_t before = (uint64_t(1) << row % 64) - 1;
    return row < 64 ? __popcll(low & before) : __popcll(low) + __popcll(high & before);
  }
};

static __device__ __forceinline__ Path path_of(const BlockAttentionParams& p, int64_t batch, int row) {
  const int words = int(p.rows + 63) / 64;
  const uint64_t* at = reinterpret_cast<const uint64_t*>(p.ancestors) + (batch * p.rows + row) * words;
  const uint64_t last = ~uint64_t(0) >> (64 * words - p.rows);  // bits past the last row do not count
  return words == 1 ? Path{at[0] & last, 0} : Path{at[0], at[1] & last};
}

// The positions that a query sees: [lo, hi). Both ends rise with the query's own position.
struct Sight {
  int lo, hi;

  __device__ __forceinline__ bool sees(int position) const { return position >= lo && position < hi; }
};

// The length, clamped to -rows .. 2 * capacity + rows, so that no sum overflows. A window is at most capacity + rows,
// and what is farther out sees the same slots. It may be read early, so past the L1.
static __device__ __forceinline__ int64_t length_of(const BlockAttentionParams& p, int64_t batch) {
  return max(-p.rows, min(__ldcg(p.lengths + batch), 2 * p.capacity + p.rows));
}

// What the query at position length + depth sees.
static __device__ __forceinline__ Sight sight_of(const BlockAttentionParams& p, int64_t length, int depth) {
  const int64_t valid = max(int64_t(0), min(length + p.rows, p.capacity)), query = length + depth;
  int64_t lo = 0, hi = valid;
  if (p.causal) hi = min(hi, query + 1);
  if (p.window) lo = max(lo, query - p.window + 1);
  if (p.window && !p.causal) hi = min(hi, query + p.window);
  return {int(lo), int(hi)};
}

// ---- how a tile is cut, a thread's rows, and its part of the softmax state

constexpr int kRows = 64;  // per tile
constexpr int kKeys = 32;  // per stage

// Each warp owns 16 rows x up to 128 output columns. With 256 columns, two warps share the rows and both compute their
// scores.
template <int kDim>
constexpr int kColumns = kDim > 128 ? 128 : kDim;
template <int kDim>
constexpr int kThreads = kRows / 16 * 32 * (kDim / kColumns<kDim>);
template <int kDim>
constexpr int kPieces = kDim / 8;  // of 16 bytes per row
template <int kDim>
constexpr int kStages = kDim > 128 ? 2 : 4;
// Queries held in registers, times 16 columns: as many as ptxas finds room for. It needs more elsewhere from sm_100 on,
// and for trees.
#if __CUDA_ARCH__ >= 1000
constexpr int kHeldOf128 = 4;
#else
constexpr int kHeldOf128 = 6;
#endif
template <int kDim, bool kTree>
constexpr int kHeldQueries = kDim > 128   ? 0
                             : kDim <= 64 ? 4
                             : kTree      ? 2
                                          : kHeldOf128;
template <int kDim>
constexpr int kSharedBytes = (kRows + kStages<kDim> * 2 * kKeys) * kDim * 2;

// A thread's part of the state, in mma's layout: rows g = lane / 4 and g + 8, and in every 8 columns the two at 2 *
// (lane % 4).
template <int kDim>
struct State {
  float out[kColumns<kDim> / 8][4];  // sum of exp(score - top) * v
  float top[2];                      // largest score, -infinity before the first
  float sum[2];                      // sum of exp(score - top)

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int n = 0; n < kColumns<kDim> / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[n][e] = 0.0f;
    top[0] = top[1] = -infinity(), sum[0] = sum[1] = 0.0f;
  }
};

// A stored state: kStateVectors vectors of four per thread, and one for its rows, which four threads share.
template <int kDim>
constexpr int kStateVectors = kColumns<kDim> / 8;
template <int kDim>
constexpr int kStateSize = kStateVectors<kDim> * kThreads<kDim> + kThreads<kDim> / 4;
template <int kDim>
constexpr int kStateFloats = kStateSize<kDim> * 4;

// True if one of two neighbors is infinite or NaN.
template <typename T>
static __device__ __forceinline__ bool not_finite(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
}

// Where a thread of a stored state has its columns 8 n, and the tops and sums of its rows.
template <int kDim>
static __device__ __forceinline__ int columns_at(int n) {
  return n * kThreads<kDim> + threadIdx.x;
}
template <int kDim>
static __device__ __forceinline__ int sums_at() {
  return kStateVectors<kDim> * kThreads<kDim> + threadIdx.x / 4;
}

template <int kDim>
static __device__ __forceinline__ void store_state(float* to, const State<kDim>& s) {
  float4* at = reinterpret_cast<float4*>(to);
  __syncwarp();  // the four have read the sums that are replaced
#pragma unroll
  for (int n = 0; n < kStateVectors<kDim>; ++n)
    at[columns_at<kDim>(n)] = make_float4(s.out[n][0], s.out[n][1], s.out[n][2], s.out[n][3]);
  if (threadIdx.x % 4 == 0) at[sums_at<kDim>()] = make_float4(s.top[0], s.top[1], s.sum[0], s.sum[1]);
}

// Two states of a row, the earlier slots' first, become one: its top, and what either is multiplied with. If one is
// empty, the other keeps its bits.
struct Fold {
  float top, first, second;

  __device__ __forceinline__ Fold(float first_top, float second_top) : top(fmaxf(first_top, second_top)) {
    const float base = top == -infinity() ? 0.0f : top;
    first = exp2_approx(first_top - base), second = exp2_approx(second_top - base);
  }
  // Explicit intrinsics: every copy of this code must round alike.
  __device__ __forceinline__ float operator()(float a, float b) const {
    return __fmaf_rn(a, first, __fmul_rn(b, second));
  }
};

// s = stored + s; a barrier lies between this and the store.
template <int kDim>
static __device__ __forceinline__ void fold(State<kDim>& s, const float* stored) {
  const float4* at = reinterpret_cast<const float4*>(stored);
  const float4 sums = at[sums_at<kDim>()];  // tops, sums
  const Fold add[2] = {{sums.x, s.top[0]}, {sums.y, s.top[1]}};
  s.top[0] = add[0].top, s.top[1] = add[1].top;
  s.sum[0] = add[0](sums.z, s.sum[0]), s.sum[1] = add[1](sums.w, s.sum[1]);
#pragma unroll
  for (int n = 0; n < kStateVectors<kDim>; ++n) {
    const float4 v = at[columns_at<kDim>(n)];
    s.out[n][0] = add[0](v.x, s.out[n][0]), s.out[n][1] = add[0](v.y, s.out[n][1]);
    s.out[n][2] = add[1](v.z, s.out[n][2]), s.out[n][3] = add[1](v.w, s.out[n][3]);
  }
}

// One tile: 64 packed rows of one sequence and kv head, and the two that a thread has.
template <typename T, int kDim>
struct TileRows {
  const BlockAttentionParams& p;
  int group, kv_head, live, first_row;  // packed rows
  int64_t batch;

  __device__ __forceinline__ TileRows(const BlockAttentionParams& p, int index) : p(p) {
    group = int(p.num_heads / p.num_kv_heads);
    const int rows = int(p.rows) * group, tiles = (rows + kRows - 1) / kRows, at = index / tiles;
    first_row = index % tiles * kRows;
    live = min(kRows, rows - first_row);
    kv_head = at % int(p.num_kv_heads), batch = at / int(p.num_kv_heads);
  }

  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp_row() const { return warp() % (kRows / 16) * 16; }
  __device__ __forceinline__ int column() const { return warp() / (kRows / 16) * kColumns<kDim>; }
  __device__ __forceinline__ int row(int i) const { return warp_row() + lane() / 4 + 8 * i; }
  __device__ __forceinline__ int head(int i) const { return kv_head * group + (first_row + row(i)) % group; }

  // What the weighted values of row i are multiplied with: adds the sink and divides.
  __device__ __forceinline__ float factor(int i, float row_top, float sum) const {
    float keep = 1.0f;
    if (p.sinks) {
      const float sink = __fmul_rn(p.sinks[head(i)], kLog2E), top = fmaxf(row_top, sink),
                  base = top == -infinity() ? 0.0f : top;
      keep = exp2_approx(row_top - base);
      sum = __fmaf_rn(sum, keep, exp2_approx(sink - base));
    }
    return sum == 0.0f ? 0.0f : keep / sum;
  }

  // Where the result of row i begins.
  __device__ __forceinline__ T* result(int i) const {
    const int64_t query = (first_row + row(i)) / group;
    return static_cast<T*>(p.out) + ((batch * p.rows + query) * p.num_heads + head(i)) * p.v_head_dim;
  }

  // Writes the thread's two of 8 columns of row i.
  __device__ __forceinline__ void store(T* result, int n, float left, float right, float factor) const {
    if (column() + n * 8 >= p.v_head_dim) return;
    *reinterpret_cast<uint32_t*>(result + column() + n * 8 + lane() % 4 * 2) =
        pack_pair<T>(left * factor, right * factor);
  }
};

// ---- a tile

// One tile of rows and the keys that they see. The rows lie `shallowest` to `deepest` positions from the sequence's
// length.
template <typename T, int kDim, bool kTree = false>
struct Tile : TileRows<T, kDim> {
  using Rows = TileRows<T, kDim>;
  using Rows::batch, Rows::column, Rows::first_row, Rows::group, Rows::kv_head, Rows::lane, Rows::live, Rows::p,
      Rows::row, Rows::warp, Rows::warp_row;

  T* q_tile;      // [kRows, kDim]
  T* stages;      // [kStages, 2, kKeys, kDim]: K and V
  unsigned* bad;  // [kThreads / 32]: a bit per slot that a warp checks, set if its value row is not finite
  const T *k, *v;
  int begin, end;        // slots that some row sees
  int all_from, all_to;  // slots that every row sees
  int length;
  float scale, softcap;

  // How far from the sequence's length one of the thread's two rows lies.
  __device__ __forceinline__ int depth(int i) const {
    const int query = (first_row + min(row(i), live - 1)) / int(opaque(group));  // few stages ask
    if constexpr (kTree) return path_of(p, batch, query).depth();
    return query;
  }

  __device__ __forceinline__ Tile(const Rows& rows, unsigned* bad, int shallowest, int deepest)
      : Rows(rows), q_tile(shared<T>()), stages(q_tile + kRows * kDim), bad(bad) {
    const int64_t cache = (batch * p.num_kv_heads + kv_head) * p.capacity;
    k = static_cast<const T*>(p.k_cache) + cache * p.head_dim;
    v = static_cast<const T*>(p.v_cache) + cache * p.v_head_dim;
    length = int(length_of(p, batch));
    const Sight first = sight_of(p, length, shallowest), last = sight_of(p, length, deepest);
    begin = first.lo, end = last.hi;
    all_from = last.lo, all_to = first.hi;
    if (begin >= end) begin = end = 0;
    const bool capped = p.softcap != 0.0f;
    scale = capped ? p.scale / p.softcap : p.scale * kLog2E;
    softcap = capped ? p.softcap * kLog2E : 0.0f;
  }

  using Queries = uint32_t[kHeldQueries<kDim, kTree> ? kHeldQueries<kDim, kTree> : 1][4];

  // A thread copies the same piece of every kApart-th row or slot.
  static constexpr int kApart = kThreads<kDim> / kPieces<kDim>;

  __device__ __forceinline__ void copy_queries() const {
    const int row = threadIdx.x / kPieces<kDim>, piece = threadIdx.x % kPieces<kDim>;
    T* to = q_tile + place<kDim>(row, piece);
    const T* from = static_cast<const T*>(p.q) + batch * p.q_stride_batch + piece * 8;
    const int rows = piece * 8 < int(p.head_dim) ? live : 0;
#pragma unroll
    for (int i = 0; i < kRows; i += kApart) {
      const int packed = first_row + row + i;
      const int64_t query = packed / group, head = kv_head * group + packed % group;
      cp_async16_if(to + i * kDim, from + query * p.q_stride_row + head * p.q_stride_head, row + i < rows);
    }
  }

  // Slots past `end` are not read; zeros replace them.
  __device__ __forceinline__ void copy_keys(int stage, int slot) const {
    const int key = threadIdx.x / kPieces<kDim>, piece = threadIdx.x % kPieces<kDim>;
    T* to = stages + stage * 2 * kKeys * kDim + place<kDim>(key, piece);
    const int k_dim = int(p.head_dim), v_dim = int(p.v_head_dim);
    const T *from_k = k + int64_t(slot + key) * k_dim + piece * 8,
            *from_v = v + int64_t(slot + key) * v_dim + piece * 8;
    const int k_left = piece * 8 < k_dim ? end - slot - key : 0, v_left = piece * 8 < v_dim ? end - slot - key : 0;
#pragma unroll
    for (int i = 0; i < kKeys; i += kApart) {
      cp_async16_if(to + i * kDim, from_k + i * k_dim, i < k_left);
      cp_async16_if(to + (kKeys + i) * kDim, from_v + i * v_dim, i < v_left);
    }
  }

  // A slot that a row does not see may hold anything, and 0 * NaN is NaN. So value rows that are not finite are zeroed;
  // returns a bit for each of them.
  __device__ __forceinline__ unsigned clear_bad_values(T* values) const {
    constexpr int kTeam = kThreads<kDim> / kKeys, kTeams = 32 / kTeam;  // threads per slot, slots per warp
    const int key = threadIdx.x / kTeam, first = threadIdx.x % kTeam;
    bool here = false;
#pragma unroll
    for (int piece = 0; piece < kPieces<kDim>; piece += kTeam) {
      const uint4 w = load16(values + place<kDim>(key, piece + first));
      here |= not_finite<T>(w.x) || not_finite<T>(w.y) || not_finite<T>(w.z) || not_finite<T>(w.w);
    }
    const unsigned found = __ballot_sync(kAllLanes, here);
    unsigned keys = 0;
#pragma unroll
    for (int i = 0; i < kTeams; ++i) keys |= unsigned((found >> kTeam * i & ((1u << kTeam) - 1)) != 0) << i;
    if (keys >> lane() / kTeam & 1) {
#pragma unroll
      for (int piece = 0; piece < kPieces<kDim>; piece += kTeam)
        store16(values + place<kDim>(key, piece + first), make_uint4(0, 0, 0, 0));
    }
    if (lane() == 0) bad[warp()] = keys;
    __syncthreads();
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < kKeys / kTeams; ++i) all |= bad[i] << kTeams * i;
    return all;
  }

  // Loads the warp's queries in mma's layout, from column 16 d. The address of the piece 2 d further on in a row is the
  // address of the first, xor 16 d.
  __device__ __forceinline__ void load_queries(uint32_t (&a)[4], int d) const {
    ldmatrix(a, q_tile + (place<kDim>(warp_row() + lane() % 16, lane() / 16) ^ 16 * d));
  }

  // Explicit multiplications, here and below. The compiler could fuse them with a sum in one copy of this code and not
  // in another (masked and unmasked stages, say), and the results would round differently.
  __device__ __forceinline__ void scale_scores(float (&score)[kKeys / 8][4]) const {
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) score[n][e] = __fmul_rn(score[n][e], scale);
    if (softcap == 0.0f) return;  // asked once, not for every score
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) score[n][e] = __fmul_rn(tanhf(score[n][e]), softcap);
  }

  // Raises the tops of s to those of 32 more slots, turns their scores into weights, and adds these up.
  __device__ __forceinline__ void weigh(State<kDim>& s, float (&score)[kKeys / 8][4],
                                        uint32_t (&weight)[kKeys / 8][2]) const {
    float top[2] = {s.top[0], s.top[1]};
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], score[n][e]);
    float base[2], alpha[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 2));
      base[i] = top[i] == -infinity() ? 0.0f : top[i];
      alpha[i] = exp2_approx(s.top[i] - base[i]);
      s.top[i] = top[i];
    }
    if (__any_sync(kAllLanes, alpha[0] != 1.0f || alpha[1] != 1.0f)) {  // rare: few stages raise the top
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        s.sum[i] = __fmul_rn(s.sum[i], alpha[i]);
#pragma unroll
        for (int n = 0; n < kColumns<kDim> / 8; ++n) s.out[n][2 * i] *= alpha[i], s.out[n][2 * i + 1] *= alpha[i];
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        score[n][e] = exp2_approx(score[n][e] - base[e / 2]);
        s.sum[e / 2] += score[n][e];
      }
      weight[n][0] = pack_pair<T>(score[n][0], score[n][1]);
      weight[n][1] = pack_pair<T>(score[n][2], score[n][3]);
    }
  }

  // Adds the slots of a stage to s.
  __device__ __forceinline__ void attend_stage(State<kDim>& s, const Queries& queries, const T* keys, const T* values,
                                               int slot, bool masked, unsigned bad_keys) const {
    float score[kKeys / 8][4] = {};
    const int k_at = place<kDim>(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2),
              v_at = place<kDim>(lane() % 16, lane() / 16) ^ column();
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t a[4];
      if (d < kHeldQueries<kDim, kTree>) {
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = queries[d][i];
      } else {
        load_queries(a, d);
      }
#pragma unroll
      for (int n = 0; n < kKeys / 16; ++n) {
        uint32_t b[4];
        ldmatrix(b, keys + n * 16 * kDim + (k_at ^ 16 * d));
        const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
        mma_m16n8k16(score[2 * n], a, left, T());
        mma_m16n8k16(score[2 * n + 1], a, right, T());
      }
    }
    scale_scores(score);
    if (masked) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Sight sight = sight_of(p, opaque(length), depth(i));
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!sight.sees(slot + n * 8 + lane() % 4 * 2 + e)) score[n][2 * i + e] = -infinity();
      }
    }
    uint32_t weight[kKeys / 8][2];
    weigh(s, score, weight);
    if (bad_keys) {  // rare, and never in unmasked stages
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if ((bad_keys >> (n * 8 + lane() % 4 * 2 + e % 2) & 1) && score[n][e] != 0.0f) s.sum[e / 2] = not_a_number();
    }
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      const uint32_t a[4] = {weight[2 * n][0], weight[2 * n][1], weight[2 * n + 1][0], weight[2 * n + 1][1]};
#pragma unroll
      for (int d = 0; d < kColumns<kDim> / 16; ++d) {
        uint32_t b[4];
        ldmatrix_transposed(b, values + n * 16 * kDim + (v_at ^ 16 * d));
        const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
        mma_m16n8k16(s.out[2 * d], a, left, T());
        mma_m16n8k16(s.out[2 * d + 1], a, right, T());
      }
    }
  }

  // The slots of a chunk that some row sees, from a multiple of 32 on.
  __device__ __forceinline__ int2 slots_of(int chunk) const {
    return {max(chunk_begin(chunk), begin / kKeys * kKeys), min(chunk_begin(chunk + 1), end)};
  }

  // Copies the stages that a chunk begins with, up to the first with a fresh slot; returns their number.
  __device__ __forceinline__ int copy_old_keys(int chunk) const {
    const int2 slots = slots_of(chunk);
    int copied = 0;
#pragma unroll 1
    for (int slot = slots.x; copied < kStages<kDim> - 1 && slot < slots.y; slot += kKeys) {
      if (slot + kKeys > length - p.fresh) break;
      copy_keys(copied++, slot);
    }
    return copied;
  }

  // Adds the slots from `from`, a multiple of 32, up to `to`; some stages are copied already. A block copies its
  // queries with its first slots, after the first keys.
  __device__ __forceinline__ void attend_slots(State<kDim>& s, int from, int to, bool with_queries,
                                               int copied = 0) const {
    const int tiles = (to - from + kKeys - 1) / kKeys;
    Queries queries;
    __syncthreads();  // all threads have read the previous chunk's stages
#pragma unroll
    for (int i = 0; i < kStages<kDim> - 1; ++i) {
      if (i >= copied && i < tiles) copy_keys(i, from + i * kKeys);
      if (i == 0 && with_queries) copy_queries();
      cp_async_commit();
    }
    for (int i = 0; i < tiles; ++i) {
      cp_async_wait<kStages<kDim> - 2>();
      __syncthreads();
      const int next = i + kStages<kDim> - 1;
      if (next < tiles) copy_keys(next % kStages<kDim>, from + next * kKeys);
      cp_async_commit();
      const int slot = from + i * kKeys;
      T* keys = stages + i % kStages<kDim> * 2 * kKeys * kDim;
      const bool masked = slot < all_from || slot + kKeys > all_to;
      const unsigned bad_keys = masked ? clear_bad_values(keys + kKeys * kDim) : 0;
      if (kHeldQueries<kDim, kTree> && i == 0) {
#pragma unroll
        for (int d = 0; d < kHeldQueries<kDim, kTree>; ++d) load_queries(queries[d], d);
      }
      if (warp_row() < live) attend_stage(s, queries, keys, keys + kKeys * kDim, slot, masked, bad_keys);
    }
  }

  // Adds up a row's sums, of which each of four threads has a part.
  __device__ __forceinline__ void complete(State<kDim>& s) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s.sum[i] += __shfl_xor_sync(kAllLanes, s.sum[i], 1);
      s.sum[i] += __shfl_xor_sync(kAllLanes, s.sum[i], 2);
    }
  }

  // s = the state over a chunk, with complete sums in every thread.
  __device__ __forceinline__ void attend_chunk(State<kDim>& s, int chunk, bool with_queries, int copied) const {
    const int2 slots = slots_of(chunk);
    s.clear();
    attend_slots(s, slots.x, slots.y, with_queries, copied);
    complete(s);
  }

  // Adds the sinks, divides, and writes the result.
  __device__ __forceinline__ void finish(const State<kDim>& s) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row(i) >= live) continue;
      const float factor = Rows::factor(i, s.top[i], s.sum[i]);
      T* result = Rows::result(i);
#pragma unroll
      for (int n = 0; n < kColumns<kDim> / 8; ++n) Rows::store(result, n, s.out[n][2 * i], s.out[n][2 * i + 1], factor);
    }
  }
};

// Row j of a chain lies at its sequence's length + j.
template <typename T, int kDim>
struct ChainTile : Tile<T, kDim> {
  __device__ __forceinline__ ChainTile(const TileRows<T, kDim>& rows, unsigned* bad)
      : Tile<T, kDim>(rows, bad, rows.first_row / rows.group, (rows.first_row + rows.live - 1) / rows.group) {}
};

}  // namespace dflash
