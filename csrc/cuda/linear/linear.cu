// out = x weight^T + bias for some rows and several weights. The time is bound by reading the weights once.
//
// A block takes 128 output features of one weight and a slice of the inner dimension, 64 at a time. Weights and rows
// pass through a ring of cp.async stages; the weights are marked evict-first in L2, as nothing reads them again before
// the next step. mma.sync takes the rows, padded to 16, 32 or 64, as its first factor. Up to 32 rows each of the eight
// warps has 16 features and every row; with more, warps share rows and features, so that less of both is read from
// shared memory.
//
// More than 64 rows come in blocks of 128, with 192 features each: every block reads all of its rows, and with fewer
// features these would be more bytes than the weights. Blocks with the same weights lie side by side. If weights are
// packed, blocks have 64 rows: their factors take registers. Of these any number of rows comes, 256 in a pass.
//
// If there are few features, the inner dimension is cut into slices. Up to 16 rows each has a block of its own: three
// fit on an SM, so that there is an even share of the weights for every SM, also while the blocks of two kernels
// overlap. With more rows a block takes a pair of slices in turn. The last block to arrive adds up the sums of the
// pairs in ascending order. The slices depend only on the weights' shapes, and a sum takes its products in ascending
// order, so a row's bits depend neither on the other rows nor on their number.
//
// Packed weights are read as they are stored. Slices and sums are those of dense weights. With few rows a stage has 128
// columns of 4 bits: waiting and addresses then cost half as many instructions per weight.
//
// If gated, the weights are gate and up: of 16 features in a row, eight are of one and the same eight of the other. A
// thread then holds both products of an output, and stores silu(gate) * up.
//
// With `prefetch`, from sm_90, the first weights are requested before the previous kernel has ended.
#include "cuda/linear/groups.cuh"

namespace dflash {

// ---- what a block multiplies: its shape, its rows and weights, and the ring of stages that they pass through

// The work of a block with up to kRows rows, in stages of kInner columns.
template <int kMostRows, int kColumns = (kMostRows > 64 ? 32 : 64)>
struct Shape {
  static constexpr int kRows = kMostRows;
  static constexpr int kFeatures = kRows > 64 ? 192 : 128;
  static constexpr int kInner = kColumns;
  static constexpr int kPieces = kInner / 8;          // of 16 bytes per row of a stage
  static constexpr int kSlices = kRows > 16 ? 2 : 1;  // of the inner dimension, one after the other
  // What a warp multiplies.
  static constexpr int kRowWarps = kRows > 32 ? 2 : 1;
  static constexpr int kWarpRows = kRows / kRowWarps, kWarpFeatures = kFeatures * kRowWarps / (kThreads / 32);
  static constexpr int kVectors = kWarpRows / 16 * (kWarpFeatures / 8);  // of four sums of a thread

  static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 % kRowWarps * kWarpRows; }
  static __device__ __forceinline__ int warp_feature() { return threadIdx.x / 32 / kRowWarps * kWarpFeatures; }
  // Offset of a piece of a row in a stage, in elements. Eight rows at the same piece use different banks.
  static __device__ __forceinline__ int place(int row, int piece) {
    return row * kInner + (piece ^ (kPieces > 8 ? row % 8 : row * kPieces / 8 % kPieces)) * 8;
  }
};

constexpr bool has_nibbles(Format format) { return has_groups(format) && bits_of_groups(format) == 4; }

template <Format kFormat, int kRows>
using ShapeOf = std::conditional_t<has_nibbles(kFormat) && kRows <= 16, Shape<kRows, 128>, Shape<kRows>>;

// Sums of a thread in mma's layout: [rows / 16, features / 8].
template <int kRows>
using Sums = float[Shape<kRows>::kWarpRows / 16][Shape<kRows>::kWarpFeatures / 8][4];

