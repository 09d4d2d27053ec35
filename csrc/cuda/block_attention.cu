// o_i = sum_j p_ij v_j / (sum_j p_ij + exp(sink - top)),  p_ij = exp(s_ij - top),  s_ij = cap(scale * q_i .
// k_j)
//
// The rows * (num_heads / num_kv_heads) queries that share a kv head are packed into tiles of 64 rows. A
// block of four warps, 16 rows each, reads every K/V byte once for the tile. Slots pass through a ring of
// cp.async stages, 32 at a time: S = Q K^T and O += P V by mma.sync, softmax in registers between them, fp32
// sums.
//
// The cache is cut into chunks at fixed slots: 256 slots each up to 1024, then four per octave (a block reads
// at most an eighth to a quarter of the context). Each chunk computes its own (top, sum, o), and chunks are
// folded one by one in ascending order. Tiles and chunks start at absolute slots, and one without a visible
// key changes no bit of a row. The result therefore does not depend on how the work is split. All scores are
// in units of log2(e).
//
// If there are few tiles, each chunk gets a block. The last block to arrive at the tile's counter folds all
// chunks and resets the counter; a block whose chunk no row sees returns at once. If there are many tiles,
// one block takes all chunks in turn.
//
// float32, and head dimensions that are over 256 or not a multiple of 8, use a plain kernel: one block per
// query, 128 slots at a time, one key per thread.
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace dflash {

constexpr int kRows = 64;  // per tile
constexpr int kKeys = 32;  // per stage
constexpr int kPlainThreads = 128;
constexpr float kLog2E = 1.4426950408889634f;
constexpr int kFirstChunk = 256;
constexpr int kPerOctave = 4;

// The first slot of a chunk, and the chunk of a slot.
static __device__ __forceinline__ int chunk_begin(int chunk) {
  const int octave = chunk / kPerOctave, place = chunk % kPerOctave;
  return octave == 0 ? kFirstChunk * place : (kFirstChunk * (kPerOctave + place)) << (octave - 1);
}
static __device__ __forceinline__ int chunk_of(int slot) {
  const int first = slot / kFirstChunk;
  if (first < kPerOctave) return first;
  const int octave = 31 - __clz(first / kPerOctave);
  return kPerOctave * (octave + 1) + (first >> octave) % kPerOctave;
}

static __device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
static __device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

// The slots that a query sees: [lo, hi), except block slots whose ancestor bit is not set. Both ends rise
// with the row.
struct Sight {
  int lo, hi, length;
  const uint64_t* ancestors;  // [ceil(rows / 64)] or null

  __device__ __forceinline__ bool sees(int slot) const {
    if (slot < lo || slot >= hi) return false;
    if (!ancestors || slot < length) return true;
    return ancestors[(slot - length) / 64] >> ((slot - length) % 64) & 1;
  }
};

// The length, clamped to -rows .. 2 * capacity + rows, so that no sum overflows. A window is at most capacity
// + rows, and what is farther out sees the same slots.
static __device__ __forceinline__ int64_t length_of(const BlockAttentionParams& p, int64_t batch) {
  return max(-p.rows, min(p.lengths[batch], 2 * p.capacity + p.rows));
}

static __device__ __forceinline__ Sight sight_of(const BlockAttentionParams& p, int64_t batch, int64_t length,
                                                 int row) {
  const int64_t valid = max(int64_t(0), min(length + p.rows, p.capacity)), query = length + row;
  int64_t lo = 0, hi = valid;
  if (p.ancestors) {
    const uint64_t* bits =
        reinterpret_cast<const uint64_t*>(p.ancestors) + (batch * p.rows + row) * ((p.rows + 63) / 64);
    return {0, int(hi), int(min(length, valid)), bits};
  }
  if (p.causal) hi = min(hi, query + 1);
  if (p.window) lo = max(lo, query - p.window + 1);
  if (p.window && !p.causal) hi = min(hi, query + p.window);
  return {int(lo), int(hi), int(min(length, valid)), nullptr};
}

// ---- tensor cores

// Each warp owns 16 rows x up to 128 output columns. With 256 columns, two warps share the rows and both
// compute their scores.
template <int kDim>
constexpr int kColumns = kDim > 128 ? 128 : kDim;
template <int kDim>
constexpr int kThreads = kRows / 16 * 32 * (kDim / kColumns<kDim>);
template <int kDim>
constexpr int kPieces = kDim / 8;  // of 16 bytes per row
template <int kDim>
constexpr int kStages = kDim > 128 ? 2 : 4;
template <int kDim>
constexpr int kHeldQueries = kDim > 128  ? 0
                             : kDim > 64 ? 6
                                         : 4;  // times 16 columns, in registers
template <int kDim>
constexpr int kSharedBytes = (kRows + kStages<kDim> * 2 * kKeys) * kDim * 2;

// A thread's part of the state, in mma's layout: rows g = lane / 4 and g + 8, and in every 8 columns the two
// at 2 * (lane % 4).
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
    top[0] = top[1] = minus_infinity(), sum[0] = sum[1] = 0.0f;
  }
};

