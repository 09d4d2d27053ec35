// A mixture of experts. The time is bound by reading the weights of the experts that the rows have chosen, once each.
//
// Three kernels: gate_up and the gate, down, and the sum over slots. The first two have a block per 128 features of an
// expert (64 of the gate with the 64 that they gate), which looks through all ids for its rows and ends if there are
// none. There are as many blocks as experts may be in use: one per pair (row, slot), of which the expert's first has
// the work, or one per expert if these are fewer. So grids and addresses depend on shapes only.
//
// mma.sync takes 16 or 32 rows as its first factor; with more, the block goes through its weights again, which are then
// in the L2 at best. No sum is cut, so a row's bits do not depend on the other rows.
#include "cuda/linear/groups.cuh"

namespace dflash {

constexpr int kWarps = kThreads / 32;
constexpr int kFeatures = 128;
constexpr int kInner = 64;
constexpr int kCopies = kFeatures * kInner / 8 / kThreads;  // of 16 bytes per thread and stage, if dense

// Looks through all ids for one expert's. Returns how many pairs have it; found [limit] gets those from the first-th
// on, in ascending order. Every thread calls.
static __device__ __forceinline__ int find_pairs(const ExpertsParams& p, int64_t expert, int first, int limit,
                                                 int* found) {
  __shared__ int counts[kWarps];
  const int pairs = int(p.rows * p.top_k), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  int total = 0;
  for (int start = 0; start < pairs; start += kThreads) {
    const int pair = start + int(threadIdx.x);
    const bool hit = pair < pairs && p.ids[pair] == expert;
    const unsigned hits = __ballot_sync(kAllLanes, hit);
    if (lane == 0) counts[warp] = __popc(hits);
    __syncthreads();
    int at = total + __popc(hits & ((1u << lane) - 1u)) - first;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w < warp) at += counts[w];
      total += counts[w];
    }
    if (hit && 0 <= at && at < limit) found[at] = pair;
    __syncthreads();
  }
  return total;
}

// The rows that a block multiplies with its expert's weights, kRows at a time.
template <int kRows>
struct Share {
  int64_t expert;  // -1: another block has it, or nobody chose it
  int count;       // of its pairs
  int first = 0;   // of those in `pairs`
  int* pairs;      // shared

  __device__ __forceinline__ Share(const ExpertsParams& p, int* pairs) : pairs(pairs) {
    const bool by_pair = p.rows * p.top_k < p.num_experts;
    const int64_t wanted = by_pair ? p.ids[blockIdx.y] : int64_t(blockIdx.y);
    const bool exists = 0 <= wanted && wanted < p.num_experts;
    count = exists ? find_pairs(p, wanted, 0, kRows, pairs) : 0;
    expert = count == 0 || (by_pair && pairs[0] != int(blockIdx.y)) ? -1 : wanted;
  }

  __device__ __forceinline__ int rows() const { return min(kRows, count - first); }

  // Goes on to the next rows; false if there are none.
  __device__ __forceinline__ bool advance(const ExpertsParams& p) {
    first += kRows;
    if (first < count) find_pairs(p, expert, first, kRows, pairs);
    return first < count;
  }
};

// A block's tile of one expert's weight, [out, in] or transposed [in, out]. Where rows are features, the first eight of
// every sixteen are the gate's and the others what they gate, if `half` is not 0.
template <typename T, Format kFormat, bool kTransposed>
struct WeightTile : PackedStage<kFormat> {
  using Stage = PackedStage<kFormat>;
  static constexpr int kElements = kFeatures / 8 * Stage::kTileBytes / 2;

  __device__ __forceinline__ WeightTile(const void* all, Format format, int64_t expert, int64_t in, int64_t out,
                                        int64_t half, int tile) {
    const int64_t size = kFormat == Format::kW8A16 ? int8_row_size(in) : groups_row_size(format, in);
    const int64_t first = int64_t(tile) * (half > 0 ? kFeatures / 2 : kFeatures);
    const int own = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      this->set(i, format, static_cast<const unsigned char*>(all) + expert * out * size,
                first + (half > 0 ? own * 8 + i * half : own * 16 + i * 8), out, in, 0, in);
  }
  __device__ __forceinline__ auto factor(const T* stage) const {
    using Factor = typename Stage::template Factor<T, 2>;
    return Factor(*this, stage + threadIdx.x / 32 * Stage::kTileBytes);
  }
};

template <typename T, bool kTransposed>
struct WeightTile<T, Format::kDense, kTransposed> {
  static constexpr int kElements = kFeatures * kInner;             // of a stage
  static constexpr int kWidth = kTransposed ? kFeatures : kInner;  // of a row of a stage
  static constexpr int kPieces = kWidth / 8;
  static constexpr int kApart = kThreads / kPieces;

