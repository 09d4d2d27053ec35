// The main loop of products, for linear.cu and experts.cu: a ring of cp.async stages, and mma.sync of what is in them.
#pragma once
#include "cuda/base/device.cuh"

namespace dflash {

constexpr int kThreads = 256;
constexpr int kStages = 4;  // with 16 rows, three blocks fit on an SM: one of the next product next to two
constexpr int kAhead = kStages - 1;

// How threads copy and read the stages of a packed format: what each lane copies, and its share of a factor of mma.
template <Format, int kInner = 64>
struct PackedStage;

// sums [kRows / 16][kFeatures / 8] of a thread, in mma's layout, += the products of `tiles` stages of kInner columns,
// of which the first kAhead were copied and committed. copy(stage, tile) starts the copies of a tile; rows(to, stage,
// m, k), and what weights(stage) returns as (to, n, k), load 16 x 16 elements at the columns 16 k; before(tile) is
// called ahead of a tile's products. A sum takes its products in ascending order.
template <typename T, int kInner, int kM, int kN, typename Copy, typename Before, typename Rows, typename Weights>
static __device__ __forceinline__ void multiply_tiles(float (&sum)[kM][kN][4], int tiles, const Copy& copy,
                                                      const Before& before, const Rows& rows, const Weights& weights) {
  int stage = 0, free_stage = kAhead;
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<kAhead - 1>();
    __syncthreads();
    if (tile + kAhead < tiles) copy(free_stage, tile + kAhead);
    cp_async_commit();
    before(tile);
    auto factor = weights(stage);
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) {
      uint32_t a[kM][4];
#pragma unroll
      for (int m = 0; m < kM; ++m) rows(a[m], stage, m, k);
#pragma unroll
      for (int n = 0; n < kN / 2; ++n) {
        uint32_t b[4];
        factor(b, n, k);
        const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          mma_m16n8k16(sum[m][2 * n], a[m], left, T());
          mma_m16n8k16(sum[m][2 * n + 1], a[m], right, T());
        }
      }
    }
    free_stage = stage;
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
}

}  // namespace dflash
