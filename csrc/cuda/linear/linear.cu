// out = x weight^T + bias for up to 256 rows and several weights. The time is bound by reading the weights once.
//
// A block takes 128 output features of one weight and a slice of the inner dimension, 64 at a time. Weights and rows
// pass through a ring of cp.async stages; the weights are marked evict-first in L2, as nothing reads them again before
// the next step. mma.sync takes the rows, padded to 16, 32 or 64, as its first factor. Up to 32 rows each of the eight
// warps has 16 features and every row; with more, warps share rows and features, so that less of both is read from
// shared memory.
//
// More than 64 rows come in blocks of 128, with 256 features each: every block reads all of its rows, and with fewer
// features these would be more bytes than the weights. Blocks with the same weights lie side by side.
//
// If there are few features, the inner dimension is cut into slices, one block each, and the last block to arrive adds
// up their sums in ascending order. The slices depend only on the weights' shapes, and a sum takes its products in
// ascending order, so a row's bits depend neither on the other rows nor on their number.
//
// If gated, the weights are gate and up: of 16 features in a row, eight are of one and the same eight of the other. A
// thread then holds both products of an output, and stores silu(gate) * up.
//
// With `prefetch`, from sm_90, the first weights are requested before the previous kernel has ended.
#include "cuda/linear/linear_tile.cuh"

namespace dflash {

constexpr int64_t kTile = 128;         // the features that slices are counted by
constexpr int64_t kBlocks = 256;       // the number of slices aims at about this many blocks
constexpr int64_t kSteps = 64;         // of the inner dimension: slices are multiples
constexpr int64_t kStepsPerSlice = 4;  // minimum

// sum = the sums of all slices, each of which a block has stored, in ascending order.
template <int kVectors, typename S>
static __device__ __forceinline__ void add_slices(S& sum, const float4* stored, int splits) {
  constexpr int kAtOnce = 8;  // requested before the first is used
  constexpr int kColumns = int(sizeof(sum[0]) / sizeof(sum[0][0]));
#pragma unroll
  for (int i = 0; i < kVectors; ++i) {
    float (&s)[4] = sum[i / kColumns][i % kColumns];
    s[0] = s[1] = s[2] = s[3] = 0.0f;
    const float4* at = stored + i * kThreads;
    for (int left = splits; left > 0; left -= kAtOnce, at += kAtOnce * kVectors * kThreads) {
      float4 slice[kAtOnce];
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (j < left) slice[j] = __ldcg(at + j * kVectors * kThreads);
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j)
        if (j < left) s[0] += slice[j].x, s[1] += slice[j].y, s[2] += slice[j].z, s[3] += slice[j].w;
    }
  }
}

// ---- the results

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
static __device__ __forceinline__ void store_products(const LinearParams& p, const Part<T, kRows, false>& part,
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
        store_two(static_cast<T*>(p.out) + row * p.out_features + feature, gated(gate[0], up[0]), gated(gate[1], up[1]),
                  part.features - feature);
      }
  }
}

// Grid: (tiles of all weights * blocks of rows, splits).
template <typename T, int kRows, bool kGated>
static __global__ void __launch_bounds__(kThreads, 1) linear_kernel(const LinearParams p) {
  using S = Shape<kRows>;
  __shared__ bool arrived_last;
  const int lane = threadIdx.x % 32, splits = int(p.splits);
  const int steps = int(ceil_div(p.in, kSteps)), per_split = (steps + splits - 1) / splits;
  const int64_t inner = int64_t(blockIdx.y) * per_split * kSteps;
  const int tiles = int(max(int64_t(0), ceil_div(min(per_split * kSteps, p.in - inner), S::kInner)));
  const Part<T, kRows, kGated> part(p, int(blockIdx.x));
  const Stages<T, kRows, kGated> stages(p, part, inner);
  if (p.prefetch)
    for (int i = 0; i < kAhead && i < tiles; ++i) stages.copy_weights(i, i);
  grid_launch_dependents();
  grid_dependency_wait();
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < tiles) {
      if (!p.prefetch) stages.copy_weights(i, i);
      stages.copy_rows(i, i);
    }
    cp_async_commit();
  }

  Sums<kRows> sum = {};
  // The address of the piece 2 k further on is the address of the first, xor 16 k.
  const int weights_at = S::place(S::warp_feature() + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const int rows_at = S::place(S::warp_row() + lane % 16, lane / 16);
  const auto copy = [&](int stage, int tile) {
    stages.copy_weights(stage, tile);
    stages.copy_rows(stage, tile);
  };
  multiply_tiles<T, S::kInner>(
      sum, tiles, copy,
      [&](uint32_t (&to)[4], int stage, int m, int k) {
        ldmatrix(to, stages.rows(stage) + m * 16 * S::kInner + (rows_at ^ 16 * k));
      },
      [&](uint32_t (&to)[4], int stage, int n, int k) {
        ldmatrix(to, stages.weights(stage) + n * 16 * S::kInner + (weights_at ^ 16 * k));
      });

  if (splits > 1) {  // [blocks, splits, kVectors, kThreads] vectors of four
    float4* stored =
        reinterpret_cast<float4*>(p.workspace) + blockIdx.x * p.splits * S::kVectors * kThreads + threadIdx.x;
    float4* own = stored + blockIdx.y * int64_t(S::kVectors) * kThreads;
#pragma unroll
    for (int i = 0; i < S::kVectors; ++i) {
      constexpr int kColumns = S::kWarpFeatures / 8;
      const float (&s)[4] = sum[i / kColumns][i % kColumns];
      own[i * kThreads] = make_float4(s[0], s[1], s[2], s[3]);
    }
    __syncthreads();
    const unsigned last = unsigned(splits) - 1;
    if (threadIdx.x == 0) arrived_last = count_up(p.counters + blockIdx.x, last) == last;
    __syncthreads();
    if (!arrived_last) return;
    add_slices<S::kVectors>(sum, stored, splits);
  }
  if constexpr (kGated) {
    store_gated<T, kRows>(p, part, sum);
  } else {
    store_products<T, kRows>(p, part, sum);
  }
}

