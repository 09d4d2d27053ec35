// A warp per sequence emits the target's choices along a path of rows, lane j on the path's rows j, j + 32, ..: a
// ballot finds the first after which emission ends. The result is cut after the first stop token and to the room left.
#include "cuda/base/device.cuh"

namespace dflash {

constexpr int kWarpsPerBlock = 4;

template <typename Params>
static __device__ bool is_stop(const Params& p, int64_t b, int64_t token) {
  for (int64_t i = 0; i < p.num_stop_tokens; ++i)
    if (p.stop_token_ids[b * p.num_stop_tokens + i] == token) return true;
  return false;
}

// Emits and advances sequence b, unless it is done; returns how many tokens. choice(j) is that of the path's row j,
// negative past its end; continues(j) says whether there is a row j + 1.
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

// ---- a chain: m = 1 + |longest prefix with block_ids[j + 1] == posterior[j]|;
// tokens[length + 1 ..] = posterior[0 .. m), length += m, num_context = m

static __global__ void __launch_bounds__(32 * kWarpsPerBlock, 1) accept_prefix_kernel(const AcceptPrefixParams p) {
  const int64_t b = int64_t(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  grid_begin();
  if (b >= p.batch) return;
  const int64_t *ids = p.block_ids + b * p.rows, *posterior = p.posterior + b * p.rows;
  emit(
      p, b, [&](int64_t j) { return j < p.rows ? posterior[j] : -1; },
      [&](int64_t j) { return j + 1 < p.rows && ids[j + 1] == posterior[j]; });
}

cudaError_t launch_accept_prefix(const AcceptPrefixParams& p, cudaStream_t stream) {
  return run_on_device(p, p.batch, [&] {
    return launch_flat(accept_prefix_kernel, ceil_div(p.batch, kWarpsPerBlock), 32 * kWarpsPerBlock, stream, p);
  });
}

// ---- a tree: from row 0, emit the row's choice and continue at its child of that id. All lanes look up, for every
// row, whether its parent chose it; lane 0 then follows these links from row 0. The rows that it visited, which
// chain_choices and chain_ids tell as a chain, are accepted as those of a chain are.

// visited[j] = the row at depth j of the path that the choices follow; after its end, p.rows. chosen is scratch memory;
// both are [p.rows].
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
    for (int j = 0, row = 0; j < rows; ++j) {
      visited[j] = row;
      if (row < rows) row = chosen[row];
    }
  }
  __syncwarp();
}

static __global__ void __launch_bounds__(32 * kWarpsPerBlock, 1) accept_path_kernel(const AcceptPathParams p) {
  __shared__ int chosen[kWarpsPerBlock][kMaxTreeRows], visited[kWarpsPerBlock][kMaxTreeRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t b = int64_t(blockIdx.x) * kWarpsPerBlock + warp;
  grid_begin();
  if (b >= p.batch) return;
  walk(p, b, chosen[warp], visited[warp]);
  const int64_t *ids = p.ids + b * p.rows, *choices = p.choices + b * p.rows;
  const auto row_at = [&](int64_t j) { return j < min(p.rows, p.path_rows) ? visited[warp][j] : p.rows; };
  const auto choice_at = [&](int64_t j) { return row_at(j) < p.rows ? choices[row_at(j)] : -1; };
  const int64_t count = emit(p, b, choice_at, [&](int64_t j) { return row_at(j + 1) < p.rows; });

  for (int64_t j = lane; j < p.path_rows; j += 32) {
    const int64_t at = b * p.path_rows + j;
    const bool drafted = j <= count && row_at(j) < p.rows;
    p.path[at] = j < count ? row_at(j) : j;
    p.chain_choices[at] = j < count ? choice_at(j) : -1;
    p.chain_ids[at] = drafted ? ids[row_at(j)] : -1;
  }
}

cudaError_t launch_accept_path(const AcceptPathParams& p, cudaStream_t stream) {
  return run_on_device(p, p.batch, [&] {
    return launch_flat(accept_path_kernel, ceil_div(p.batch, kWarpsPerBlock), 32 * kWarpsPerBlock, stream, p);
  });
}

}  // namespace dflash
