// m = 1 + |longest prefix with block_ids[j + 1] == posterior[j]|, cut after the first stop token and to the
// room left; tokens[length + 1 ..] = posterior[0 .. m), length += m, num_context = m. One warp per sequence.
#include "cuda/base/launch.h"
#include "cuda/tree/accept.cuh"

namespace dflash {

constexpr int kWarpsPerBlock = 4;

static __global__ void __launch_bounds__(32 * kWarpsPerBlock, 1)
    accept_prefix_kernel(const AcceptPrefixParams p) {
  const int64_t b = int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  grid_launch_dependents();
  grid_dependency_wait();
  if (b >= p.batch) return;
  const int64_t *ids = p.block_ids + b * p.rows, *posterior = p.posterior + b * p.rows;
  emit(
      p, b, [&](int64_t j) { return j < p.rows ? posterior[j] : -1; },
      [&](int64_t j) { return j + 1 < p.rows && ids[j + 1] == posterior[j]; });
}

cudaError_t launch_accept_prefix(const AcceptPrefixParams& p, cudaStream_t stream) {
  return run_on_device(p, p.batch, [&] {
    return launch_flat(accept_prefix_kernel, ceil_div(p.batch, kWarpsPerBlock), 32 * kWarpsPerBlock, stream,
                       p);
  });
}

}  // namespace dflash
