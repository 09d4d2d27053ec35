// h = x + residual;  out = h / sqrt(mean(h^2) + eps) * weight;  tap = h. Zero-centered: (1 + weight).
// One block per row, kWidth elements per thread at a time. The first kHeld of those stay in registers between
// the sum and the scaling. They and their weights are all requested before the first is used, so the block
// waits for memory once. kHeld is as small as a row allows, up to kMaxHeld: a kernel with few registers fits
// next to the blocks of a product, and starts while that one runs. Rows past their sequence's count are not
// read; their output is zero. Rows that are put in front are copied. In conv_add_rms_norm x is convolved
// first.
#include "common/row_place.h"
#include "cuda/base/launch.h"
#include "cuda/linear/dynamic_conv.cuh"

namespace dflash {

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
  grid_launch_dependents();
  grid_dependency_wait();
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
  // The sum is rounded to the storage type first, so that the norm sees the residual that the next layer
  // reads.
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
    const bool wide = aligned16(p.x, p.residual, p.weight, p.out, p.residual_out, p.tap, also,
                                p.hidden * sizeof(T), p.tap_stride * sizeof(T));
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

}  // namespace dflash
