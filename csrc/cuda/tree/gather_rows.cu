// out[b, j] = x[b, path[b, j]]. A block copies a slice of a row, one piece per thread.
#include "cuda/base/device.cuh"
#include "cuda/base/launch.h"

namespace dflash {

constexpr int kThreads = 256;

// kWidth is how many bytes an access moves: 16 or one.
template <int kWidth>
static __global__ void __launch_bounds__(kThreads, 1)
    gather_rows_kernel(const GatherRowsParams p, const int64_t slices) {
  const int64_t index = blockIdx.x / slices, b = index / p.path_rows, j = index % p.path_rows;
  const int64_t begin = (blockIdx.x % slices * kThreads + threadIdx.x) * kWidth;
  grid_dependency_wait();
  // Not before: what is launched from here on may read early what the kernels ahead have left, see ptx.cuh.
  grid_launch_dependents();
  if (begin >= p.row_bytes) return;
  const int64_t row = max(int64_t(0), min(p.path[index], p.rows - 1));
  copy<uint8_t, kWidth>(static_cast<const uint8_t*>(p.x) + (b * p.rows + row) * p.row_bytes + begin,
                        static_cast<uint8_t*>(p.out) + (b * p.out_rows + j) * p.row_bytes + begin);
}

cudaError_t launch_gather_rows(const GatherRowsParams& p, cudaStream_t stream) {
  const bool wide = aligned16(p.x, p.out, p.row_bytes);
  const int64_t slices = ceil_div(p.row_bytes, kThreads * (wide ? 16 : 1));
  return run_on_device(p, p.batch * p.path_rows * p.row_bytes, [&] {
    return launch_flat(wide ? gather_rows_kernel<16> : gather_rows_kernel<1>, p.batch * p.path_rows * slices,
                       kThreads, stream, p, slices);
  });
}

}  // namespace dflash