// A block's share of the work: kRows rows from first_row, and the features of one weight, or of both if gated, from
// `feature`.
template <typename T, int kRows, bool kGated>
struct Part {
  const void* weight;
  const T* bias;
  const float* scales;
  int64_t feature, features, column;  // column: the weight's first column in the result
  int first_row;

  __device__ __forceinline__ Part(const LinearParams& p, int block)
      : weight(p.weights[0]),
        bias(static_cast<const T*>(p.biases[0])),
        scales(p.scales[0]),
        features(p.features[0]),
        column(0) {
    constexpr int kOwn = kGated ? Shape<kRows>::kFeatures / 2 : Shape<kRows>::kFeatures;
    const int row_blocks = kRows >= 64 ? int(ceil_div(p.rows, kRows)) : 1;
    int tile = block / row_blocks;
    first_row = block % row_blocks * kRows;
#pragma unroll
    for (int i = 1; !kGated && i < kMaxLinearWeights; ++i) {
      const int tiles = int(ceil_div(features, kOwn));
      if (i >= p.num_weights || tile < tiles) break;
      tile -= tiles;
      column += features;
      weight = p.weights[i];
      bias = static_cast<const T*>(p.biases[i]);
      scales = p.scales[i];
      features = p.features[i];
    }
    feature = int64_t(tile) * kOwn;
  }
};

// A block's weights of a format, in stages of S::kInner columns from `inner` to `end`. If gated, gate and up by eights.
template <Format kFormat, typename T, int kRows, bool kGated>
struct Weights : PackedStage<kFormat, ShapeOf<kFormat, kRows>::kInner> {
  using S = ShapeOf<kFormat, kRows>;
  using Stage = PackedStage<kFormat, S::kInner>;
  static constexpr int kTiles = S::kWarpFeatures / 8;
  static constexpr int kElements = S::kFeatures / 8 * Stage::kTileBytes / 2;  // of T, in a stage

  __device__ __forceinline__ Weights(const LinearParams& p, const Part<T, kRows, kGated>& part, int64_t inner,
                                     int64_t end) {
    const int first = threadIdx.x / 32 * 16;  // of a warp's own features
#pragma unroll
    for (int i = 0; i < 2; ++i)
      this->set(i, p.format, kGated ? p.weights[i] : part.weight, part.feature + (kGated ? first / 2 : first + 8 * i),
                part.features, p.in, inner, end);
  }
  __device__ __forceinline__ auto factor(const T* stage) const {
    using Factor = typename Stage::template Factor<T, kTiles>;
    return Factor(*this, stage + S::warp_feature() / 8 * (Stage::kTileBytes / 2));
  }
};

// A thread copies the same piece of every kApart-th row, from addresses computed once.
template <typename T, int kRows, bool kGated>
struct Weights<Format::kDense, T, kRows, kGated> {
  using S = Shape<kRows>;
  static constexpr int kElements = S::kFeatures * S::kInner;
  static constexpr int kApart = kThreads / S::kPieces, kCopies = S::kFeatures / kApart;

  const T* weight[kCopies];
  int to;     // destination of the thread's first piece
  int tiles;  // tiles that have columns at the thread's piece
  int own;    // where the warp's first features are

  // Past the last feature, its weights are loaded again and the results dropped.
  __device__ __forceinline__ Weights(const LinearParams& p, const Part<T, kRows, kGated>& part, int64_t inner,
                                     int64_t) {
    const int row = threadIdx.x / S::kPieces, piece = threadIdx.x % S::kPieces, lane = threadIdx.x % 32;
    const int64_t k = inner + piece * 8;
    to = S::place(row, piece);
    tiles = int((p.in - k + S::kInner - 1) / S::kInner);
    own = S::place(S::warp_feature() + lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const void* from = part.weight;
    int first = row, apart = kApart;  // features of the thread's rows
    if constexpr (kGated) {
      if (row % 16 >= 8) from = p.weights[1];
      first = row / 16 * 8 + row % 8, apart = kApart / 2;
    }
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      weight[i] = static_cast<const T*>(from) + min(part.feature + first + i * apart, part.features - 1) * p.in + k;
  }
  __device__ __forceinline__ void copy(T* stage, int tile, uint64_t policy) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      cp_async16_hint_if(stage + to + i * kApart * S::kInner, weight[i] + int64_t(tile) * S::kInner, policy,
                         tile < tiles);
  }
  // The address of the piece 2 k further on is the address of the first, xor 16 k.
  __device__ __forceinline__ auto factor(const T* stage) const {
    return [stage, at = own](uint32_t (&to)[4], int n, int k) {
      ldmatrix(to, stage + n * 16 * S::kInner + (at ^ 16 * k));
    };
  }
};

