// One row of a dynamic convolution, for the op itself and for the norm that follows one.
#pragma once
#include "cuda/base/device.cuh"

namespace dflash {

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
          weight[e] +=
              shared_group ? shared_weight[j] : to_float(dynamic[i * groups + (channel + e) / group_size]);
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

}  // namespace dflash