template <int kDim>
constexpr int kStateVectors = kColumns<kDim> / 8 + 1;  // of 16 bytes per thread in a stored state
template <int kDim>
constexpr int kStateFloats = kStateVectors<kDim> * 4 * kThreads<kDim>;
template <int kDim>
constexpr int kFoldSlots = kSharedBytes<kDim> / (kStateFloats<kDim> * 4);

// Offset of a piece of a row in shared memory, in elements. Eight rows at the same piece use different banks.
template <int kDim>
static __device__ __forceinline__ int place(int row, int piece) {
  return row * kDim + (piece ^ (row % 8)) * 8;
}

template <typename T>
static __device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&word, &pair, 4);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&word, &pair, 4);
  }
  return word;
}

// True if one of two neighbors is infinite or NaN.
template <typename T>
static __device__ __forceinline__ bool not_finite(uint32_t pair) {
  constexpr uint32_t kExponent = std::is_same_v<T, __half> ? 0x7c00u : 0x7f80u;
  return (pair & kExponent) == kExponent || (pair >> 16 & kExponent) == kExponent;
}

// A stored state is [kStateVectors, kThreads<kDim>] vectors of four. Each thread reads only its own.
template <int kDim>
static __device__ __forceinline__ void store_state(float* to, const State<kDim>& s) {
  float4* at = reinterpret_cast<float4*>(to) + threadIdx.x;
#pragma unroll
  for (int n = 0; n < kColumns<kDim> / 8; ++n)
    at[n * kThreads<kDim>] = make_float4(s.out[n][0], s.out[n][1], s.out[n][2], s.out[n][3]);
  at[kColumns<kDim> / 8 * kThreads<kDim>] = make_float4(s.top[0], s.top[1], s.sum[0], s.sum[1]);
}

// s = s + stored, or stored + s, in that order, both rescaled to the larger top. If one side is empty, the
// other keeps its bits.
template <int kDim, bool kStoredFirst>
static __device__ __forceinline__ void fold(State<kDim>& s, const float* stored) {
  const float4* at = reinterpret_cast<const float4*>(stored) + threadIdx.x;
  const float4 last = at[kColumns<kDim> / 8 * kThreads<kDim>];
  const float top[2] = {last.x, last.y}, sum[2] = {last.z, last.w};
  float own[2], other[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float larger = fmaxf(s.top[i], top[i]), base = larger == minus_infinity() ? 0.0f : larger;
    own[i] = exp2_approx(s.top[i] - base), other[i] = exp2_approx(top[i] - base);
    s.top[i] = larger;
  }
  // explicit intrinsics: both orders must round alike
  const auto add = [&](float mine, float its, int i) {
    return kStoredFirst ? __fmaf_rn(its, other[i], __fmul_rn(mine, own[i]))
                        : __fmaf_rn(mine, own[i], __fmul_rn(its, other[i]));
  };
  s.sum[0] = add(s.sum[0], sum[0], 0), s.sum[1] = add(s.sum[1], sum[1], 1);
#pragma unroll
  for (int n = 0; n < kColumns<kDim> / 8; ++n) {
    const float4 v = at[n * kThreads<kDim>];
    s.out[n][0] = add(s.out[n][0], v.x, 0), s.out[n][1] = add(s.out[n][1], v.y, 0);
    s.out[n][2] = add(s.out[n][2], v.z, 1), s.out[n][3] = add(s.out[n][3], v.w, 1);
  }
}