  const T* from[kTransposed ? 1 : kCopies];
  int64_t step;  // between stages
  int64_t row_step;
  int left;  // rows from the thread's first on, if transposed, else stages that have columns at its piece
  int to;

  // Past the last feature, weights are loaded again (or zeros, if transposed) and the results dropped.
  __device__ __forceinline__ WeightTile(const void* all, Format, int64_t expert, int64_t in, int64_t out, int64_t half,
                                        int tile) {
    const T* weight = static_cast<const T*>(all) + expert * out * in;
    const int row = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
    to = place<kWidth>(row, piece);
    if constexpr (kTransposed) {
      const int64_t feature = int64_t(tile) * kFeatures + piece * 8;
      step = kInner * out, row_step = kApart * out;
      left = feature < out ? int(in) - row : 0;
      from[0] = weight + (left > 0 ? row * out + feature : 0);
    } else {
      step = kInner, row_step = 0;
      left = int((in - piece * 8 + kInner - 1) / kInner);
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int at = row + i * kApart;
        int64_t feature = int64_t(tile) * kFeatures + at;
        if (half > 0) {
          feature = min(int64_t(tile) * (kFeatures / 2) + at / 16 * 8 + at % 8, half - 1);
          if (at % 16 >= 8) feature += half;
        }
        from[i] = weight + min(feature, out - 1) * in + piece * 8;
      }
    }
  }

  __device__ __forceinline__ void copy(T* stage, int index, uint64_t policy) const {
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      T* at = stage + to + i * kApart * kWidth;
      if constexpr (kTransposed) {
        const bool there = index * kInner + i * kApart < left;
        cp_async16_hint_if(at, from[0] + (there ? index * step + i * row_step : 0), policy, there);
      } else {
        cp_async16_hint_if(at, from[i] + index * step, policy, index < left);
      }
    }
  }

  __device__ __forceinline__ auto factor(const T* stage) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    return [=](uint32_t (&to)[4], int, int k) {
      if constexpr (kTransposed)
        ldmatrix_transposed(to, stage + place<kFeatures>(k * 16 + lane % 16, warp * 2 + lane / 16));
      else
        ldmatrix(to, stage + (place<kInner>(warp * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2) ^ 16 * k));
    };
  }
};

// sums [rows / 16][features / 8] in mma's layout += rows of x, of which `row(i)` gives the i-th, with the tile.
template <typename T, int kRows, typename Tile, typename Row>
static __device__ __forceinline__ void multiply(float (&sums)[kRows / 16][2][4], const Tile& tile, const T* x,
                                                int64_t in, int count, Row row) {
  constexpr int kStageElements = Tile::kElements + kRows * kInner;
  constexpr int kPieces = kInner / 8;
  static_assert(kRows * kPieces <= kThreads, "a thread copies one piece of the rows");
  T* memory = shared<T>();
  const uint64_t policy = evict_first_policy();
  const int own = threadIdx.x / kPieces, piece = threadIdx.x % kPieces, stages = int(ceil_div(in, kInner));
  const int rows_to = place<kInner>(own, piece), row_stages = int((in - piece * 8 + kInner - 1) / kInner);
  const bool copies_rows = threadIdx.x < kRows * kPieces, has_row = own < count;
  const T* from = x + (has_row ? row(own) * in : 0) + piece * 8;
  const auto copy = [&](int slot, int index) {
    T* stage = memory + slot * kStageElements;
    tile.copy(stage, index, policy);
    if (copies_rows) {
      const bool there = has_row && index < row_stages;
      cp_async16_if(stage + Tile::kElements + rows_to, from + (there ? index * kInner : 0), there);
    }
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) {
    if (i < stages) copy(i, i);
    cp_async_commit();
  }
  const int lane = threadIdx.x % 32;
  const int rows_at = place<kInner>(lane % 16, lane / 16);
  const auto weights = [&](int slot) { return tile.factor(memory + slot * kStageElements); };
  const auto rows = [&](uint32_t (&to)[4], int slot, int m, int k) {
    ldmatrix(to, memory + slot * kStageElements + Tile::kElements + m * 16 * kInner + (rows_at ^ 16 * k));
  };
  multiply_tiles<T, kInner>(sums, stages, copy, [](int) {}, rows, weights);
  cp_async_wait<0>();
  __syncthreads();  // the stages are used again
}

