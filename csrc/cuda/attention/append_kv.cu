// cache[b, h, positions[b, r]] = new[b, h, r] for keys and values. One warp per head of a row.
#include "cuda/base/device.cuh"
#include "cuda/base/launch.h"

namespace dflash {

constexpr int kWarps = 4;

// T is any type as wide as an element; the kernel only copies it.
template <typename T, int kWidth>
static __global__ void __launch_bounds__(32 * kWarps, 1) append_kv_kernel(const AppendKvParams p) {
  const int64_t heads = 2 * p.num_kv_heads;
  const int64_t unit = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, index = unit / heads;
  const bool is_value = unit % heads >= p.num_kv_heads;
  const int64_t b = index / p.rows, row = index % p.rows, head = unit % p.num_kv_heads;
  const int64_t d = is_value ? p.v_head_dim : p.head_dim;
  const T* from = is_value ? static_cast<const T*>(p.value) + b * p.v_stride_batch + head * p.v_stride_head +
                                 row * p.v_stride_row
                           : static_cast<const T*>(p.key) + b * p.k_stride_batch + head * p.k_stride_head +
                                 row * p.k_stride_row;
  const int64_t begin = threadIdx.x % 32 * kWidth;
  grid_launch_dependents();
  grid_dependency_wait();
  if (index >= p.batch * p.rows) return;
  const int64_t position = p.positions[index];
  Packed<T, kWidth> first{};  // requested before the position is used
  if (begin < d) first = load_packed<T, kWidth>(from + begin);
  if (position < 0 || position >= p.capacity) return;
  const int64_t slot = (b * p.num_kv_heads + head) * p.capacity + position;
  T* to = static_cast<T*>(is_value ? p.v_cache : p.k_cache) + slot * d;
  if (begin < d) store_packed<T, kWidth>(to + begin, first);
  for (int64_t i = begin + 32 * kWidth; i < d; i += 32 * kWidth) copy<T, kWidth>(from + i, to + i);
}

cudaError_t launch_append_kv(const AppendKvParams& p, cudaStream_t stream) {
  const int64_t units = p.batch * p.rows * 2 * p.num_kv_heads;
  return run_on_device(p, units, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = kPer16<T>;
    constexpr int64_t size = sizeof(T);
    const bool wide = aligned16(p.key, p.value, p.k_cache, p.v_cache, p.head_dim * size, p.v_head_dim * size,
                                p.k_stride_batch * size, p.k_stride_head * size, p.k_stride_row * size,
                                p.v_stride_batch * size, p.v_stride_head * size, p.v_stride_row * size);
    return launch_flat(wide ? append_kv_kernel<T, kWidth> : append_kv_kernel<T, 1>, ceil_div(units, kWarps),
                       32 * kWarps, stream, p);
  });
}

}  // namespace dflash
