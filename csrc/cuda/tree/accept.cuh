// What accept_prefix and accept_path share: a warp emits the target's choices along a path of rows, lane j on
// the path's rows j, j + 32, ..: a ballot finds the first after which emission ends.
#pragma once
#include "cuda/base/device.cuh"

namespace dflash {

template <typename Params>
static __device__ bool is_stop(const Params& p, int64_t b, int64_t token) {
  for (int64_t i = 0; i < p.num_stop_tokens; ++i)
    if (p.stop_token_ids[b * p.num_stop_tokens + i] == token) return true;
  return false;
}

// Emits and advances sequence b, unless it is done; returns how many tokens. choice(j) is that of the path's
// row j, negative past its end; continues(j) says whether there is a row j + 1.
template <typename Params, typename Choice, typename Continues>
static __device__ int64_t emit(const Params& p, int64_t b, const Choice& choice, const Continues& continues) {
  const int lane = threadIdx.x % 32;
  const int64_t done = p.done[b], length = p.length[b], limit = min(p.limits[b], p.capacity);
  const int64_t room = done != kRunning || length < 0 || length >= limit ? 0 : limit - 1 - length;
  int64_t* tokens = p.tokens + b * p.capacity + (room ? length + 1 : 0);
  int64_t count = 0, state = kLimit;
  for (int64_t begin = 0; begin < room; begin += 32) {  // the last row always ends emission, hence the loop
    const int64_t j = begin + lane, token = j < room ? choice(j) : -1;
    const bool valid = token >= 0, stop = valid && is_stop(p, b, token);
    const bool more = valid && !stop && j + 1 < room && continues(j);
    const int last = __ffs(__ballot_sync(kAllLanes, !more)) - 1;  // -1: all continue
    const bool last_valid = __ballot_sync(kAllLanes, valid) >> (last & 31) & 1;
    const bool last_stop = __ballot_sync(kAllLanes, stop) >> (last & 31) & 1;
    const int emitted = last < 0 ? 32 : last + last_valid;
    if (lane < emitted) tokens[j] = token;
    count += emitted;
    if (last >= 0) {
      state = !last_valid ? kInvalid : last_stop ? kStop : count >= room ? kLimit : kRunning;
      break;
    }
  }
  __syncwarp();  // every lane has read the state
  if (lane == 0) {
    p.num_context[b] = count;
    if (done == kRunning) p.length[b] = length + count, p.done[b] = state;
  }
  return count;
}

}  // namespace dflash
