// h = x + residual;  out = h / sqrt(mean(h^2) + eps) * weight;  tap = h. Zero-centered: (1 + weight).
// One row at a time, rows over threads; sums in fp32. Used for the layer norms (with residual), the final
// norm and, with counts, for the norm after the feature projection.
#include <cmath>

#include "cpu/parallel.h"
#include "params.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
static void norm_row(const RmsNormParams& p, int64_t row) {
  const int64_t n = p.hidden;
  const T* x = static_cast<const T*>(p.x) + row * n;
  const T* weight = static_cast<const T*>(p.weight);
  T* out = static_cast<T*>(p.out) + row * n;
  if (p.counts && row % p.rows_per_sequence >= p.counts[row / p.rows_per_sequence]) {
    for (int64_t i = 0; i < n; ++i) store_one(out + i, 0.0f);
    return;
  }
  Sum16 squares;
  float tail = 0.0f;
  int64_t i = 0;
  if (p.residual) {
    // The sum is rounded to the storage type first: the norm must see what the next layer will add to.
    const T* residual = static_cast<const T*>(p.residual) + row * n;
    T* h = static_cast<T*>(p.residual_out) + row * n;
    for (; i + kWidth <= n; i += kWidth) {
      store(h + i, load(x + i) + load(residual + i));
      Vec v = load(h + i);
      squares.lanes[i / kWidth % Sum16::kVecs] += v * v;
    }
    for (; i < n; ++i) {
      store_one(h + i, to_float(x[i]) + to_float(residual[i]));
      tail += to_float(h[i]) * to_float(h[i]);
    }
    if (p.tap) std::memcpy(static_cast<T*>(p.tap) + row * p.tap_stride, h, n * sizeof(T));
    x = h;
  } else {
    for (; i + kWidth <= n; i += kWidth) {
      Vec v = load(x + i);
      squares.lanes[i / kWidth % Sum16::kVecs] += v * v;
    }
    for (; i < n; ++i) tail += to_float(x[i]) * to_float(x[i]);
  }
  const float scale = 1.0f / std::sqrt((squares.total() + tail) / float(n) + p.eps);
  const float offset = norm_offset(p.zero_centered);
  for (i = 0; i + kWidth <= n; i += kWidth) store(out + i, load(x + i) * scale * (load(weight + i) + offset));
  for (; i < n; ++i) store_one(out + i, to_float(x[i]) * scale * (to_float(weight[i]) + offset));
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void rms_norm(const RmsNormParams& p) {
  parallel_for(p.rows, p.rows * p.hidden, p.threads, [&](int64_t row) {
    p.dtype == DType::kFloat32 ? norm_row<float>(p, row) : norm_row<bf16>(p, row);
  });
}

}  // namespace dflash::DFLASH_ISA