// gate * sigmoid(s) * up
static __device__ __forceinline__ float gated(const ExpertsParams& p, float gate, float up) {
  float s = gate;
  if (p.gate == Gate::kGeluTanh) {
    s = gelu_sigmoid(gate);
  } else if (p.gate == Gate::kClampedSilu) {
    gate = gate > p.limit ? p.limit : gate;
    up = (up > p.limit ? p.limit : up < -p.limit ? -p.limit : up) + 1.0f;
    s = gate * p.alpha;
  }
  return gate / (1.0f + expf(-s)) * up;
}

// A sum times its channel's scale, if there is one, plus its bias.
template <typename T, Format kFormat>
static __device__ __forceinline__ float finished(float sum, const float* scales, const void* biases, int64_t index) {
  const float bias = biases ? to_float(static_cast<const T*>(biases)[index]) : 0.0f;
  return kFormat == Format::kW8A16 ? __fmaf_rn(sum, scales[index], bias) : sum + bias;
}

// A block's rows of x [.., in] times its tile of the expert's weight, one of `all` [num_experts, out, in]. row(pair) is
// a pair's row of x; store(expert, pair, sums, half) takes the thread's sums of one.
template <typename T, int kRows, Format kFormat, bool kTransposed, typename Row, typename Store>
static __device__ __forceinline__ void multiply_share(const ExpertsParams& p, const void* x, const void* all,
                                                      Format format, int64_t in, int64_t out, int64_t half, Row row,
                                                      Store store) {
  __shared__ int pairs[kRows];
  grid_begin();
  Share<kRows> share(p, pairs);
  const int64_t expert = share.expert;
  if (expert < 0) return;
  const WeightTile<T, kFormat, kTransposed> weights(all, format, expert, in, out, half, int(blockIdx.x));
  do {
    const int n = share.rows();
    float sums[kRows / 16][2][4] = {};
    multiply<T, kRows>(sums, weights, static_cast<const T*>(x), in, n, [&](int i) { return row(pairs[i]); });
#pragma unroll
    for (int m = 0; m < kRows / 16; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = m * 16 + threadIdx.x % 32 / 4 + 8 * half;
        if (own < n) store(expert, pairs[own], sums[m], half);
      }
  } while (share.advance(p));
}

// inner [pairs, width] = gate(gate_up(x)). Grid: (tiles of 64 columns, pairs or experts).
template <typename T, int kRows, Format kFormat, bool kTransposed>
static __global__ void __launch_bounds__(kThreads, 1) gate_up_kernel(const ExpertsParams p) {
  const auto both = [&](float sum, int64_t at) {
    return finished<T, kFormat>(sum, p.gate_up_scales, p.gate_up_bias, at);
  };
  const auto store = [&](int64_t expert, int pair, const float (&sums)[2][4], int half) {
    T* out = static_cast<T*>(p.workspace) + pair * p.width;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      // transposed: a thread's neighbouring columns, of two groups of eight; else one column of both groups
      const int64_t column = int(blockIdx.x) * 64 + warp * 8 + (kTransposed ? e * 4 + lane % 4 : lane % 4 * 2 + e);
      if (column >= p.width) continue;
      const int64_t at = expert * 2 * p.width + (kTransposed ? 2 * column : column);
      const float gate = kTransposed ? sums[e][2 * half] : sums[0][2 * half + e];
      const float up = kTransposed ? sums[e][2 * half + 1] : sums[1][2 * half + e];
      out[column] = from_float<T>(gated(p, both(gate, at), both(up, at + (kTransposed ? 1 : p.width))));
    }
  };
  multiply_share<T, kRows, kFormat, kTransposed>(
      p, p.x, p.gate_up, p.format, p.hidden, 2 * p.width, p.width, [&](int pair) { return pair / p.top_k; }, store);
}

static __host__ __device__ __forceinline__ int64_t inner_bytes(int64_t pairs, int64_t width) {
  return pairs * width * 2;  // a multiple of 16, as width is one of 8
}

static __device__ __forceinline__ float* results_of(const ExpertsParams& p) {
  return reinterpret_cast<float*>(static_cast<char*>(p.workspace) + inner_bytes(p.rows * p.top_k, p.width));
}

