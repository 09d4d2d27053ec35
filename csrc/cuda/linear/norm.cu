// What runs over the rows between products: norms, convolutions over a block, gates, embeddings.
//
// Norms have one block per row. The first kHeld pieces of a thread stay in registers between the sum and the scaling,
// and all are requested before the first is used, so the block waits for memory once. kHeld is as small as a row
// allows: a kernel with few registers fits next to the blocks of a product, and starts while that one runs.
#include "common/row_place.h"
#include "cuda/base/device.cuh"

namespace dflash {

// ---- convolutions over a block

// Row `row` of DynamicConvParams or ConvAddRmsNormParams, kWidth channels at a time, rounded once.
template <typename T, int kWidth>
struct ConvolvedRow {
  static constexpr int kAtOnce = 2;  // weights whose operands are requested before the first is used

  const T *x, *base, *dynamic;
  int hidden, groups, group_size, reach;

  template <typename Params>
  __device__ __forceinline__ ConvolvedRow(const Params& p, int64_t row) {
    const int64_t block = row / p.block_rows, t = row % p.block_rows;
    x = static_cast<const T*>(p.x) + row * p.hidden;
    base = static_cast<const T*>(p.base);
    dynamic = static_cast<const T*>(p.dynamic) + block * p.dynamic_stride_block + t * p.dynamic_stride_row;
    hidden = int(p.hidden), groups = int(p.groups), group_size = hidden / groups;
    reach = int(min(p.width, t + 1));  // the rows in front of the block are zeros
  }

  __device__ __forceinline__ Packed<T, kWidth> operator()(int channel) const {
    const int group = channel / group_size;
    const bool shared_group = group_size % kWidth == 0;  // by all kWidth channels
    float total[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) total[e] = -0.0f;  // adding zero of either sign gives that zero
    for (int first = 0; first < reach; first += kAtOnce) {
      Packed<T, kWidth> inputs[kAtOnce] = {}, bases[kAtOnce] = {};
      float shared_weight[kAtOnce] = {};
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j;
        if (i >= reach) continue;
        inputs[j] = load_packed<T, kWidth>(x + channel - int64_t(i) * hidden);
        bases[j] = load_packed<T, kWidth>(base + channel + int64_t(i) * hidden);
        if (shared_group) shared_weight[j] = to_float(dynamic[i * groups + group]);
      }
#pragma unroll
      for (int j = 0; j < kAtOnce; ++j) {
        const int i = first + j;
        if (i >= reach) continue;
        float v[kWidth], weight[kWidth];
        unpack_to<T, kWidth>(inputs[j], v);
        unpack_to<T, kWidth>(bases[j], weight);
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          weight[e] += shared_group ? shared_weight[j] : to_float(dynamic[i * groups + (channel + e) / group_size]);
          if (weight[e] != 0.0f) total[e] = __fmaf_rn(weight[e], v[e], total[e]);
        }
      }
    }
    if constexpr (kWidth == 1)
      return from_float<T>(total[0]);
    else
      return pack<T>(total);
  }
};

constexpr int kThreads = 128;

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kThreads, 1) dynamic_conv_kernel(const DynamicConvParams p) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  const int64_t index = i / p.hidden;
  const int channel = int(i % p.hidden);
  const auto [is_front, row] = source_of(index, p.front_rows, p.block_rows);
  T* out = static_cast<T*>(p.out) + i;
  grid_begin();
  if (index >= p.rows + p.sequences * p.front_rows) return;
  if (is_front) {
    copy<T, kWidth>(static_cast<const T*>(p.front) + row * p.hidden + channel, out);
    return;
  }
  const ConvolvedRow<T, kWidth> convolved(p, row);
  store_packed<T, kWidth>(out, convolved(channel));
}

cudaError_t launch_dynamic_conv(const DynamicConvParams& p, cudaStream_t stream) {
  const int64_t rows = p.rows + p.sequences * p.front_rows;
  return run_packed(p, rows, {p.x, p.base, p.front, p.out}, {p.hidden}, [&](auto type, auto width) {
    const int64_t blocks = ceil_div(rows * p.hidden, kThreads * width);
    return launch_flat(dynamic_conv_kernel<decltype(type), width>, blocks, kThreads, stream, p);
  });
}

// ---- norms

constexpr int kMaxHeld = 4;
constexpr int kMaxThreads = 512;