// One tile of rows of one sequence and kv head.
template <typename T, int kDim>
struct Tile {
  const BlockAttentionParams& p;
  T* q_tile;      // [kRows, kDim]
  T* stages;      // [kStages, 2, kKeys, kDim]: K and V
  unsigned* bad;  // [kThreads / 32]: a bit per slot that a warp checks, set if its value row is not finite
  const T *k, *v;
  int group, kv_head, live, first_row;  // packed rows
  int64_t batch;
  int begin, end;        // slots that some row sees
  int all_from, all_to;  // slots that every row sees
  int length;
  float scale, softcap;

  __device__ __forceinline__ int warp() const { return threadIdx.x / 32; }
  __device__ __forceinline__ int lane() const { return threadIdx.x % 32; }
  __device__ __forceinline__ int warp_row() const { return warp() % (kRows / 16) * 16; }
  __device__ __forceinline__ int column() const { return warp() / (kRows / 16) * kColumns<kDim>; }
  __device__ __forceinline__ int row(int i) const { return warp_row() + lane() / 4 + 8 * i; }

  __device__ __forceinline__ Tile(const BlockAttentionParams& p, unsigned* bad, int group, int kv_head,
                                  int64_t batch, int tile)
      : p(p),
        q_tile(shared<T>()),
        stages(q_tile + kRows * kDim),
        bad(bad),
        group(group),
        kv_head(kv_head),
        first_row(tile * kRows),
        batch(batch) {
    live = min(kRows, int(p.rows) * group - first_row);
    const int64_t cache = (batch * p.num_kv_heads + kv_head) * p.capacity;
    k = static_cast<const T*>(p.k_cache) + cache * p.head_dim;
    v = static_cast<const T*>(p.v_cache) + cache * p.v_head_dim;
    length = int(length_of(p, batch));
    const Sight first = sight_of(p, batch, length, first_row / group),
                last = sight_of(p, batch, length, (first_row + live - 1) / group);
    begin = first.lo, end = last.hi;
    all_from = last.lo, all_to = p.ancestors ? first.length : first.hi;
    if (begin >= end) begin = end = 0;
    const bool capped = p.softcap != 0.0f;
    scale = capped ? p.scale / p.softcap : p.scale * kLog2E;
    softcap = capped ? p.softcap * kLog2E : 0.0f;
  }

