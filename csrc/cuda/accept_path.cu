// From row 0: emit the row's choice, continue at its child of that id; cut after the first stop token and to
// the room left. One warp per sequence. All lanes look up, for every row, whether its parent chose it; lane 0
// then follows these links from row 0, and the rest is accept_prefix on the rows that it visited.
#include "cuda/device.cuh"
#include "cuda/launch.h"

namespace dflash {

constexpr int kWarpsPerBlock = 4;

static __device__ bool is_stop(const AcceptPathParams& p, int64_t token) {
  for (int64_t i = 0; i < p.num_stop_tokens; ++i)
    if (p.stop_token_ids[i] == token) return true;
  return false;
}

// visited[j] = the row at depth j of the path that the choices follow; after its end, p.rows. chosen [rows]
// is scratch memory.
static __device__ void walk(const AcceptPathParams& p, int64_t b, int* chosen, int* visited) {
  const int lane = threadIdx.x % 32, rows = int(p.rows);
  const int64_t *ids = p.ids + b * p.rows, *parents = p.parents + b * p.rows;
  const int64_t* choices = p.choices + b * p.rows;
  for (int row = lane; row < rows; row += 32) chosen[row] = rows;
  __syncwarp();
  for (int row = lane; row < rows; row += 32) {
    const int64_t parent = parents[row], id = ids[row];
    if (parent >= 0 && parent < row && id >= 0 && choices[parent] == id) atomicMin(chosen + parent, row);
  }
  __syncwarp();
  if (lane == 0) {
    for (int j = 0, row = 0; j < int(p.path_rows); ++j) {
      visited[j] = row;
      if (row < rows) row = chosen[row];
    }
  }
  __syncwarp();
}

static __global__ void __launch_bounds__(32 * kWarpsPerBlock, 1)
    accept_path_kernel(const AcceptPathParams p) {
  const int64_t b = int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  int* chosen = shared<int>() + threadIdx.x / 32 * (p.rows + p.path_rows);
  int* visited = chosen + p.rows;
  grid_launch_dependents();
  grid_dependency_wait();
  if (b >= p.batch) return;
  const int64_t done = p.done[b], length = p.length[b];
  const int64_t limit = max(int64_t(0), min(p.limits[b], p.capacity));
  const int64_t room = done != kRunning || length < 0 || length >= limit ? 0 : limit - 1 - length;
  if (room) walk(p, b, chosen, visited);

  const int64_t* choices = p.choices + b * p.rows;
  int64_t* tokens = p.tokens + b * p.capacity + (room ? length + 1 : 0);
  int64_t* path = p.path + b * p.path_rows;
  int64_t count = 0, state = kLimit;
  for (int64_t begin = 0; begin < room; begin += 32) {  // the last visited row always ends emission
    const int64_t j = begin + lane;
    const int row = j < p.path_rows ? visited[j] : int(p.rows);
    const int64_t choice = row < p.rows ? choices[row] : -1;
    const bool valid = choice >= 0 && j < room;
    const bool stop = valid && is_stop(p, choice);
    const bool more = valid && !stop && j + 1 < p.path_rows && j + 1 < room && visited[j + 1] < p.rows;
    const int last = __ffs(__ballot_sync(kAllLanes, !more)) - 1;  // -1: all continue
    const bool last_valid = __ballot_sync(kAllLanes, valid) >> (last & 31) & 1;
    const bool last_stop = __ballot_sync(kAllLanes, stop) >> (last & 31) & 1;
    const int emitted = last < 0 ? 32 : last + last_valid;
    if (lane < emitted) tokens[j] = choice, path[j] = row;
    count += emitted;
    if (last >= 0) {
      state = !last_valid ? kInvalid : last_stop ? kStop : count >= room ? kLimit : kRunning;
      break;
    }
  }
  for (int64_t j = count + lane; j < p.path_rows; j += 32) path[j] = j;
  if (lane == 0) {
    p.num_context[b] = count;
    if (done == kRunning) {
      p.length[b] = length + count;
      p.done[b] = state;
    }
  }
}

cudaError_t launch_accept_path(const AcceptPathParams& p, cudaStream_t stream) {
  if (p.batch == 0) return cudaSuccess;
  const DeviceScope scope(p.device);
  if (scope.error() != cudaSuccess) return scope.error();
  return launch_overlapping(accept_path_kernel, dim3(unsigned(ceil_div(p.batch, kWarpsPerBlock))),
                            dim3(32 * kWarpsPerBlock), kWarpsPerBlock * (p.rows + p.path_rows) * sizeof(int),
                            stream, p);
}

}  // namespace dflash
