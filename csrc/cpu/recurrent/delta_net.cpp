// What a Gated DeltaNet layer does around its recurrence, one row at a time. Rows over threads.
#include <cmath>

#include "cpu/base/parallel.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
static void scaled(const T* x, int64_t n, float scale, float* out) {
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, load(x + i) * scale);
  for (; i < n; ++i) out[i] = to_float(x[i]) * scale;
}

// As torch has it: linear above 20.
static float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
static void inputs_row(const DeltaNetInputsParams& p, int64_t row) {
  const int64_t d = p.key_dim, keys = p.key_heads * d, values = p.heads * p.value_dim;
  const T* x = static_cast<const T*>(p.qkv) + row * (2 * keys + values);
  const float query_scale = 1.0f / std::sqrt(float(d));
  for (int64_t h = 0; h < p.key_heads; ++h) {
    const T *q = x + h * d, *k = x + keys + h * d;
    scaled(q, d, 1.0f / std::sqrt(sum_of_squares(q, d) + kL2Eps) * query_scale, p.q + row * keys + h * d);
    scaled(k, d, 1.0f / std::sqrt(sum_of_squares(k, d) + kL2Eps), p.k + row * keys + h * d);
  }
  scaled(x + 2 * keys, values, 1.0f, p.v + row * values);
  const T *b = static_cast<const T*>(p.b) + row * p.b_stride, *a = static_cast<const T*>(p.a) + row * p.a_stride;
  const T *a_log = static_cast<const T*>(p.a_log), *dt_bias = static_cast<const T*>(p.dt_bias);
  for (int64_t h = 0; h < p.heads; ++h) {
    T beta;
    store_one(&beta, 1.0f / (1.0f + std::exp(-to_float(b[h]))));
    p.beta[row * p.heads + h] = to_float(beta);
    p.log_decay[row * p.heads + h] = -std::exp(to_float(a_log[h])) * softplus(to_float(a[h]) + to_float(dt_bias[h]));
  }
}

template <typename T>
static void gated_row(const GatedRmsNormParams& p, int64_t row) {
  const T* weight = static_cast<const T*>(p.weight);
  for (int64_t h = 0; h < p.heads; ++h) {
    const float* x = p.x + (row * p.heads + h) * p.width;
    const T* z = static_cast<const T*>(p.z) + row * p.z_stride + h * p.width;
    T* out = static_cast<T*>(p.out) + (row * p.heads + h) * p.width;
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, p.width) / float(p.width) + p.eps);
    int64_t i = 0;
    for (; i + kWidth <= p.width; i += kWidth)
      store(out + i, load(x + i) * scale * load(weight + i) * silu(load(z + i)));
    for (; i < p.width; ++i) {
      const float gate = to_float(z[i]);
      store_one(out + i, x[i] * scale * to_float(weight[i]) * (gate / (std::exp(-gate) + 1.0f)));
    }
  }
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::delta_net_inputs(const DeltaNetInputsParams& p) {
  const int64_t width = 2 * p.key_heads * p.key_dim + p.heads * p.value_dim;
  parallel_rows(p, p.rows, p.rows * width, [&](auto type, int64_t row) { inputs_row<decltype(type)>(p, row); });
}

void dflash::DFLASH_ISA::gated_rms_norm(const GatedRmsNormParams& p) {
  parallel_rows(p, p.rows, p.rows * p.heads * p.width,
                [&](auto type, int64_t row) { gated_row<decltype(type)>(p, row); });
}