  using Queries = uint32_t[kHeldQueries<kDim> ? kHeldQueries<kDim> : 1][4];

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
    const int k_left = piece * 8 < k_dim ? end - slot - key : 0,
              v_left = piece * 8 < v_dim ? end - slot - key : 0;
#pragma unroll
    for (int i = 0; i < kKeys; i += kApart) {
      cp_async16_if(to + i * kDim, from_k + i * k_dim, i < k_left);
      cp_async16_if(to + (kKeys + i) * kDim, from_v + i * v_dim, i < v_left);
    }
  }

  // A slot that a row does not see may hold anything, and 0 * NaN is NaN. So value rows that are not finite
  // are zeroed; returns a bit for each of them.
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

  // Loads the warp's queries in mma's layout, from column 16 d. The address of the piece 2 d further on in a
  // row is the address of the first, xor 16 d.
  __device__ __forceinline__ void load_queries(uint32_t (&a)[4], int d) const {
    ldmatrix(a, q_tile + (place<kDim>(warp_row() + lane() % 16, lane() / 16) ^ 16 * d));
  }

  // Adds the slots of a stage to s.
  __device__ __forceinline__ void attend_stage(State<kDim>& s, const Queries& queries, const T* keys,
                                               const T* values, int slot, bool masked,
                                               unsigned bad_keys) const {
    float score[kKeys / 8][4] = {};
    const int k_at = place<kDim>(lane() / 16 * 8 + lane() % 8, lane() / 8 % 2),
              v_at = place<kDim>(lane() % 16, lane() / 16) ^ column();
#pragma unroll
    for (int d = 0; d < kDim / 16; ++d) {
      uint32_t a[4];
      if (d < kHeldQueries<kDim>) {
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
    float top[2] = {s.top[0], s.top[1]};
    // Explicit multiplications, here and below. The compiler could fuse them with a sum in one copy of this
    // code and not in another (masked and unmasked stages, say), and the results would round differently.
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x = __fmul_rn(score[n][e], scale);
        if (softcap != 0.0f) x = __fmul_rn(tanhf(x), softcap);
        score[n][e] = x;
      }
    if (masked) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const Sight sight = sight_of(p, batch, length, (first_row + min(row(i), live - 1)) / group);
#pragma unroll
        for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
          for (int e = 0; e < 2; ++e)
            if (!sight.sees(slot + n * 8 + lane() % 4 * 2 + e)) score[n][2 * i + e] = minus_infinity();
      }
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], score[n][e]);
    float base[2], alpha[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 1));
      top[i] = fmaxf(top[i], __shfl_xor_sync(kAllLanes, top[i], 2));
      base[i] = top[i] == minus_infinity() ? 0.0f : top[i];
      alpha[i] = exp2_approx(s.top[i] - base[i]);
      s.top[i] = top[i];
    }
    if (__any_sync(kAllLanes, alpha[0] != 1.0f || alpha[1] != 1.0f)) {  // rare: few stages raise the top
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        s.sum[i] = __fmul_rn(s.sum[i], alpha[i]);
#pragma unroll
        for (int n = 0; n < kColumns<kDim> / 8; ++n)
          s.out[n][2 * i] *= alpha[i], s.out[n][2 * i + 1] *= alpha[i];
      }
    }
    uint32_t weight[kKeys / 8][2];
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
    if (bad_keys) {  // rare, and never in unmasked stages
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if ((bad_keys >> (n * 8 + lane() % 4 * 2 + e % 2) & 1) && score[n][e] != 0.0f)
            s.sum[e / 2] = not_a_number();
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

  // s = the state over a chunk, with complete sums in every thread. A block copies its queries with its first
  // chunk, after that chunk's first keys.
  __device__ __forceinline__ void attend_chunk(State<kDim>& s, int chunk, bool with_queries) const {
    s.clear();
    const int from = max(chunk_begin(chunk), begin / kKeys * kKeys), to = min(chunk_begin(chunk + 1), end);
    const int tiles = (to - from + kKeys - 1) / kKeys;
    Queries queries;
    __syncthreads();  // all threads have read the previous chunk's stages
#pragma unroll
    for (int i = 0; i < kStages<kDim> - 1; ++i) {
      if (i < tiles) copy_keys(i, from + i * kKeys);
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
      if (kHeldQueries<kDim> && i == 0) {
#pragma unroll
        for (int d = 0; d < kHeldQueries<kDim>; ++d) load_queries(queries[d], d);
      }
      if (warp_row() < live) attend_stage(s, queries, keys, keys + kKeys * kDim, slot, masked, bad_keys);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      s.sum[i] += __shfl_xor_sync(kAllLanes, s.sum[i], 1);
      s.sum[i] += __shfl_xor_sync(kAllLanes, s.sum[i], 2);
    }
  }

  // Adds the sinks, divides, and writes the result.
  __device__ __forceinline__ void store(const State<kDim>& s) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row(i) >= live) continue;
      const int packed = first_row + row(i);
      const int64_t query = packed / group, head = kv_head * group + packed % group;
      float keep = 1.0f, sum = s.sum[i];
      if (p.sinks) {
        const float sink = __fmul_rn(p.sinks[head], kLog2E), top = fmaxf(s.top[i], sink),
                    base = top == minus_infinity() ? 0.0f : top;
        keep = exp2_approx(s.top[i] - base);
        sum = __fmaf_rn(sum, keep, exp2_approx(sink - base));
      }
      const float factor = sum == 0.0f ? 0.0f : keep / sum;
      T* to = static_cast<T*>(p.out) + ((batch * p.rows + query) * p.num_heads + head) * p.v_head_dim;
