// out = gate / (1 + exp(-gate)) * up, and out = x / (1 + exp(-gate)). One row at a time, rows over threads.
#include <cmath>

#include "cpu/base/parallel.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
static void silu_mul_row(const SiluMulParams& p, int64_t row) {
  const int64_t n = p.width;
  const T* gate = static_cast<const T*>(p.gate_up) + row * 2 * n;
  const T* up = gate + n;
  T* out = static_cast<T*>(p.out) + row * n;
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, silu(load(gate + i)) * load(up + i));
  for (; i < n; ++i) {
    const float g = to_float(gate[i]);
    store_one(out + i, g / (std::exp(-g) + 1.0f) * to_float(up[i]));
  }
}

template <typename T>
static void sigmoid_mul_row(const SigmoidMulParams& p, int64_t row) {
  for (int64_t h = 0; h < p.heads; ++h) {
    const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride_row + h * p.gate_stride_head;
    const T* x = static_cast<const T*>(p.x) + (row * p.heads + h) * p.width;
    T* out = static_cast<T*>(p.out) + (row * p.heads + h) * p.width;
    int64_t i = 0;
    for (; i + kWidth <= p.width; i += kWidth) store(out + i, load(x + i) / (exp_vec(-load(gate + i)) + 1.0f));
    for (; i < p.width; ++i) store_one(out + i, to_float(x[i]) / (std::exp(-to_float(gate[i])) + 1.0f));
  }
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void silu_mul(const SiluMulParams& p) {
  parallel_for(p.rows, p.rows * p.width, p.threads, [&](int64_t row) {
    p.dtype == DType::kFloat32 ? silu_mul_row<float>(p, row) : silu_mul_row<bf16>(p, row);
  });
}

void sigmoid_mul(const SigmoidMulParams& p) {
  parallel_for(p.rows, p.rows * p.heads * p.width, p.threads, [&](int64_t row) {
    p.dtype == DType::kFloat32 ? sigmoid_mul_row<float>(p, row) : sigmoid_mul_row<bf16>(p, row);
  });
}

}  // namespace dflash::DFLASH_ISA
