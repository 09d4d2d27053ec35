// One row of a dynamic convolution, for the op itself and for the norm that follows one.
#pragma once
#include "cpu/base/buffer.h"
#include "cpu/base/fma.h"

DFLASH_NAMESPACE_BEGIN

// Row `row` of DynamicConvParams or ConvAddRmsNormParams -> out [hidden], rounded once.
template <typename T, typename Params>
static inline void convolve_row(const Params& p, int64_t row, T* out) {
  static thread_local Buffer<float> buffer;
  const int64_t n = p.hidden, size = n / p.groups, block = row / p.block_rows, t = row % p.block_rows;
  const int64_t reach = p.width < t + 1 ? p.width : t + 1;  // the rows in front of the block are zeros
  const T* x = static_cast<const T*>(p.x) + row * n;
  const T* base = static_cast<const T*>(p.base);
  const T* dynamic =
      static_cast<const T*>(p.dynamic) + block * p.dynamic_stride_block + t * p.dynamic_stride_row;
  // A group may be narrower than a vector, so each of its channels gets a copy.
  float* spread = buffer.reserve(reach * n);
  for (int64_t g = 0; g < reach * p.groups; ++g) {
    const float value = to_float(dynamic[g]);
    for (int64_t c = 0; c < size; ++c) spread[g * size + c] = value;
  }
  int64_t c = 0;
  for (; c + kWidth <= n; c += kWidth) {
    Vec total = splat(-0.0f);  // to which adding zero of either sign gives that zero
    for (int64_t i = 0; i < reach; ++i) {
      const Vec weight = load(base + i * n + c) + load(spread + i * n + c);
      total = weight == Vec{} ? total : fma_vec(weight, load(x - i * n + c), total);
    }
    store(out + c, total);
  }
  for (; c < n; ++c) {
    float total = -0.0f;
    for (int64_t i = 0; i < reach; ++i) {
      const float weight = to_float(base[i * n + c]) + spread[i * n + c];
      if (weight != 0.0f) total = fma_one(weight, to_float(x[c - i * n]), total);
    }
    store_one(out + c, total);
  }
}

DFLASH_NAMESPACE_END
