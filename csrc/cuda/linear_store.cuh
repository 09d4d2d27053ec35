// What a block of linear.cu does with its sums: bias and norm, the sum with a residual, the gate.
#pragma once
#include "cuda/linear_tile.cuh"

namespace dflash {

constexpr int kSquaresLanes = 16;  // threads that share kSquaresColumns of a row, whatever the shape
constexpr int kSquaresRows = kThreads / kSquaresLanes;

// Writes a thread's two neighbors in a row, of which `left` are in the result.
template <typename T>
static __device__ __forceinline__ void store_two(T* to, float first, float second, int64_t left) {
  if (left >= 2 && reinterpret_cast<uintptr_t>(to) % 4 == 0) {
    *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(first, second);
  } else {
    if (left >= 1) to[0] = from_float<T>(first);
    if (left >= 2) to[1] = from_float<T>(second);
  }
}

// The sum of the kSquaresLanes threads next to each other, in each of them.
static __device__ __forceinline__ float squares_sum(float x) {
#pragma unroll
  for (int step = kSquaresLanes / 2; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

// scales[row] = the norm's factor of each of the block's rows. The order of a sum depends on `in` only.
template <int kRows>
static __device__ __forceinline__ void find_scales(const LinearParams& p, int first_row, float* scales) {
  constexpr int kEach = kRows / kSquaresRows;
  const int64_t tiles = ceil_div(p.in, kSquaresColumns);
  const int lane = threadIdx.x % kSquaresLanes, own = threadIdx.x / kSquaresLanes;
  float squares[kEach] = {};
  for (int64_t tile = lane; tile < tiles; tile += kSquaresLanes) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int64_t row = first_row + own + i * kSquaresRows;
      if (row < p.rows) squares[i] += __ldcg(p.squares + row * tiles + tile);
    }
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float mean = squares_sum(squares[i]) / float(p.in);
    if (lane == 0) scales[own + i * kSquaresRows] = 1.0f / sqrtf(mean + p.eps);
  }
}

// `to` takes the block's first row and feature.
template <typename T, int kRows>
static __device__ __forceinline__ void store_products(const LinearParams& p,
                                                      const Part<T, kRows, false>& part,
                                                      const Sums<kRows>& sum, const float* scales, T* to,
                                                      int64_t stride) {
  using S = Shape<kRows>;
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < S::kWarpFeatures / 8; ++n) {
    const int column = S::warp_feature() + n * 8 + lane % 4 * 2;
    const int64_t feature = part.feature + column, left = part.features - feature;
    float bias[2] = {};
#pragma unroll
    for (int e = 0; e < 2; ++e)
      if (part.bias && e < left) bias[e] = to_float(part.bias[feature + e]);
#pragma unroll
    for (int m = 0; m < S::kWarpRows / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = S::warp_row() + m * 16 + lane / 4 + 8 * half;
        if (part.first_row + row >= p.rows) continue;
        const float* s = sum[m][n] + 2 * half;
        const float scale = p.squares ? scales[row] : 1.0f;
        store_two(to + row * stride + column, fmaf(s[0], scale, bias[0]), fmaf(s[1], scale, bias[1]), left);
      }
  }
}

// The block's rows of p.add and out, from the products in shared memory.
template <typename T, int kRows>
static __device__ __forceinline__ void store_added(const LinearParams& p, const Part<T, kRows, false>& part,
                                                   const T* products, int stride) {
  constexpr int kWidth = kPer16<T>, kAtOnce = kRows > 64 ? 4 : kRows / kSquaresRows;
  static_assert(kSquaresLanes * kWidth == kSquaresColumns, "a thread has one vector of a row");
  const int lane = threadIdx.x % kSquaresLanes;
  const float offset = norm_offset(p.add.zero_centered);
  const int64_t tiles = ceil_div(p.out_features, kSquaresColumns);
  for (int first = 0; first < Shape<kRows>::kFeatures; first += kSquaresColumns) {
    const int64_t column = part.feature + first + lane * kWidth;
    if (part.feature + first >= part.features) break;
    const bool inside = column < part.features;
    float weight[kWidth] = {};
    if (inside) load<T, kWidth>(static_cast<const T*>(p.add.norm_weight) + column, weight);
    for (int begin = threadIdx.x / kSquaresLanes; begin < kRows; begin += kAtOnce * kSquaresRows) {
      uint4 residual[kAtOnce];  // requested before the first is used
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t row = part.first_row + begin + i * kSquaresRows;
        if (inside && row < p.rows)
          residual[i] = load16(static_cast<const T*>(p.add.residual) + row * p.out_features + column);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t row = part.first_row + begin + i * kSquaresRows;
        float v[kWidth] = {}, squares = 0.0f;
        if (inside && row < p.rows) {
          float r[kWidth];
          unpack<T>(residual[i], r);
          load<T, kWidth>(products + (begin + i * kSquaresRows) * stride + first + lane * kWidth, v);
#pragma unroll
          for (int e = 0; e < kWidth; ++e) v[e] += r[e];
          round_to<T, kWidth>(v);
          store<T, kWidth>(static_cast<T*>(p.add.total) + row * p.out_features + column, v);
          if (p.add.tap) store<T, kWidth>(static_cast<T*>(p.add.tap) + row * p.add.tap_stride + column, v);
#pragma unroll
          for (int e = 0; e < kWidth; ++e) squares = fmaf(v[e], v[e], squares), v[e] *= weight[e] + offset;
          store<T, kWidth>(static_cast<T*>(p.out) + row * p.out_features + column, v);
        }
        squares = squares_sum(squares);
        if (lane == 0 && row < p.rows)
          p.add.squares[row * tiles + (part.feature + first) / kSquaresColumns] = squares;
      }
    }
  }
}

template <typename T, int kRows>
static __device__ __forceinline__ void store_gated(const LinearParams& p, const Part<T, kRows, true>& part,
                                                   const Sums<kRows>& sum, const float* scales) {
  using S = Shape<kRows>;
  const int lane = threadIdx.x % 32;
  const auto gated = [](float gate, float up) {
    return silu_mul(to_float(from_float<T>(gate)), to_float(from_float<T>(up)));
  };
#pragma unroll
  for (int n = 0; n < S::kWarpFeatures / 16; ++n) {
    const int64_t feature = part.feature + S::warp_feature() / 2 + n * 8 + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < S::kWarpRows / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = S::warp_row() + m * 16 + lane / 4 + 8 * half;
        const int64_t row = part.first_row + own;
        if (row >= p.rows) continue;
        const float *gate = sum[m][2 * n] + 2 * half, *up = sum[m][2 * n + 1] + 2 * half;
        const float scale = p.squares ? scales[own] : 1.0f;
        store_two(static_cast<T*>(p.out) + row * p.out_features + feature,
                  gated(gate[0] * scale, up[0] * scale), gated(gate[1] * scale, up[1] * scale),
                  part.features - feature);
      }
  }
}

}  // namespace dflash
