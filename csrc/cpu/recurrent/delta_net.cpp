// What a Gated DeltaNet layer does around its recurrence, one row at a time. Rows over threads.
#include <cmath>

#include "common/noise.h"
#include "cpu/base/parallel.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
static void scaled(const T* x, int64_t n, float scale, float* out) {
  over_vectors(n, [&](int64_t i, auto count) { store(out + i, load(x + i, count) * scale, count); });
}

// ln(1 + exp(x)), as torch has it linear above 20.
static float softplus(float x) {
  const float e = exp_one(x);
  return x > 20.0f ? x : e < 1e-8f ? e : float(log64(1.0 + double(e)));
}

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
    store_one(&beta, 1.0f / (1.0f + exp_one(-to_float(b[h]))));
    p.beta[row * p.heads + h] = to_float(beta);
    p.log_decay[row * p.heads + h] = -exp_one(to_float(a_log[h])) * softplus(to_float(a[h]) + to_float(dt_bias[h]));
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
    over_vectors(p.width, [&](int64_t i, auto count) {
      store(out + i, load(x + i, count) * scale * load(weight + i, count) * silu(load(z + i, count)), count);
    });
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