#pragma unroll
      for (int n = 0; n < kColumns<kDim> / 8; ++n) {
        if (column() + n * 8 >= p.v_head_dim) break;
        const uint32_t pair = pack_pair<T>(s.out[n][2 * i] * factor, s.out[n][2 * i + 1] * factor);
        *reinterpret_cast<uint32_t*>(to + column() + n * 8 + lane() % 4 * 2) = pair;
      }
    }
  }
};

// Grid: (tiles * num_kv_heads * batch, splits). The last chunks start first, because they are the longest.
template <typename T, int kDim>
static __global__ void __launch_bounds__(kThreads<kDim>, 1)
    block_attention_kernel(const BlockAttentionParams p) {
  __shared__ unsigned bad[kThreads<kDim> / 32];
  __shared__ bool arrived_last;
  const int kv_heads = int(p.num_kv_heads), group = int(p.num_heads) / kv_heads;
  const int tiles = (int(p.rows) * group + kRows - 1) / kRows, index = int(blockIdx.x);
  const int tile = index % tiles, sequence_head = index / tiles, split = int(p.splits) - 1 - int(blockIdx.y);
  const int kv_head = sequence_head % kv_heads, sequence = sequence_head / kv_heads;
  grid_launch_dependents();
  grid_dependency_wait();
  const Tile<T, kDim> t(p, bad, group, kv_head, sequence, tile);
  const int first = chunk_of(t.begin), last = t.begin < t.end ? chunk_of(t.end - 1) : first;
  float* stored = p.workspace + index * p.splits * kStateFloats<kDim>;
  State<kDim> s;
  if (p.splits == 1) {
    for (int chunk = first; chunk <= last; ++chunk) {
      t.attend_chunk(s, chunk, chunk == first);
      if (chunk > first) fold<kDim, true>(s, stored);
      if (chunk < last) store_state(stored, s);
    }
    t.store(s);
    return;
  }
  if (split < first || split > last) return;
  t.attend_chunk(s, split, true);
  if (first < last) {
    store_state(stored + split * int64_t(kStateFloats<kDim>), s);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) arrived_last = atomicAdd(p.counters + index, 1u) == unsigned(last - first);
    __syncthreads();
    if (!arrived_last) return;
    __threadfence();
    if (threadIdx.x == 0) p.counters[index] = 0;
    // Each thread reads back its own part of every chunk's state, through the stages' memory.
    constexpr int kSlots = kFoldSlots<kDim>;
    float* slots = reinterpret_cast<float*>(shared<T>());
    const auto fetch = [&](int chunk) {
      const float* from = stored + chunk * int64_t(kStateFloats<kDim>);
      float* to = slots + (chunk - first) % kSlots * kStateFloats<kDim>;
#pragma unroll
      for (int n = 0; n < kStateVectors<kDim>; ++n)
        cp_async16(to + (n * kThreads<kDim> + threadIdx.x) * 4,
                   from + (n * kThreads<kDim> + threadIdx.x) * 4);
    };
    for (int chunk = first; chunk < first + kSlots; ++chunk) {
      if (chunk <= last) fetch(chunk);
      cp_async_commit();
    }
    s.clear();
    for (int chunk = first; chunk <= last; ++chunk) {
      cp_async_wait<kSlots - 1>();
      fold<kDim, false>(s, slots + (chunk - first) % kSlots * kStateFloats<kDim>);
      if (chunk + kSlots <= last) fetch(chunk + kSlots);
      cp_async_commit();
    }
  }
  t.store(s);
}

