// How attention on tensor cores is cut, and a thread's part of the softmax state, see attention_tile.cuh.
#pragma once
#include "cuda/attention.cuh"

namespace dflash {

constexpr int kRows = 64;  // per tile
constexpr int kKeys = 32;  // per stage

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
// Queries held in registers, times 16 columns: as many as ptxas finds room for. It needs more elsewhere from
// sm_100 on, and for trees.
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

}  // namespace dflash