// results [pairs, hidden] = down(inner). Grid: (tiles of 128 columns, pairs or experts).
template <typename T, int kRows, Format kFormat, bool kTransposed>
static __global__ void __launch_bounds__(kThreads, 1) down_kernel(const ExpertsParams p) {
  const auto store = [&](int64_t expert, int pair, const float (&sums)[2][4], int half) {
    float* out = results_of(p) + pair * p.hidden;
#pragma unroll
    for (int group = 0; group < 2; ++group) {
      const int64_t column = int(blockIdx.x) * 128 + threadIdx.x / 32 * 16 + group * 8 + threadIdx.x % 4 * 2;
      if (column >= p.hidden) continue;  // a multiple of 8: both columns are there, or none
      const int64_t at = expert * p.hidden + column;
      const auto value = [&](int e) {
        return finished<T, kFormat>(sums[group][2 * half + e], p.down_scales, p.down_bias, at + e);
      };
      *reinterpret_cast<float2*>(out + column) = make_float2(value(0), value(1));
    }
  };
  multiply_share<T, kRows, kFormat, kTransposed>(
      p, p.workspace, p.down, p.down_format, p.width, p.hidden, 0, [](int pair) { return int64_t(pair); }, store);
}

// One thread per 16 bytes of the result.
template <typename T>
static __global__ void __launch_bounds__(kThreads, 1) combine_kernel(const ExpertsParams p) {
  constexpr int kWidth = kPer16<T>;
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kWidth, row = i / p.hidden;
  grid_begin();
  if (row >= p.rows) return;
  const float* results = results_of(p) + row * p.top_k * p.hidden + i % p.hidden;
  float sums[kWidth] = {};
#pragma unroll 2
  for (int64_t slot = 0; slot < p.top_k; ++slot) {
    const int64_t pair = row * p.top_k + slot, id = p.ids[pair];
    if (id < 0 || id >= p.num_experts) continue;
    const float score =
        p.float_scores ? static_cast<const float*>(p.scores)[pair] : to_float(static_cast<const T*>(p.scores)[pair]);
#pragma unroll
    for (int j = 0; j < kWidth; j += 4) {
      float v[4];
      load<float, 4>(results + slot * p.hidden + j, v);
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j + e] = __fmaf_rn(score, v[e], sums[j + e]);
    }
  }
  store<T, kWidth>(static_cast<T*>(p.out) + i, sums);
}

Workspace experts_workspace(DType dtype, const void* gate_up, const void* down, int64_t rows, int64_t top_k,
                            int64_t hidden, int64_t width) {
  const int64_t pairs = rows * top_k;
  const bool takes = dtype != DType::kFloat32 && hidden % 8 == 0 && width % 8 == 0 && aligned16(gate_up, down);
  if (!takes) return {0, 0};
  return {1, inner_bytes(pairs, width) + pairs * hidden * int64_t(sizeof(float))};
}

// The shared memory of a block.
template <typename T, int kRows, Format kFormat, bool kTransposed>
constexpr int kBytes = kStages * (WeightTile<T, kFormat, kTransposed>::kElements + kRows * kInner) * 2;

template <typename T, int kRows>
static cudaError_t launch_products(const ExpertsParams& p, cudaStream_t stream) {
  const unsigned blocks = unsigned(min(p.rows * p.top_k, p.num_experts));
  const auto launch = [&](auto* kernel, int bytes, int64_t features) {
    return launch_overlapping(kernel, dim3(unsigned(ceil_div(features, kFeatures)), blocks), dim3(kThreads), bytes,
                              stream, p);
  };
  if (p.transposed) {
    constexpr int kSize = kBytes<T, kRows, Format::kDense, true>;
    const cudaError_t error = launch(gate_up_kernel<T, kRows, Format::kDense, true>, kSize, 2 * p.width);
    return error != cudaSuccess ? error : launch(down_kernel<T, kRows, Format::kDense, true>, kSize, p.hidden);
  }
  const cudaError_t error = with_kernels_of(p.format, [&](auto of) {
    constexpr Format kFormat = decltype(of)::value;
    static_assert(kBytes<T, kRows, kFormat, false> <= 99 * 1024 - 256, "more than every device has");
    return launch(gate_up_kernel<T, kRows, kFormat, false>, kBytes<T, kRows, kFormat, false>, 2 * p.width);
  });
  if (error != cudaSuccess) return error;
  return with_kernels_of(p.down_format, [&](auto of) {
    constexpr Format kFormat = decltype(of)::value;
    return launch(down_kernel<T, kRows, kFormat, false>, kBytes<T, kRows, kFormat, false>, p.hidden);
  });
}

cudaError_t launch_experts(const ExpertsParams& p, cudaStream_t stream) {
  return run_on_device(p, p.rows, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, float>) {
      if (p.top_k > 0) {
        const cudaError_t error = p.rows <= 16 ? launch_products<T, 16>(p, stream) : launch_products<T, 32>(p, stream);
        if (error != cudaSuccess) return error;
      }
      return launch_flat(combine_kernel<T>, ceil_div(p.rows * p.hidden / kPer16<T>, kThreads), kThreads, stream, p);
    }
    return cudaErrorInvalidValue;
  });
}

}  // namespace dflash
