// out = x weight^T + bias for up to 64 rows and several weights. The time is bound by reading the weights
// once.
//
// A block takes 128 output features of one weight and a slice of the inner dimension, 64 at a time. Weights
// and rows pass through a ring of cp.async stages; the weights are marked evict-first in L2, as nothing reads
// them again before the next step. mma.sync takes the rows, padded to 16, 32 or 64, as its first factor. Each
// of the eight warps has 16 features and every row.
//
// If there are few features, the inner dimension is cut into slices, one block each, and the last block to
// arrive adds up their sums in ascending order. The slices depend only on the weights' shapes, so a row's
// bits depend neither on the other rows nor on their number.
//
// With `prefetch`, from sm_90, the first weights are requested before the previous kernel has ended.
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace dflash {

constexpr int kThreads = 256;
constexpr int kFeatures = 128;
constexpr int kInner = 64;
constexpr int64_t kMaxRows = 64;
constexpr int64_t kBlocks = 256;       // the number of slices aims at about this many blocks
constexpr int64_t kStepsPerSlice = 4;  // minimum; each step is kInner
constexpr int kPieces = kInner / 8;    // of 16 bytes per row of a stage
constexpr int kWeights = kFeatures * kInner;

template <int kRows>
constexpr int kStages = kRows > 16 ? 4 : 5;
template <int kRows>
constexpr int kStageElements = (kFeatures + kRows) * kInner;
template <int kRows>
constexpr int kSharedBytes = kStages<kRows> * kStageElements<kRows> * 2;

// Offset of a piece of a row in a stage, in elements. Eight rows at the same piece use different banks.
static __device__ __forceinline__ int place(int row, int piece) {
  return row * kInner + (piece ^ (row % 8)) * 8;
}

// A block's share of the work: the features of one weight, starting at `feature`.
template <typename T>
struct Part {
  const T *weight, *bias;
  int64_t feature, features, column;  // column: the weight's first column in the result

  __device__ __forceinline__ Part(const LinearParams& p, int tile)
      : weight(static_cast<const T*>(p.weights[0])),
        bias(static_cast<const T*>(p.biases[0])),
        features(p.features[0]),
        column(0) {
#pragma unroll
    for (int i = 1; i < kMaxLinearWeights; ++i) {
      const int tiles = int(ceil_div(features, kFeatures));
      if (i >= p.num_weights || tile < tiles) break;
      tile -= tiles;
      column += features;
      weight = static_cast<const T*>(p.weights[i]);
      bias = static_cast<const T*>(p.biases[i]);
      features = p.features[i];
    }
    feature = int64_t(tile) * kFeatures;
  }
};

// A thread copies the same piece of every kApart-th row, from addresses computed once.
template <typename T, int kRows>
struct Stages {
  static constexpr int kApart = kThreads / kPieces;
  static constexpr int kRowCopies = (kRows + kApart - 1) / kApart;

  T* memory;  // [kStages, kFeatures + kRows, kInner]: weights, then x
  const T *weight[kFeatures / kApart], *x[kRowCopies];
  int to;                   // destination of the thread's first piece
  int tiles;                // tiles that have columns at the thread's piece
  int x_tiles[kRowCopies];  // as `tiles`, but 0 past the last row
  uint64_t policy;

  // Past the last feature, its weights are loaded again and the results dropped.
  __device__ __forceinline__ Stages(const LinearParams& p, const Part<T>& part, int64_t inner)
      : memory(shared<T>()), policy(evict_first_policy()) {
    const int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
    const int64_t k = inner + piece * 8;
    to = place(row, piece);
    tiles = int((p.in - k + kInner - 1) / kInner);
#pragma unroll
    for (int i = 0; i < kFeatures / kApart; ++i)
      weight[i] = part.weight + min(part.feature + row + i * kApart, part.features - 1) * p.in + k;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const bool there = row + i * kApart < p.rows;
      x[i] = static_cast<const T*>(p.x) + (there ? row + i * kApart : 0) * p.in + k;
      x_tiles[i] = there ? tiles : 0;
    }
  }

  __device__ __forceinline__ T* weights(int stage) const { return memory + stage * kStageElements<kRows>; }
  __device__ __forceinline__ T* rows(int stage) const { return weights(stage) + kWeights; }

  __device__ __forceinline__ void copy_weights(int stage, int tile) const {
    T* at = weights(stage) + to;
#pragma unroll
    for (int i = 0; i < kFeatures / kApart; ++i)
      cp_async16_hint_if(at + i * kApart * kInner, weight[i] + int64_t(tile) * kInner, policy, tile < tiles);
  }

  __device__ __forceinline__ void copy_rows(int stage, int tile) const {
    T* at = rows(stage) + to;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i)
      if (kRows % kApart == 0 || threadIdx.x < kRows * kPieces)
        cp_async16_if(at + i * kApart * kInner, x[i] + int64_t(tile) * kInner, tile < x_tiles[i]);
  }
};

