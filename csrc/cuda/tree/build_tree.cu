// Best-first (best_first.h), one warp per sequence. The frontier lies in shared memory: a node that is taken leaves its
// slot to its next sibling, and its first child gets a new one. Each lane looks at its slots, then reductions over the
// warp compare the parts of the key.
#include "common/best_first.h"
#include "cuda/vocab/logits.cuh"

namespace dflash {

constexpr int64_t kSharedCandidates = 3072;  // 36 KB; more are read from global memory
constexpr unsigned kLast = 0xffffffffu;

// The slot of the best node of a warp's frontier, -1 if it is empty.
static __device__ int best_slot(const Node* frontier, int slots) {
  const int lane = threadIdx.x;
  int slot = -1;
  for (int i = lane; i < slots; i += 32)
    if (frontier[i].parent >= 0 && (slot < 0 || comes_before(frontier[i], frontier[slot]))) slot = i;
  const unsigned key = slot < 0 ? 0 : key_of(frontier[slot].score);
  const unsigned top = __reduce_max_sync(kAllLanes, key);
  if (top == 0) return -1;
  bool tied = key == top;
  const auto keep_lowest = [&](unsigned part) {
    const unsigned lowest = __reduce_min_sync(kAllLanes, tied ? part : kLast);
    tied = tied && part == lowest;
  };
  if (__popc(__ballot_sync(kAllLanes, tied)) > 1) {
    const Node node = slot < 0 ? Node{} : frontier[slot];
    keep_lowest(unsigned(node.depth));
    keep_lowest(unsigned(uint64_t(node.id) >> 32));
    keep_lowest(unsigned(node.id));
    keep_lowest(unsigned(node.parent));
  }
  return __shfl_sync(kAllLanes, slot, __ffs(__ballot_sync(kAllLanes, tied)) - 1);
}

static __global__ void __launch_bounds__(32, 1) build_tree_kernel(const BuildTreeParams p, bool in_shared) {
  __shared__ Node frontier[kMaxTreeRows];  // a free slot has parent -1
  __shared__ float row_scores[kMaxTreeRows];
  __shared__ uint64_t row_ancestors[kMaxTreeRows][kMaxTreeRows / 64];
  const int lane = threadIdx.x, words = int(ceil_div(p.rows, 64));
  const int64_t b = blockIdx.x, candidates = p.depths * p.count;
  grid_begin();

  // 1. The candidates
  const int64_t* ids = p.ids + b * candidates;
  const float* scores = p.scores + b * candidates;
  if (in_shared) {
    int64_t* near_ids = shared<int64_t>();
    float* near_scores = reinterpret_cast<float*>(near_ids + candidates);
    for (int64_t i = lane; i < candidates; i += 32) near_ids[i] = ids[i], near_scores[i] = scores[i];
    ids = near_ids, scores = near_scores;
  }

  // 2. The root
  const auto set_row = [&](int64_t row, const Node& node) {
    const int64_t at = b * p.rows + row;
    if (lane == 0) {
      p.tree_ids[at] = node.id, p.parents[at] = node.parent, p.depth[at] = node.depth;
      p.tree_scores[at] = row_scores[row] = node.score;
    }
    if (lane < words) {
      uint64_t bits = node.parent < 0 ? 0 : row_ancestors[node.parent][lane];
      if (row / 64 == lane) bits |= uint64_t(1) << row % 64;
      row_ancestors[row][lane] = bits;
      p.ancestors[at * words + lane] = int64_t(bits);
    }
    __syncwarp();
  };
  // Puts the best sibling after (run, id) at `level` into a slot; leaves the slot free if there is none.
  const auto put = [&](int slot, int parent, int level, int run, int64_t id) {
    Node node{0.0f, level + 1, 0, parent, 0};
    const int64_t first = level * p.count;
    const Siblings siblings{ids + first, scores + first, p.count, row_scores[parent]};
    if (level >= p.depths || !siblings.next(run, id, node)) node.parent = -1;
    frontier[slot] = node;
  };
  set_row(0, {0.0f, 0, p.anchor[b], -1, 0});
  if (lane == 0) put(0, 0, 0, 0, -1);
  __syncwarp();

  // 3. Row after row; `row` slots are in use
  int64_t row = 1;
  for (; row < p.rows; ++row) {
    const int slot = best_slot(frontier, int(row));
    if (slot < 0) break;
    const Node node = frontier[slot];
    set_row(row, node);
    if (lane == 0) put(slot, node.parent, node.depth - 1, node.run, node.id);
    if (lane == 1) put(int(row), int(row), node.depth, 0, -1);
    __syncwarp();
  }

  // 4. Pads
  for (; row < p.rows; ++row) set_row(row, {kNoScore, 0, -1, -1, 0});
}

cudaError_t launch_build_tree(const BuildTreeParams& p, cudaStream_t stream) {
  const int64_t candidates = p.depths * p.count;
  const bool in_shared = candidates <= kSharedCandidates;
  const size_t bytes = in_shared ? candidates * (sizeof(int64_t) + sizeof(float)) : 0;
  return run_on_device(p, p.batch, [&] {
    return launch_overlapping(build_tree_kernel, dim3(unsigned(p.batch)), dim3(32), bytes, stream, p, in_shared);
  });
}

}  // namespace dflash
