// y[t] = bias + sum of weight[j] * input[t - width + 1 + j], taps in this order; then the window moves.
// Sequences over threads.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/buffer.h"
#include "cpu/parallel.h"
#include "params.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
static void run_sequence(const CausalConvParams& p, int64_t b) {
  static thread_local Buffer<T> memory;
  const int64_t reach = p.width - 1, n = p.channels;
  const int64_t pending = std::clamp(p.pending[b], int64_t(0), p.block);
  const int64_t keep = std::clamp(p.keep[b], int64_t(0), p.rows);
  T* window = static_cast<T*>(p.window) + b * (reach + p.block) * n;
  const T* x = static_cast<const T*>(p.x) + b * p.x_stride_batch;
  // The context and the rows, one after another: it is read while the window is written.
  T* inputs = memory.reserve((reach + p.rows) * n);
  std::memcpy(inputs, window + pending * n, sizeof(T) * reach * n);
  for (int64_t t = 0; t < p.rows; ++t)
    std::memcpy(inputs + (reach + t) * n, x + t * p.x_stride_row, sizeof(T) * n);
  for (int64_t t = 0; t < p.rows; ++t) {
    T* out = static_cast<T*>(p.out) + (b * p.rows + t) * n;
    for (int64_t c = 0; c < n; ++c) {
      float sum = p.bias ? to_float(static_cast<const T*>(p.bias)[c]) : 0.0f;
      const T* weight = static_cast<const T*>(p.weight) + c * p.width;
      for (int64_t j = 0; j < p.width; ++j) sum += to_float(weight[j]) * to_float(inputs[(t + j) * n + c]);
      store_one(out + c, p.silu ? sum / (std::exp(-sum) + 1.0f) : sum);
    }
  }
  std::memcpy(window, inputs + keep * n, sizeof(T) * reach * n);
  std::memcpy(window + reach * n, inputs + reach * n, sizeof(T) * std::min(p.rows, p.block) * n);
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void causal_conv(const CausalConvParams& p) {
  parallel_for(p.batch, p.batch * p.rows * p.channels * p.width, p.threads, [&](int64_t b) {
    p.dtype == DType::kFloat32 ? run_sequence<float>(p, b) : run_sequence<bf16>(p, b);
  });
}

}  // namespace dflash::DFLASH_ISA