template <typename T, int kWidth, int kHeld, typename Params>
static __global__ void __launch_bounds__(kMaxThreads, 1) rms_norm_kernel(const Params p) {
  constexpr bool kConvolves = std::is_same_v<Params, ConvAddRmsNormParams>;
  constexpr bool kHoldsAll = kHeld < kMaxHeld;  // of a row
  __shared__ float scratch[32];
  Source source{false, blockIdx.x};
  if constexpr (!kConvolves) source = source_of(blockIdx.x, p.front_rows, p.rows_per_sequence);
  const int64_t row = source.row;
  const int n = int(p.hidden / kWidth), step = blockDim.x;
  const T* x = static_cast<const T*>(p.x) + row * p.hidden;
  const T* weight = static_cast<const T*>(p.weight);
  const T* residual = static_cast<const T*>(p.residual) + row * p.hidden;
  T* out = static_cast<T*>(p.out) + blockIdx.x * p.hidden;
  T* total = static_cast<T*>(p.residual_out) + row * p.hidden;
  T* tap = static_cast<T*>(p.tap) + row * p.tap_stride;
  grid_begin();
  if constexpr (!kConvolves) {
    if (source.is_front) {
      const T* front = static_cast<const T*>(p.front) + row * p.hidden;
      for (int i = threadIdx.x; i < n; i += step) copy<T, kWidth>(front + i * kWidth, out + i * kWidth);
      return;
    }
    if (p.counts && row % p.rows_per_sequence >= p.counts[row / p.rows_per_sequence]) {
      const float zero[kWidth] = {};
      for (int i = threadIdx.x; i < n; i += step) store<T, kWidth>(out + i * kWidth, zero);
      return;
    }
  }
  // The inputs of kWidth elements.
  struct Place {
    Packed<T, kWidth> x, residual, weight;
  };
  const auto read = [&](int i) {
    Place place{};
    if constexpr (!kConvolves) place.x = load_packed<T, kWidth>(x + i * kWidth);
    if (p.residual) place.residual = load_packed<T, kWidth>(residual + i * kWidth);
    place.weight = load_packed<T, kWidth>(weight + i * kWidth);
    if constexpr (kConvolves) place.x = ConvolvedRow<T, kWidth>(p, row)(i * kWidth);
    return place;
  };
  // The sum is rounded to the storage type first, so that the norm sees the residual that the next layer reads.
  const auto add = [&](const Place& place, float (&v)[kWidth]) {
    unpack_to<T, kWidth>(place.x, v);
    if (p.residual) {
      float r[kWidth];
      unpack_to<T, kWidth>(place.residual, r);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) v[e] += r[e];
      round_to<T, kWidth>(v);
    }
  };
  float squares = 0.0f;
  const auto keep = [&](int i, const float (&v)[kWidth]) {
    if (p.residual) store<T, kWidth>(total + i * kWidth, v);
    if (p.tap) store<T, kWidth>(tap + i * kWidth, v);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) squares += v[e] * v[e];
  };
  Place places[kHeld];
  float held[kHeld][kWidth];
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int i = threadIdx.x + k * step;
    if (i < n) places[k] = read(i);
  }
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int i = threadIdx.x + k * step;
    if (i < n) add(places[k], held[k]), keep(i, held[k]);
  }
  for (int i = threadIdx.x + kHeld * step; !kHoldsAll && i < n; i += step) {
    float v[kWidth];
    add(read(i), v);
    keep(i, v);
  }
  const float offset = norm_offset(p.zero_centered);
  const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / float(p.hidden) + p.eps);
  const auto write = [&](int i, const Place& place, float (&v)[kWidth]) {
    float w[kWidth];
    unpack_to<T, kWidth>(place.weight, w);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) v[e] = v[e] * scale * (w[e] + offset);
    store<T, kWidth>(out + i * kWidth, v);
  };
#pragma unroll
  for (int k = 0; k < kHeld; ++k) {
    const int i = threadIdx.x + k * step;
    if (i < n) write(i, places[k], held[k]);
  }
  for (int i = threadIdx.x + kHeld * step; !kHoldsAll && i < n; i += step) {
    float v[kWidth];
    const Place place = read(i);
    add(place, v);
    write(i, place, v);
  }
}

// `also` is one more tensor that is read, and `rows` are those of the result.
template <typename Params>
static cudaError_t launch_norm(const Params& p, cudaStream_t stream, const void* also, int64_t rows) {
  return run_on_device(p, rows, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = kPer16<T>;
    const bool wide = aligned16(p.x, p.residual, p.weight, p.out, p.residual_out, p.tap, also, p.hidden * sizeof(T),
                                p.tap_stride * sizeof(T));
    const int64_t vectors = wide ? p.hidden / kWidth : p.hidden;
    const int64_t threads = min(int64_t(kMaxThreads), ceil_div(vectors, 32) * 32);
    const auto kernel = !wide                    ? rms_norm_kernel<T, 1, kMaxHeld, Params>
                        : vectors <= threads     ? rms_norm_kernel<T, kWidth, 1, Params>
                        : vectors <= 2 * threads ? rms_norm_kernel<T, kWidth, 2, Params>
                                                 : rms_norm_kernel<T, kWidth, kMaxHeld, Params>;
    return launch_flat(kernel, rows, threads, stream, p);
  });
}