// The tiles of all weights, with as many features each; if gated, half of them are gate's.
static int64_t num_tiles(const int64_t* features, int num_weights, bool gated, int64_t tile) {
  if (gated) return ceil_div(features[0], tile / 2);
  int64_t tiles = 0;
  for (int i = 0; i < num_weights; ++i) tiles += ceil_div(features[i], tile);
  return tiles;
}

// No slice is empty, and there are about 256 blocks in total up to 64 rows.
static int64_t num_slices(int64_t tiles, int64_t in) {
  const int64_t steps = ceil_div(in, kSteps);
  const int64_t wanted = max(int64_t(1), min(kBlocks / tiles, steps / kStepsPerSlice));
  return ceil_div(steps, ceil_div(steps, wanted));
}

// Calls f(Shape) with the one for these rows.
template <typename F>
static auto with_shape(int64_t rows, F&& f) {
  return rows <= 16 ? f(Shape<16>()) : rows <= 32 ? f(Shape<32>()) : rows <= 64 ? f(Shape<64>()) : f(Shape<128>());
}

// Of all slices together; a slice has so many blocks.
template <typename S>
static int64_t num_blocks(S, int64_t rows, const int64_t* features, int num_weights, bool gated) {
  return num_tiles(features, num_weights, gated, S::kFeatures) * ceil_div(rows, S::kRows);
}

Workspace linear_workspace(DType dtype, int64_t rows, int64_t in, int num_weights, const void* const* weights,
                           const int64_t* features, bool gated) {
  bool takes = dtype != DType::kFloat32 && 0 < rows && rows <= kMaxLinearRows && in > 0 && in % 8 == 0;
  for (int i = 0; i < num_weights; ++i) takes &= aligned16(weights[i]);
  const int64_t tiles = num_tiles(features, num_weights, gated, kTile);
  if (!takes || tiles == 0) return {0, 0};
  const int64_t slices = num_slices(tiles, in);
  // At most as many blocks as tiles, and one more per weight if a tile is twice as large and taken twice.
  static_assert(kBlocks / 2 + kMaxLinearWeights <= kNumCounters, "one counter per block of a slice");
  return with_shape(rows, [&](auto shape) -> Workspace {
    using S = decltype(shape);
    const int64_t blocks = num_blocks(shape, rows, features, num_weights, gated);
    const int64_t floats = S::kFeatures * S::kRows;
    return {slices, slices > 1 ? blocks * slices * floats * int64_t(sizeof(float)) : 0};
  });
}

template <typename T, int kRows>
static cudaError_t launch_rows(const LinearParams& p, cudaStream_t stream) {
  using S = Shape<kRows>;
  static_assert(S::kBytes <= 99 * 1024 - 64, "more shared memory than every device has");
  const int64_t blocks = num_blocks(S(), p.rows, p.features, p.num_weights, p.gated);
  return launch_overlapping(p.gated ? linear_kernel<T, kRows, true> : linear_kernel<T, kRows, false>,
                            dim3(unsigned(blocks), unsigned(p.splits)), dim3(kThreads), S::kBytes, stream, p);
}

cudaError_t launch_linear(const LinearParams& p, cudaStream_t stream) {
  if (p.rows > kMaxLinearRows) return cudaErrorInvalidValue;
  return run_on_device(p, p.rows * p.out_features, [&](auto type) {
    using T = decltype(type);
    if constexpr (std::is_same_v<T, float>)
      return cudaErrorInvalidValue;
    else
      return with_shape(p.rows, [&](auto shape) { return launch_rows<T, decltype(shape)::kRows>(p, stream); });
  });
}

}  // namespace dflash
