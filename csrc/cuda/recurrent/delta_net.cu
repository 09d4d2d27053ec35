// What a Gated DeltaNet layer does around its recurrence, one warp per head and row.
#include "cuda/base/device.cuh"

namespace dflash {

constexpr int kWarps = 4;

// The heads of a row are q's, k's and v's, in this order; the warp of a v head also makes its decay and beta.
template <typename T>
static __global__ void __launch_bounds__(32 * kWarps, 1) delta_net_inputs_kernel(const DeltaNetInputsParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t per_row = 2 * p.key_heads + p.heads;
  const int64_t unit = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, row = unit / per_row;
  const int64_t head = unit % per_row, keys = p.key_heads * p.key_dim, values = p.heads * p.value_dim;
  grid_begin();
  if (row >= p.rows) return;
  const T* x = static_cast<const T*>(p.qkv) + row * (2 * keys + values);
  if (head >= 2 * p.key_heads) {
    const int64_t h = head - 2 * p.key_heads, at = row * p.heads + h;
    x += 2 * keys + h * p.value_dim;
    for (int64_t i = lane; i < p.value_dim; i += 32) p.v[at * p.value_dim + i] = to_float(x[i]);
    if (lane > 0) return;
    const auto read = [](const void* from, int64_t i) { return to_float(static_cast<const T*>(from)[i]); };
    const float sum = read(p.a, row * p.a_stride + h) + read(p.dt_bias, h);
    const float softplus = sum > 20.0f ? sum : log1pf(expf(sum));  // as torch has it
    p.log_decay[at] = -expf(read(p.a_log, h)) * softplus;
    p.beta[at] = to_float(from_float<T>(1.0f / (1.0f + expf(-read(p.b, row * p.b_stride + h)))));
    return;
  }
  const bool is_query = head < p.key_heads;
  x += head * p.key_dim;
  float* out = is_query ? p.q + row * keys + head * p.key_dim : p.k + row * keys + (head - p.key_heads) * p.key_dim;
  float squares = 0.0f;
  for (int64_t i = lane; i < p.key_dim; i += 32) squares += to_float(x[i]) * to_float(x[i]);
  float scale = 1.0f / sqrtf(warp_sum(squares) + kL2Eps);
  if (is_query) scale *= 1.0f / sqrtf(float(p.key_dim));
  for (int64_t i = lane; i < p.key_dim; i += 32) out[i] = to_float(x[i]) * scale;
}

template <typename T>
static __global__ void __launch_bounds__(32 * kWarps, 1) gated_rms_norm_kernel(const GatedRmsNormParams p) {
  const int lane = threadIdx.x % 32;
  const int64_t unit = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, row = unit / p.heads;
  const T* z = static_cast<const T*>(p.z) + row * p.z_stride + unit % p.heads * p.width;
  const T* weight = static_cast<const T*>(p.weight);
  const float* x = p.x + unit * p.width;
  T* out = static_cast<T*>(p.out) + unit * p.width;
  grid_begin();
  if (row >= p.rows) return;
  float squares = 0.0f;
  for (int64_t i = lane; i < p.width; i += 32) squares += x[i] * x[i];
  const float scale = 1.0f / sqrtf(warp_sum(squares) / float(p.width) + p.eps);
  for (int64_t i = lane; i < p.width; i += 32) {
    const float gate = to_float(z[i]);
    out[i] = from_float<T>(x[i] * scale * to_float(weight[i]) * (gate / (1.0f + expf(-gate))));
  }
}

cudaError_t launch_delta_net_inputs(const DeltaNetInputsParams& p, cudaStream_t stream) {
  const int64_t units = p.rows * (2 * p.key_heads + p.heads);
  return run_on_device(p, units, [&](auto type) {
    return launch_flat(delta_net_inputs_kernel<decltype(type)>, ceil_div(units, kWarps), 32 * kWarps, stream, p);
  });
}

cudaError_t launch_gated_rms_norm(const GatedRmsNormParams& p, cudaStream_t stream) {
  const int64_t units = p.rows * p.heads;
  return run_on_device(p, units, [&](auto type) {
    return launch_flat(gated_rms_norm_kernel<decltype(type)>, ceil_div(units, kWarps), 32 * kWarps, stream, p);
  });
}

}  // namespace dflash