// ---- the plain kernel

static __device__ __forceinline__ float block_max(float x, float* scratch) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return fmaxf(fmaxf(scratch[0], scratch[1]), fmaxf(scratch[2], scratch[3]));
}

// Grid: (rows * num_heads, batch). Weights of zero are skipped in the sums, so slots that a query does not
// see may hold anything.
template <typename T>
static __global__ void __launch_bounds__(kPlainThreads, 1)
    plain_attention_kernel(const BlockAttentionParams p) {
  __shared__ float weights[kPlainThreads], scratch[2][kPlainThreads / 32];
  float* q = shared<float>();   // [head_dim]
  float* out = q + p.head_dim;  // [v_head_dim]
  const int64_t row = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads, b = blockIdx.y;
  const int64_t kv_head = head / (p.num_heads / p.num_kv_heads);
  grid_launch_dependents();
  grid_dependency_wait();
  const Sight sight = sight_of(p, b, length_of(p, b), int(row));
  const int64_t cache = (b * p.num_kv_heads + kv_head) * p.capacity;
  const T* k = static_cast<const T*>(p.k_cache) + cache * p.head_dim;
  const T* v = static_cast<const T*>(p.v_cache) + cache * p.v_head_dim;
  const T* from =
      static_cast<const T*>(p.q) + b * p.q_stride_batch + row * p.q_stride_row + head * p.q_stride_head;
  const float scale = p.softcap != 0.0f ? p.scale / p.softcap : p.scale;
  for (int64_t i = threadIdx.x; i < p.head_dim; i += kPlainThreads) q[i] = to_float(from[i]) * scale;
  for (int64_t i = threadIdx.x; i < p.v_head_dim; i += kPlainThreads) out[i] = 0.0f;
  __syncthreads();
  float top = minus_infinity(), sum = 0.0f;
  for (int first = sight.lo / kPlainThreads * kPlainThreads; first < sight.hi; first += kPlainThreads) {
    const int slot = first + threadIdx.x;
    float x = minus_infinity();
    if (sight.sees(slot)) {
      const T* key = k + slot * p.head_dim;
      float part[8] = {};
      int64_t i = 0;
      for (; i + 8 <= p.head_dim; i += 8)
#pragma unroll
        for (int j = 0; j < 8; ++j) part[j] += q[i + j] * to_float(key[i + j]);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (i + j < p.head_dim) part[j] += q[i + j] * to_float(key[i + j]);
      x = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
      if (p.softcap != 0.0f) x = tanhf(x) * p.softcap;
    }
    const float larger = fmaxf(top, block_max(x, scratch[0])),
                base = larger == minus_infinity() ? 0.0f : larger;
    const float weight = expf(x - base), alpha = expf(top - base);
    weights[threadIdx.x] = weight;
    sum = sum * alpha + block_sum(weight, scratch[1]);  // also the barrier for the weights
    top = larger;
    const int keys = min(kPlainThreads, sight.hi - first);
    for (int64_t d = threadIdx.x; d < p.v_head_dim; d += kPlainThreads) {
      float part[4] = {};
      for (int i = 0; i < keys; i += 4)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (i + j < keys && weights[i + j] != 0.0f)
            part[j] += weights[i + j] * to_float(v[(first + i + j) * p.v_head_dim + d]);
      out[d] = out[d] * alpha + ((part[0] + part[1]) + (part[2] + part[3]));
    }
    __syncthreads();
  }
  float keep = 1.0f;
  if (p.sinks) {
    const float larger = fmaxf(top, p.sinks[head]), base = larger == minus_infinity() ? 0.0f : larger;
    keep = expf(top - base);
    sum = sum * keep + expf(p.sinks[head] - base);
  }
  const float factor = sum == 0.0f ? 0.0f : keep / sum;
  T* to = static_cast<T*>(p.out) + ((b * p.rows + row) * p.num_heads + head) * p.v_head_dim;
  for (int64_t i = threadIdx.x; i < p.v_head_dim; i += kPlainThreads) to[i] = from_float<T>(out[i] * factor);
}