// The ring of stages, each with weights and then rows. A thread copies the same piece of every kApart-th row.
template <Format kFormat, typename T, int kRows, bool kGated>
struct Stages {
  using S = ShapeOf<kFormat, kRows>;
  using W = Weights<kFormat, T, kRows, kGated>;
  static constexpr int kApart = kThreads / S::kPieces, kCopies = (kRows + kApart - 1) / kApart;
  static constexpr int kElements = W::kElements + kRows * S::kInner, kBytes = kStages * kElements * 2;

  T* memory;  // [kStages, kElements]
  W weights;
  const T* x[kCopies];
  int to;
  int tiles[kCopies];  // tiles that have columns at the thread's piece, 0 past the last row
  uint64_t policy;

  __device__ __forceinline__ Stages(const LinearParams& p, const Part<T, kRows, kGated>& part, int64_t inner,
                                    int64_t end)
      : memory(shared<T>()), weights(p, part, inner, end), policy(evict_first_policy()) {
    const int row = threadIdx.x / S::kPieces, piece = threadIdx.x % S::kPieces;
    const int64_t k = inner + piece * 8;
    to = S::place(row, piece);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int64_t own = part.first_row + row + i * kApart;
      const bool there = own < p.rows;
      x[i] = static_cast<const T*>(p.x) + (there ? own : 0) * p.in + k;
      tiles[i] = there ? int((end - k + S::kInner - 1) / S::kInner) : 0;
    }
  }

  __device__ __forceinline__ T* stage(int index) const { return memory + index * kElements; }
  __device__ __forceinline__ T* rows(int index) const { return stage(index) + W::kElements; }

  __device__ __forceinline__ void copy_weights(int index, int tile) const { weights.copy(stage(index), tile, policy); }
  __device__ __forceinline__ void copy_rows(int index, int tile) const {
    T* at = rows(index) + to;
#pragma unroll
    for (int i = 0; i < kCopies; ++i)
      if (kRows % kApart == 0 || threadIdx.x < kRows * S::kPieces)
        cp_async16_if(at + i * kApart * S::kInner, x[i] + int64_t(tile) * S::kInner, tile < tiles[i]);
  }
};

// ---- slices of the inner dimension, and their sums

constexpr int64_t kTile = 128;         // the features that slices are counted by
constexpr int64_t kBlocks = 384;       // the number of slices aims at about this many blocks of up to 16 rows
constexpr int64_t kSteps = 64;         // of the inner dimension: slices are multiples
constexpr int64_t kStepsPerSlice = 4;  // minimum

static __device__ __forceinline__ void add(float (&s)[4], const float4& v) {
  s[0] += v.x, s[1] += v.y, s[2] += v.z, s[3] += v.w;
}

// Calls f(four sums of a thread, where they are stored behind a thread's first).
template <int kRows, typename F>
static __device__ __forceinline__ void for_each_vector(Sums<kRows>& sum, const F& f) {
  constexpr int kColumns = Shape<kRows>::kWarpFeatures / 8;
#pragma unroll
  for (int i = 0; i < Shape<kRows>::kVectors; ++i) f(sum[i / kColumns][i % kColumns], i * kThreads);
}

