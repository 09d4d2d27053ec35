// out = gate / (1 + exp(-gate)) * up, and out = x / (1 + exp(-gate)). One thread per 16 bytes of the result.
#include "cuda/base/device.cuh"

namespace dflash {

constexpr int kThreads = 256;

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kThreads, 1) silu_mul_kernel(const SiluMulParams p) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  const T* gate = static_cast<const T*>(p.gate_up) + i + i / p.width * p.width;
  grid_begin();
  if (i >= p.rows * p.width) return;
  float g[kWidth], u[kWidth];
  load<T, kWidth>(gate, g);
  load<T, kWidth>(gate + p.width, u);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) g[e] = silu_mul(g[e], u[e]);
  store<T, kWidth>(static_cast<T*>(p.out) + i, g);
}

cudaError_t launch_silu_mul(const SiluMulParams& p, cudaStream_t stream) {
  return run_on_device(p, p.rows * p.width, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = kPer16<T>;
    const bool wide = aligned16(p.gate_up, p.out, p.width * sizeof(T));
    const int64_t blocks = ceil_div(p.rows * p.width, kThreads * (wide ? kWidth : 1));
    return launch_flat(wide ? silu_mul_kernel<T, kWidth> : silu_mul_kernel<T, 1>, blocks, kThreads, stream, p);
  });
}

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kThreads, 1) sigmoid_mul_kernel(const SigmoidMulParams p) {
  const int64_t i = (int64_t(blockIdx.x) * kThreads + threadIdx.x) * kWidth;
  const int64_t head = i / p.width, row = head / p.heads;
  const T* gate =
      static_cast<const T*>(p.gate) + row * p.gate_stride_row + head % p.heads * p.gate_stride_head + i % p.width;
  grid_begin();
  if (i >= p.rows * p.heads * p.width) return;
  float x[kWidth], g[kWidth];
  load<T, kWidth>(static_cast<const T*>(p.x) + i, x);
  load<T, kWidth>(gate, g);
#pragma unroll
  for (int e = 0; e < kWidth; ++e) x[e] = x[e] / (1.0f + expf(-g[e]));
  store<T, kWidth>(static_cast<T*>(p.out) + i, x);
}

cudaError_t launch_sigmoid_mul(const SigmoidMulParams& p, cudaStream_t stream) {
  const int64_t elements = p.rows * p.heads * p.width;
  return run_on_device(p, elements, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = kPer16<T>;
    const bool wide = aligned16(p.x, p.gate, p.out, p.width * sizeof(T), p.gate_stride_row * sizeof(T),
                                p.gate_stride_head * sizeof(T));
    const int64_t blocks = ceil_div(elements, kThreads * (wide ? kWidth : 1));
    return launch_flat(wide ? sigmoid_mul_kernel<T, kWidth> : sigmoid_mul_kernel<T, 1>, blocks, kThreads, stream, p);
  });
}

}  // namespace dflash
