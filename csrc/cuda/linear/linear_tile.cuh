// What a block of linear.cu multiplies: its shape, its rows and weights, and the ring of stages that they pass through.
#pragma once
#include "cuda/linear/main_loop.cuh"

namespace dflash {

// The work of a block with up to kRows rows.
template <int kMostRows>
struct Shape {
  static constexpr int kRows = kMostRows;
  static constexpr int kFeatures = kRows > 64 ? 192 : 128;
  static constexpr int kInner = kRows > 64 ? 32 : 64;  // of a stage
  static constexpr int kPieces = kInner / 8;           // of 16 bytes per row of a stage
  static constexpr int kWeights = kFeatures * kInner;  // elements of a stage, which ends with the rows
  static constexpr int kStageElements = kWeights + kRows * kInner;
  static constexpr int kBytes = kStages * kStageElements * 2;
  static constexpr int kSlices = kRows > 16 ? 2 : 1;  // of the inner dimension, one after the other
  // What a warp multiplies.
  static constexpr int kRowWarps = kRows > 32 ? 2 : 1;
  static constexpr int kWarpRows = kRows / kRowWarps, kWarpFeatures = kFeatures * kRowWarps / (kThreads / 32);
  static constexpr int kVectors = kWarpRows / 16 * (kWarpFeatures / 8);  // of four sums of a thread

  static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % kRowWarps * kWarpRows; }
  static __device__ __forceinline__ int warp_feature() { return threadIdx.x / 32 / kRowWarps * kWarpFeatures; }
  // Offset of a piece of a row in a stage, in elements. Eight rows at the same piece use different banks.
  static __device__ __forceinline__ int place(int row, int piece) {
    return row * kInner + (piece ^ (row * kPieces / 8 % kPieces)) * 8;
  }
};

// Sums of a thread in mma's layout: [rows / 16, features / 8].
template <int kRows>
using Sums = float[Shape<kRows>::kWarpRows / 16][Shape<kRows>::kWarpFeatures / 8][4];

// A block's share of the work: kRows rows from first_row, and the features of one weight, or of both if gated, from
// `feature`.
template <typename T, int kRows, bool kGated>
struct Part {
  const T *weight, *bias;
  int64_t feature, features, column;  // column: the weight's first column in the result
  int first_row;

  __device__ __forceinline__ Part(const LinearParams& p, int block)
      : weight(static_cast<const T*>(p.weights[0])),
        bias(static_cast<const T*>(p.biases[0])),
        features(p.features[0]),
        column(0) {
    constexpr int kOwn = kGated ? Shape<kRows>::kFeatures / 2 : Shape<kRows>::kFeatures;
    const int row_blocks = kRows > 64 ? int(ceil_div(p.rows, kRows)) : 1;
    int tile = block / row_blocks;
    first_row = block % row_blocks * kRows;
#pragma unroll
    for (int i = 1; !kGated && i < kMaxLinearWeights; ++i) {
      const int tiles = int(ceil_div(features, kOwn));
      if (i >= p.num_weights || tile < tiles) break;
      tile -= tiles;
      column += features;
      weight = static_cast<const T*>(p.weights[i]);
      bias = static_cast<const T*>(p.biases[i]);
      features = p.features[i];
    }
    feature = int64_t(tile) * kOwn;
  }
};

// A thread copies the same piece of every kApart-th row, from addresses computed once.
template <typename T, int kRows, bool kGated>
struct Stages {
  using S = Shape<kRows>;
  static constexpr int kApart = kThreads / S::kPieces;
  static constexpr int kCopies = S::kFeatures / kApart, kRowCopies = (kRows + kApart - 1) / kApart;

  T* memory;  // [kStages, kFeatures + kRows, kInner]: weights (if gated, 8 of gate, 8 of up, ...), then x
  const T *weight[kCopies], *x[kRowCopies];
  int to;                   // destination of the thread's first piece
  int tiles;                // tiles that have columns at the thread's piece
  int x_tiles[kRowCopies];  // as `tiles`, but 0 past the last row
  uint64_t policy;

  // Past the last feature, its weights are loaded again and the results dropped.
  __device__ __forceinline__ Stages(const LinearParams& p, const Part<T, kRows, kGated>& part, int64_t inner)
      : memory(shared<T>()), policy(evict_first_policy()) {
    const int row = threadIdx.x / S::kPieces, piece = threadIdx.x % S::kPieces;
    const int64_t k = inner + piece * 8;
    to = S::place(row, piece);
    tiles = int((p.in - k + S::kInner - 1) / S::kInner);
    const T* from = part.weight;
    int first = row, apart = kApart;  // features of the thread's rows
    if constexpr (kGated) {
      if (row % 16 >= 8) from = static_cast<const T*>(p.weights[1]);
      first = row / 16 * 8 + row % 8, apart = kApart / 2;
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      weight[i] = from + min(part.feature + first + i * apart, part.features - 1) * p.in + k;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const int64_t own = part.first_row + row + i * kApart;
      const bool there = own < p.rows;
      x[i] = static_cast<const T*>(p.x) + (there ? own : 0) * p.in + k;
      x_tiles[i] = there ? tiles : 0;
    }
  }

  __device__ __forceinline__ T* weights(int stage) const { return memory + stage * S::kStageElements; }
  __device__ __forceinline__ T* rows(int stage) const { return weights(stage) + S::kWeights; }

  __device__ __forceinline__ void copy_weights(int stage, int tile) const {
    T* at = weights(stage) + to;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      cp_async16_hint_if(at + i * kApart * S::kInner, weight[i] + int64_t(tile) * S::kInner, policy, tile < tiles);
  }

  __device__ __forceinline__ void copy_rows(int stage, int tile) const {
    T* at = rows(stage) + to;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i)
      if (kRows % kApart == 0 || threadIdx.x < kRows * S::kPieces)
        cp_async16_if(at + i * kApart * S::kInner, x[i] + int64_t(tile) * S::kInner, tile < x_tiles[i]);
  }
};

}  // namespace dflash