template <int kRows>
static __device__ __forceinline__ void store_sums(float4* to, Sums<kRows>& sum) {
  for_each_vector<kRows>(sum, [&](const float (&s)[4], int at) { to[at] = make_float4(s[0], s[1], s[2], s[3]); });
}

// sum = the sums that `count` blocks have stored, pair by pair in ascending order. A block with one slice has stored
// half of a pair. All vectors of some blocks are requested before the first is used: a thread waits for memory once per
// kAtOnce blocks, not once per vector.
template <int kRows>
static __device__ __forceinline__ void add_stored(Sums<kRows>& sum, const float4* stored, int count) {
  constexpr int kVectors = Shape<kRows>::kVectors;
  constexpr int kPair = 2 / Shape<kRows>::kSlices;         // what blocks have stored of a pair
  constexpr int kAtOnce = (12 + kVectors - 1) / kVectors;  // whole pairs; with 16 rows, 80 registers are left
  for_each_vector<kRows>(sum, [](float (&s)[4], int) { s[0] = s[1] = s[2] = s[3] = 0.0f; });
  for (int left = count; left > 0; left -= kAtOnce, stored += kAtOnce * kVectors * kThreads) {
    float4 part[kAtOnce][kVectors];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
#pragma unroll
      for (int i = 0; i < kVectors; ++i)
        if (j < left) part[j][i] = __ldcg(stored + (j * kVectors + i) * kThreads);
#pragma unroll
    for (int j = 0; j < kAtOnce; j += kPair) {
      if (j >= left) continue;
      for_each_vector<kRows>(sum, [&](float (&s)[4], int at) {
        const float4 first = part[j][at / kThreads];
        float pair[4] = {first.x, first.y, first.z, first.w};
        if (kPair == 2 && j + 1 < left) add(pair, part[j + kPair - 1][at / kThreads]);
        add(s, make_float4(pair[0], pair[1], pair[2], pair[3]));
      });
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

// If gated, the sums of eight features of gate are next to those of up.
template <Format kFormat, typename T, int kRows, bool kGated>
static __device__ __forceinline__ void store_results(const LinearParams& p, const Part<T, kRows, kGated>& part,
                                                     const Sums<kRows>& sum) {
  using S = Shape<kRows>;
  constexpr int kApart = kGated ? 2 : 1;
  T* to = static_cast<T*>(p.out) + part.first_row * p.out_features + part.column + part.feature;
  const int lane = threadIdx.x % 32;
  const auto gated = [](float gate, float up) {
    return silu_mul(to_float(from_float<T>(gate)), to_float(from_float<T>(up)));
  };
#pragma unroll
  for (int n = 0; n < S::kWarpFeatures / 8; n += kApart) {
    const int column = S::warp_feature() / kApart + n / kApart * 8 + lane % 4 * 2;
    const int64_t feature = part.feature + column, left = part.features - feature;
    float bias[2] = {}, scales[kApart][2] = {};
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      if (!kGated && part.bias && e < left) bias[e] = to_float(part.bias[feature + e]);
#pragma unroll
      for (int i = 0; kFormat == Format::kW8A16 && i < kApart; ++i)
        if (e < left) scales[i][e] = (i ? p.scales[1] : part.scales)[feature + e];
    }
#pragma unroll
    for (int m = 0; m < S::kWarpRows / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = S::warp_row() + m * 16 + lane / 4 + 8 * half;
        if (part.first_row + row >= p.rows) continue;
        const auto product = [&](int i, int e) {
          const float s = sum[m][n + i][2 * half + e];
          return kFormat == Format::kW8A16 ? s * scales[i][e] : s;
        };
        T* at = to + row * p.out_features + column;
        if constexpr (kGated)
          store_two(at, gated(product(0, 0), product(1, 0)), gated(product(0, 1), product(1, 1)), left);
        else if constexpr (kFormat != Format::kW8A16)
          store_two(at, product(0, 0) + bias[0], product(0, 1) + bias[1], left);
        else
          store_two(at, __fmaf_rn(sum[m][n][2 * half], scales[0][0], bias[0]),
                    __fmaf_rn(sum[m][n][2 * half + 1], scales[0][1], bias[1]), left);
      }
  }
}

// Grid: (tiles of all weights * blocks of rows, splits / kSlices).
template <Format kFormat, typename T, int kRows, bool kGated>
static __global__ void __launch_bounds__(kThreads, has_groups(kFormat) && kRows <= 16 ? 3 : 1)
    linear_kernel(const LinearParams p) {
  using S = ShapeOf<kFormat, kRows>;
  __shared__ bool arrived_last;
  const int lane = threadIdx.x % 32, blocks = int(gridDim.y);  // that share a result
  const int64_t slice = ceil_div(ceil_div(p.in, kSteps), p.splits) * kSteps, own = S::kSlices * slice;
  const int64_t inner = blockIdx.y * own, end = min(p.in, inner + own);
  const int tiles = int(max(int64_t(0), ceil_div(end - inner, S::kInner)));
  const int second = int(slice / S::kInner);  // the first tile of the second slice
  float4* stored =                            // [tiles, blocks, kVectors, kThreads] vectors of four
      reinterpret_cast<float4*>(p.workspace) + blockIdx.x * int64_t(blocks) * S::kVectors * kThreads + threadIdx.x;
  float4* own_stored = stored + blockIdx.y * int64_t(S::kVectors) * kThreads;
  const Part<T, kRows, kGated> part(p, int(blockIdx.x));
  const Stages<kFormat, T, kRows, kGated> stages(p, part, inner, end);
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
  const int rows_at = S::place(S::warp_row() + lane % 16, lane / 16);
  const auto copy = [&](int stage, int tile) {
    stages.copy_weights(stage, tile);
    stages.copy_rows(stage, tile);
  };
  multiply_tiles<T, S::kInner>(
      sum, tiles, copy,
      [&](int tile) {
        if (S::kSlices == 1 || tile != second) return;
        store_sums<kRows>(own_stored, sum);
        for_each_vector<kRows>(sum, [](float (&s)[4], int) { s[0] = s[1] = s[2] = s[3] = 0.0f; });
      },
      [&](uint32_t (&to)[4], int stage, int m, int k) {
        ldmatrix(to, stages.rows(stage) + m * 16 * S::kInner + (rows_at ^ 16 * k));
      },
      [&](int stage) { return stages.weights.factor(stages.stage(stage)); });

  if (S::kSlices > 1 && tiles > second)
    for_each_vector<kRows>(sum, [&](float (&s)[4], int at) { add(s, own_stored[at]); });
  if (blocks > 1) {
    store_sums<kRows>(own_stored, sum);
    __syncthreads();
    const unsigned last = unsigned(blocks) - 1;
    if (threadIdx.x == 0) arrived_last = count_up(p.counters + blockIdx.x, last) == last;
    __syncthreads();
    if (!arrived_last) return;
    add_stored<kRows>(sum, stored, blocks);
  }
  store_results<kFormat, T, kRows>(p, part, sum);
}

// The tiles of all weights, with as many features each; if gated, half of them are gate's.
static int64_t num_tiles(const int64_t* features, int num_weights, bool gated, int64_t tile) {
  if (gated) return ceil_div(features[0], tile / 2);
  int64_t tiles = 0;
  for (int i = 0; i < num_weights; ++i) tiles += ceil_div(features[i], tile);
  return tiles;
}

// No slice is empty.
static int64_t num_slices(int64_t tiles, int64_t in) {
  const int64_t steps = ceil_div(in, kSteps);
  const int64_t wanted = max(int64_t(1), min(kBlocks / tiles, steps / kStepsPerSlice));
  return ceil_div(steps, ceil_div(steps, wanted));
}

// Calls f(Shape) with the one for these rows.
template <typename F>
static auto with_shape(int64_t rows, Format format, F&& f) {
  if (rows > 64 && format == Format::kDense) return f(Shape<128>());
  return rows <= 16 ? f(Shape<16>()) : rows <= 32 ? f(Shape<32>()) : f(Shape<64>());
}

template <typename S>
static dim3 grid_of(S, int64_t rows, const int64_t* features, int num_weights, bool gated, int64_t slices) {
  const int64_t tiles = num_tiles(features, num_weights, gated, S::kFeatures) * ceil_div(rows, S::kRows);
  return {unsigned(tiles), unsigned(ceil_div(slices, S::kSlices))};
}

Workspace linear_workspace(DType dtype, int64_t rows, int64_t in, int num_weights, const void* const* weights,
                           const int64_t* features, bool gated, Format format) {
  bool takes = dtype != DType::kFloat32 && rows > 0 && in > 0 && in % 8 == 0;
  takes &= rows <= kMaxLinearRows || format != Format::kDense;
  rows = min(rows, kMaxLinearRows);  // of a pass
  for (int i = 0; i < num_weights; ++i) takes &= aligned16(weights[i]) && (!has_groups(format) || features[i] % 8 == 0);
  const int64_t tiles = num_tiles(features, num_weights, gated, kTile);
  if (!takes || tiles == 0) return {0, 0};
  const int64_t slices = num_slices(tiles, in);
  // There are at most kBlocks / 2 results of 16 rows that blocks share, or kBlocks / 3 for each 64 rows.
  static_assert(kBlocks / 3 * kMaxLinearRows / 64 <= kNumCounters, "one counter per result");
  return with_shape(rows, format, [&](auto shape) -> Workspace {
    using S = decltype(shape);
    const dim3 grid = grid_of(shape, rows, features, num_weights, gated, slices);
    const int64_t floats = S::kFeatures * S::kRows;
    return {slices, slices > 1 ? int64_t(grid.x) * grid.y * floats * int64_t(sizeof(float)) : 0};
  });
}

template <Format kFormat, typename T, int kRows>
static cudaError_t launch_format(const LinearParams& p, cudaStream_t stream) {
  constexpr int kBytes = Stages<kFormat, T, kRows, false>::kBytes;
  static_assert(kBytes <= 99 * 1024 - 64, "more shared memory than every device has");
  return launch_overlapping(p.gated ? linear_kernel<kFormat, T, kRows, true> : linear_kernel<kFormat, T, kRows, false>,
                            grid_of(Shape<kRows>(), p.rows, p.features, p.num_weights, p.gated, p.splits),
                            dim3(kThreads), kBytes, stream, p);
}

template <typename T, int kRows>
static cudaError_t launch_rows(const LinearParams& p, cudaStream_t stream) {
  return with_kernels_of(p.format, [&](auto of) {
    constexpr Format kFormat = decltype(of)::value;
    if constexpr (kRows <= 64 || kFormat == Format::kDense)
      return launch_format<kFormat, T, kRows>(p, stream);
    else
      return cudaErrorInvalidValue;
  });
}

cudaError_t launch_linear(const LinearParams& p, cudaStream_t stream) {
  if (p.rows > kMaxLinearRows && p.format == Format::kDense) return cudaErrorInvalidValue;
  return run_on_device(p, p.rows * p.out_features, [&](auto type) {
    using T = decltype(type);
    if constexpr (std::is_same_v<T, float>) {
      return cudaErrorInvalidValue;
    } else {
      LinearParams pass = p;
      for (int64_t row = 0; row < p.rows; row += kMaxLinearRows) {
        pass.x = static_cast<const T*>(p.x) + row * p.in;
        pass.out = static_cast<T*>(p.out) + row * p.out_features;
        pass.rows = min(p.rows - row, kMaxLinearRows);
        const cudaError_t error = with_shape(
            pass.rows, p.format, [&](auto shape) { return launch_rows<T, decltype(shape)::kRows>(pass, stream); });
        if (error != cudaSuccess) return error;
      }
      return cudaSuccess;
    }
  });
}

}  // namespace dflash