// ---- launches

static int64_t num_tiles(int64_t rows, int64_t num_heads, int64_t num_kv_heads) {
  return ceil_div(rows * (num_heads / num_kv_heads), kRows);
}

// chunk_of(capacity - 1) + 1, computed on the host.
static int64_t num_chunks(int64_t capacity) {
  const int64_t first = (capacity - 1) / kFirstChunk;
  if (first < kPerOctave) return first + 1;
  int64_t octave = 0;
  while (first / kPerOctave >> (octave + 1)) ++octave;
  return kPerOctave * (octave + 1) + (first >> octave) % kPerOctave + 1;
}

// One split if the tiles alone fill a GPU, else one split per chunk of the capacity.
Workspace block_attention_workspace(DType dtype, const void* k_cache, const void* v_cache, int64_t batch,
                                    int64_t rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                    int64_t v_head_dim, int64_t capacity) {
  const int64_t dim = head_dim > v_head_dim ? head_dim : v_head_dim;
  if (dtype == DType::kFloat32 || head_dim % 8 || v_head_dim % 8 || dim > 256 || !aligned16(k_cache, v_cache))
    return {0, 0};
  const int64_t tiles = num_tiles(rows, num_heads, num_kv_heads) * batch * num_kv_heads;
  const int64_t splits = tiles <= kNumCounters ? num_chunks(capacity) : 1;
  const int64_t floats = dim <= 64 ? kStateFloats<64> : dim <= 128 ? kStateFloats<128> : kStateFloats<256>;
  return {splits, tiles * splits * floats * int64_t(sizeof(float))};
}

template <typename T, int kDim>
static cudaError_t launch_tiles(const BlockAttentionParams& p, cudaStream_t stream) {
  static_assert(kSharedBytes<kDim> <= 99 * 1024 - 64, "more shared memory than every device has");
  static_assert(kFoldSlots<kDim> >= 1, "a stored state fits into the stages");
  const int64_t tiles = num_tiles(p.rows, p.num_heads, p.num_kv_heads);
  return launch_overlapping(block_attention_kernel<T, kDim>,
                            dim3(unsigned(tiles * p.num_kv_heads * p.batch), unsigned(p.splits)),
                            dim3(kThreads<kDim>), kSharedBytes<kDim>, stream, p);
}

cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  if (p.batch * p.rows * p.num_heads * p.v_head_dim == 0) return cudaSuccess;
  const DeviceScope scope(p.device);
  if (scope.error() != cudaSuccess) return scope.error();
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, float>) {
      const int64_t dim = p.head_dim > p.v_head_dim ? p.head_dim : p.v_head_dim;
      if (p.splits)
        return dim <= 64    ? launch_tiles<T, 64>(p, stream)
               : dim <= 128 ? launch_tiles<T, 128>(p, stream)
                            : launch_tiles<T, 256>(p, stream);
    }
    return launch_overlapping(plain_attention_kernel<T>,
                              dim3(unsigned(p.rows * p.num_heads), unsigned(p.batch)), dim3(kPlainThreads),
                              size_t(p.head_dim + p.v_head_dim) * sizeof(float), stream, p);
  });
}

}  // namespace dflash
