// From row 0: emit the row's choice, continue at its child of that id; cut after the first stop token and to
// the room left. One warp per sequence. All lanes look up, for every row, whether its parent chose it; lane 0
// then follows these links from row 0, and the rest is accept_prefix on the rows that it visited,
// which chain_choices and chain_ids tell as a chain.
#include "cuda/base/launch.h"
#include "cuda/tree/accept.cuh"

namespace dflash {

constexpr int kWarpsPerBlock = 4;

// visited[j] = the row at depth j of the path that the choices follow; after its end, p.rows. chosen is
// scratch memory; both are [p.rows].
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

static __global__ void __launch_bounds__(32 * kWarpsPerBlock, 1)
    accept_path_kernel(const AcceptPathParams p) {
  __shared__ int chosen[kWarpsPerBlock][kMaxTreeRows], visited[kWarpsPerBlock][kMaxTreeRows];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t b = int64_t(blockIdx.x) * kWarpsPerBlock + warp;
  grid_launch_dependents();
  grid_dependency_wait();
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
