// How attention on tensor cores is cut, a thread's rows, and its part of the softmax state, see attention_tile.cuh.
#pragma once
#include "cuda/attention/attention.cuh"

namespace dflash {

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
constexpr int kHeldOf128 = 5;
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

template <int kDim>
constexpr int kStateVectors = kColumns<kDim> / 8 + 1;  // of 16 bytes per thread in a stored state
template <int kDim>
constexpr int kStateFloats = kStateVectors<kDim> * 4 * kThreads<kDim>;

// Offset of a piece of a row in shared memory, in elements. Eight rows at the same piece use different banks.
template <int kDim>
static __device__ __forceinline__ int place(int row, int piece) {
  return row * kDim + (piece ^ (row % 8)) * 8;
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

// s = stored + s
template <int kDim>
static __device__ __forceinline__ void fold(State<kDim>& s, const float* stored) {
  const float4* at = reinterpret_cast<const float4*>(stored) + threadIdx.x;
  const float4 sums = at[kColumns<kDim> / 8 * kThreads<kDim>];  // tops, sums
  const Fold add[2] = {{sums.x, s.top[0]}, {sums.y, s.top[1]}};
  s.top[0] = add[0].top, s.top[1] = add[1].top;
  s.sum[0] = add[0](sums.z, s.sum[0]), s.sum[1] = add[1](sums.w, s.sum[1]);
#pragma unroll
  for (int n = 0; n < kColumns<kDim> / 8; ++n) {
    const float4 v = at[n * kThreads<kDim>];
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

}  // namespace dflash
