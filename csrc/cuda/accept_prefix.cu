// m = 1 + |longest prefix with block_ids[j + 1] == posterior[j]|, cut after the first stop token and to the
// room left; tokens[length + 1 ..] = posterior[0 .. m), length += m, num_context = m. One warp per sequence,
// lane j on rows j, j + 32, ..: a ballot finds the first row after which emission ends.
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace dflash {

constexpr int kWarpsPerBlock = 4;

static __device__ bool is_stop(const AcceptPrefixParams& p, int64_t token) {
  for (int64_t i = 0; i < p.num_stop_tokens; ++i)
    if (p.stop_token_ids[i] == token) return true;
  return false;
}

static __global__ void __launch_bounds__(32 * kWarpsPerBlock, 1)
    accept_prefix_kernel(const AcceptPrefixParams p) {
  const int64_t b = int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  grid_launch_dependents();
  grid_dependency_wait();
  if (b >= p.batch) return;
  if (p.done[b] != kRunning) {
    if (lane == 0) p.num_context[b] = 0;
    return;
  }
  const int64_t* block_ids = p.block_ids + b * p.rows;
  const int64_t* posterior = p.posterior + b * p.rows;
  const int64_t length = p.length[b], limit = max(int64_t(0), min(p.limits[b], p.capacity));
  const int64_t room = length < 0 || length >= limit ? 0 : limit - 1 - length;
  int64_t* tokens = p.tokens + b * p.capacity + (room ? length + 1 : 0);

  int64_t count = 0, state = kLimit;
  for (int64_t begin = 0; begin < room; begin += 32) {  // the last row always ends emission, hence the loop
    const int64_t j = begin + lane;
    const bool valid = j < p.rows && j < room && posterior[j] >= 0;
    const bool stop = valid && is_stop(p, posterior[j]);
    const bool more = valid && !stop && j + 1 < p.rows && j + 1 < room && block_ids[j + 1] == posterior[j];
    const int last = __ffs(__ballot_sync(kAllLanes, !more)) - 1;  // -1: all continue
    const bool last_valid = __ballot_sync(kAllLanes, valid) >> (last & 31) & 1;
    const bool last_stop = __ballot_sync(kAllLanes, stop) >> (last & 31) & 1;
    const int emitted = last < 0 ? 32 : last + last_valid;
    if (lane < emitted) tokens[j] = posterior[j];
    count += emitted;
    if (last >= 0) {
      state = !last_valid ? kInvalid : last_stop ? kStop : count >= room ? kLimit : kRunning;
      break;
    }
  }
  if (lane == 0) {
    p.length[b] = length + count;
    p.num_context[b] = count;
    p.done[b] = state;
  }
}

cudaError_t launch_accept_prefix(const AcceptPrefixParams& p, cudaStream_t stream) {
  if (p.batch == 0) return cudaSuccess;
  const DeviceScope scope(p.device);
  if (scope.error() != cudaSuccess) return scope.error();
  return launch_overlapping(accept_prefix_kernel, dim3(unsigned(ceil_div(p.batch, kWarpsPerBlock))),
                            dim3(32 * kWarpsPerBlock), 0, stream, p);
}

}  // namespace dflash