cudaError_t launch_rms_norm(const RmsNormParams& p, cudaStream_t stream) {
  return launch_norm(p, stream, p.front, p.rows + p.sequences * p.front_rows);
}

cudaError_t launch_conv_add_rms_norm(const ConvAddRmsNormParams& p, cudaStream_t stream) {
  return launch_norm(p, stream, p.base, p.rows);
}

// ---- gates. One thread per 16 bytes of the result.

constexpr int kElementThreads = 256;

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kElementThreads, 1) silu_mul_kernel(const SiluMulParams p) {
  const int64_t i = (int64_t(blockIdx.x) * kElementThreads + threadIdx.x) * kWidth;
  const T* gate = static_cast<const T*>(p.gate_up) + i + i / p.width * p.width;
  grid_begin();
  if (i >= p.rows * p.width) return;
  float g[kWidth], u[kWidth];
  load<T, kWidth>(gate, g);
  load<T, kWidth>(gate + p.width, u);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    g[e] = p.gate == Gate::kGeluTanh ? g[e] / (1.0f + expf(-gelu_sigmoid(g[e]))) * u[e] : silu_mul(g[e], u[e]);
  }
  store<T, kWidth>(static_cast<T*>(p.out) + i, g);
}

cudaError_t launch_silu_mul(const SiluMulParams& p, cudaStream_t stream) {
  return run_packed(p, p.rows * p.width, {p.gate_up, p.out}, {p.width}, [&](auto type, auto width) {
    const int64_t blocks = ceil_div(p.rows * p.width, kElementThreads * width);
    return launch_flat(silu_mul_kernel<decltype(type), width>, blocks, kElementThreads, stream, p);
  });
}

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kElementThreads, 1) sigmoid_mul_kernel(const SigmoidMulParams p) {
  const int64_t i = (int64_t(blockIdx.x) * kElementThreads + threadIdx.x) * kWidth;
  const int64_t head = i / p.width, row = head / p.heads;
  const T* gate =
      static_cast<const T*>(p.gate) + row * p.gate_stride_row + head % p.heads * p.gate_stride_head + i % p.width;
  grid_begin();
  if (i >= p.rows * p.heads * p.width) return;
  float x[kWidth], g[kWidth];
  load<T, kWidth>(static_cast<const T*>(p.x) + i, x);
  load<T, kWidth>(gate, g);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) x[e] = x[e] / (1.0f + expf(-g[e]));
  store<T, kWidth>(static_cast<T*>(p.out) + i, x);
}

cudaError_t launch_sigmoid_mul(const SigmoidMulParams& p, cudaStream_t stream) {
  const int64_t elements = p.rows * p.heads * p.width;
  const auto launch = [&](auto type, auto width) {
    const int64_t blocks = ceil_div(elements, kElementThreads * width);
    return launch_flat(sigmoid_mul_kernel<decltype(type), width>, blocks, kElementThreads, stream, p);
  };
  return run_packed(p, elements, {p.x, p.gate, p.out}, {p.width, p.gate_stride_row, p.gate_stride_head}, launch);
}

// ---- embeddings of the block that is drafted. One block per row of the result, and one more per sequence for its
// anchor and positions.

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kElementThreads, 1) draft_rows_kernel(const DraftRowsParams p) {
  const int64_t b = blockIdx.y, row = blockIdx.x;
  grid_dependency_wait();
  // Not before: what is launched from here on may read early what the last step has left, see ptx.cuh.
  grid_launch_dependents();
  if (row == p.rows) {
    if (threadIdx.x == 0) p.anchor[b] = drafted_id(p, b, 0);
    for (int64_t i = threadIdx.x; i < p.num_drafts; i += kElementThreads)
      p.positions[b * p.num_drafts + i] = anchor_position(p, b) + 1 + i;
    return;
  }
  const T* x = embedding_of<T>(p, drafted_id(p, b, row));
  T* out = static_cast<T*>(p.embeds) + (b * p.rows + row) * p.hidden;
  for (int64_t i = threadIdx.x * kWidth; i < p.hidden; i += kElementThreads * kWidth) {
    float v[kWidth];
    load<T, kWidth>(x + i, v);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) v[e] *= p.scale;
    store<T, kWidth>(out + i, v);
  }
}

cudaError_t launch_draft_rows(const DraftRowsParams& p, cudaStream_t stream) {
  const auto launch = [&](auto type, auto width) {
    return launch_overlapping(draft_rows_kernel<decltype(type), width>, dim3(unsigned(p.rows + 1), unsigned(p.batch)),
                              dim3(kElementThreads), 0, stream, p);
  };
  return run_packed(p, p.batch, {p.table, p.mask_embedding, p.embeds}, {p.hidden, p.table_stride}, launch);
}

}  // namespace dflash
