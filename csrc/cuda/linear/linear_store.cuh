// What a block of linear.cu does with its sums: the bias, the gate.
#pragma once
#include "cuda/linear/linear_tile.cuh"

namespace dflash {

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

template <typename T, int kRows>
static __device__ __forceinline__ void store_products(const LinearParams& p,
                                                      const Part<T, kRows, false>& part,
                                                      const Sums<kRows>& sum) {
  using S = Shape<kRows>;
  T* to = static_cast<T*>(p.out) + part.first_row * p.out_features + part.column + part.feature;
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
        store_two(to + row * p.out_features + column, s[0] + bias[0], s[1] + bias[1], left);
      }
  }
}

template <typename T, int kRows>
static __device__ __forceinline__ void store_gated(const LinearParams& p, const Part<T, kRows, true>& part,
                                                   const Sums<kRows>& sum) {
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
        const int64_t row = part.first_row + S::warp_row() + m * 16 + lane / 4 + 8 * half;
        if (row >= p.rows) continue;
        const float *gate = sum[m][2 * n] + 2 * half, *up = sum[m][2 * n + 1] + 2 * half;
        store_two(static_cast<T*>(p.out) + row * p.out_features + feature, gated(gate[0], up[0]),
                  gated(gate[1], up[1]), part.features - feature);
      }
  }
}

}  // namespace dflash
