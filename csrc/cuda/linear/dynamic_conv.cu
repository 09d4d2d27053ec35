// out[t] = sum of (base[i] + dynamic[t, i]) * x[t - i]. One thread per 16 bytes of the result.
#include "common/row_place.h"
#include "cuda/base/launch.h"
#include "cuda/linear/dynamic_conv.cuh"

namespace dflash {

constexpr int kThreads = 128;

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kThreads, 1) dynamic_conv_kernel(const DynamicConvParams p) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  const int64_t index = i / p.hidden;
  const int channel = int(i % p.hidden);
  const auto [is_front, row] = source_of(index, p.front_rows, p.block_rows);
  T* out = static_cast<T*>(p.out) + i;
  grid_launch_dependents();
  grid_dependency_wait();
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
  return run_on_device(p, rows, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = kPer16<T>;
    const bool wide = aligned16(p.x, p.base, p.front, p.out, p.hidden * sizeof(T));
    const int64_t blocks = ceil_div(rows * p.hidden, kThreads * (wide ? kWidth : 1));
    return launch_flat(wide ? dynamic_conv_kernel<T, kWidth> : dynamic_conv_kernel<T, 1>, blocks, kThreads,
                       stream, p);
  });
}

}  // namespace dflash