// Grid: (tiles of all weights, splits).
template <typename T, int kRows>
static __global__ void __launch_bounds__(kThreads, 1) linear_kernel(const LinearParams p) {
  __shared__ bool arrived_last;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int all_tiles = int(ceil_div(p.in, kInner)), splits = int(p.splits);
  const int per_split = (all_tiles + splits - 1) / splits, first_tile = int(blockIdx.y) * per_split;
  const int tiles = max(0, min(per_split, all_tiles - first_tile));
  const Part<T> part(p, int(blockIdx.x));
  const Stages<T, kRows> stages(p, part, int64_t(first_tile) * kInner);
  constexpr int kAhead = kStages<kRows> - 1;
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

  float sum[kRows / 16][2][4] = {};  // [rows / 16, features / 8] in mma's layout
  // The address of the piece 2 k further on is the address of the first, xor 16 k.
  const int weights_at = place(warp * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
  const int rows_at = place(lane % 16, lane / 16);
  int stage = 0, free_stage = kAhead;
  for (int tile = 0; tile < tiles; ++tile) {
    cp_async_wait<kAhead - 1>();
    __syncthreads();
    if (tile + kAhead < tiles) {
      stages.copy_weights(free_stage, tile + kAhead);
      stages.copy_rows(free_stage, tile + kAhead);
    }
    cp_async_commit();
    const T *weights = stages.weights(stage), *rows = stages.rows(stage);
#pragma unroll
    for (int k = 0; k < kInner / 16; ++k) {
      uint32_t b[4];
      ldmatrix(b, weights + (weights_at ^ 16 * k));
      const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
      for (int m = 0; m < kRows / 16; ++m) {
        uint32_t a[4];
        ldmatrix(a, rows + m * 16 * kInner + (rows_at ^ 16 * k));
        mma_m16n8k16(sum[m][0], a, left, T());
        mma_m16n8k16(sum[m][1], a, right, T());
      }
    }
    free_stage = stage;
    stage = stage + 1 == kStages<kRows> ? 0 : stage + 1;
  }

  if (p.splits > 1) {  // [tiles, splits, rows / 16, 2, kThreads] vectors of four
    constexpr int kVectors = kRows / 16 * 2;
    float4* stored =
        reinterpret_cast<float4*>(p.workspace) + blockIdx.x * p.splits * kVectors * kThreads + threadIdx.x;
    float4* own = stored + blockIdx.y * int64_t(kVectors) * kThreads;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const float (&s)[4] = sum[i / 2][i % 2];
      own[i * kThreads] = make_float4(s[0], s[1], s[2], s[3]);
    }
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) arrived_last = atomicAdd(p.counters + blockIdx.x, 1u) == unsigned(p.splits) - 1;
    __syncthreads();
    if (!arrived_last) return;
    __threadfence();
    if (threadIdx.x == 0) p.counters[blockIdx.x] = 0;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      float (&s)[4] = sum[i / 2][i % 2];
      s[0] = s[1] = s[2] = s[3] = 0.0f;
#pragma unroll 4
      for (int64_t split = 0; split < p.splits; ++split) {
        const float4 v = __ldcg(stored + (split * kVectors + i) * kThreads);
        s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
      }
    }
  }

#pragma unroll
  for (int m = 0; m < kRows / 16; ++m)
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int64_t row = m * 16 + lane / 4 + 8 * half;
        const int64_t feature = part.feature + warp * 16 + n * 8 + lane % 4 * 2;
        if (row >= p.rows) continue;
        T* to = static_cast<T*>(p.out) + row * p.out_features + part.column + feature;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          if (feature + e >= part.features) continue;
          const float bias = part.bias ? to_float(part.bias[feature + e]) : 0.0f;
          to[e] = from_float<T>(sum[m][n][2 * half + e] + bias);
        }
      }
}

static int64_t num_tiles(const int64_t* features, int num_weights) {
  int64_t tiles = 0;
  for (int i = 0; i < num_weights; ++i) tiles += ceil_div(features[i], kFeatures);
  return tiles;
}

// No slice is empty, and there are about 256 blocks in total.
static int64_t num_slices(int64_t tiles, int64_t in) {
  const int64_t steps = ceil_div(in, kInner);
  const int64_t wanted = max(int64_t(1), min(kBlocks / tiles, steps / kStepsPerSlice));
  return ceil_div(steps, ceil_div(steps, wanted));
}

Workspace linear_workspace(DType dtype, int64_t rows, int64_t in, int num_weights, const void* const* weights,
                           const int64_t* features) {
  bool takes = dtype != DType::kFloat32 && 0 < rows && rows <= kMaxRows && in > 0 && in % 8 == 0;
  for (int i = 0; i < num_weights; ++i) takes &= aligned16(weights[i]);
  const int64_t tiles = num_tiles(features, num_weights);
  if (!takes || tiles == 0) return {0, 0};
  const int64_t slices = num_slices(tiles, in), padded = rows <= 16 ? 16 : rows <= 32 ? 32 : kMaxRows;
  static_assert(kBlocks / 2 <= kNumCounters, "one counter per tile where there are slices");
  return {slices, slices > 1 ? tiles * slices * kFeatures * padded * int64_t(sizeof(float)) : 0};
}

template <typename T, int kRows>
static cudaError_t launch_rows(const LinearParams& p, cudaStream_t stream) {
  static_assert(kSharedBytes<kRows> <= 99 * 1024 - 64, "more shared memory than every device has");
  const int64_t tiles = num_tiles(p.features, p.num_weights);
  return launch_overlapping(linear_kernel<T, kRows>, dim3(unsigned(tiles), unsigned(p.splits)),
                            dim3(kThreads), kSharedBytes<kRows>, stream, p);
}

cudaError_t launch_linear(const LinearParams& p, cudaStream_t stream) {
  if (p.rows * p.out_features == 0) return cudaSuccess;
  const DeviceScope scope(p.device);
  if (scope.error() != cudaSuccess) return scope.error();
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, float>) {
      if (p.rows <= 16) return launch_rows<T, 16>(p, stream);
      if (p.rows <= 32) return launch_rows<T, 32>(p, stream);
      if (p.rows <= kMaxRows) return launch_rows<T, kMaxRows>(p, stream);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace dflash
