// Draft trees and what becomes of a block, as cpu/tree/tree.cpp has it.
#include "common/best_first.h"
#include "cuda/vocab/logits.cuh"

namespace dflash {

// ---- build_tree
// Best-first (best_first.h), one warp per sequence. The frontier lies in shared memory: a node that is taken leaves its
// slot to its next sibling, and its first child gets a new one. Each lane looks at its slots, then reductions over the
// warp compare the parts of the key.

constexpr int64_t kSharedBytes = 36 << 10;  // of candidates; more are read from global memory
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
  __shared__ int row_list[kMaxTreeRows];  // of its children, at their depth
  __shared__ uint64_t row_ancestors[kMaxTreeRows][kMaxTreeRows / 64];
  const int lane = threadIdx.x, words = int(ceil_div(p.rows, 64));
  const bool linked = p.order != nullptr;
  const int64_t b = blockIdx.x, candidates = p.depths * p.count, scored = candidates * (linked ? p.count : 1);
  grid_begin();

  // 1. The candidates
  const int64_t* ids = p.ids + b * candidates;
  const float* scores = p.scores + b * scored;
  const uint8_t* order = linked ? p.order + b * scored : nullptr;
  if (in_shared) {
    int64_t* near_ids = shared<int64_t>();
    float* near_scores = reinterpret_cast<float*>(near_ids + candidates);
    uint8_t* near_order = reinterpret_cast<uint8_t*>(near_scores + scored);
    for (int64_t i = lane; i < candidates; i += 32) near_ids[i] = ids[i];
    for (int64_t i = lane; i < scored; i += 32) {
      near_scores[i] = scores[i];
      if (linked) near_order[i] = order[i];
    }
    ids = near_ids, scores = near_scores, order = linked ? near_order : nullptr;
  }

  // 2. The root
  const auto set_row = [&](int64_t row, const Node& node) {
    const int64_t at = b * p.rows + row;
    if (lane == 0) {
      p.tree_ids[at] = node.id, p.parents[at] = node.parent, p.depth[at] = node.depth;
      p.tree_scores[at] = row_scores[row] = node.score;
      row_list[row] = node.place;
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
    Node node{0.0f, level + 1, 0, parent, 0, 0};
    const int64_t first = level * p.count, own = linked ? (first + row_list[parent]) * p.count : first;
    const Siblings siblings{ids + first, scores + own, linked ? order + own : nullptr, p.count, row_scores[parent]};
    if (level >= p.depths || !siblings.next(run, id, node)) node.parent = -1;
    frontier[slot] = node;
  };
  set_row(0, {0.0f, 0, p.anchor[b], -1, 0, 0});
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
  for (; row < p.rows; ++row) set_row(row, {kNoScore, 0, -1, -1, 0, 0});
}

cudaError_t launch_build_tree(const BuildTreeParams& p, cudaStream_t stream) {
  const int64_t candidates = p.depths * p.count;
  const int64_t bytes = candidates * (p.order == nullptr ? 12 : 8 + p.count * 5);
  const bool in_shared = bytes <= kSharedBytes;
  return run_on_device(p, p.batch, [&] {
    return launch_overlapping(build_tree_kernel, dim3(unsigned(p.batch)), dim3(32), in_shared ? bytes : 0, stream, p,
                              in_shared);
  });
}

// ---- accept_prefix and accept_path
// A warp per sequence emits the target's choices along a path of rows, lane j on the path's rows j, j + 32, ..: a
// ballot finds the first after which emission ends. The result is cut after the first stop token and to the room left.

constexpr int kWarpsPerBlock = 4;

// Emits and advances sequence b, unless it is done; returns how many tokens. choice(j) is that of the path's row j,
// negative past its end; continues(j) says whether there is a row j + 1.
template <typename Choice, typename Continues>
static __device__ int64_t emit(const Emission& p, int64_t b, const Choice& choice, const Continues& continues) {
  const int lane = threadIdx.x % 32;
  const int64_t done = p.done[b], length = p.length[b], limit = min(p.limits[b], p.capacity);
  const int64_t room = done != kRunning || length < 0 || length >= limit ? 0 : limit - 1 - length;
  int64_t* tokens = p.tokens + b * p.capacity + (room ? length + 1 : 0);
  int64_t count = 0, state = kLimit;
  for (int64_t begin = 0; begin < room; begin += 32) {  // the last row always ends emission, hence the loop
    const int64_t j = begin + lane, token = j < room ? choice(j) : -1;
    const bool valid = token >= 0, stop = valid && p.stops(b, token);
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

// A tree: all lanes look up, for every row, whether its parent chose it; lane 0 then follows these links from row 0.
// The rows that it visited are accepted as those of a chain are.

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

// ---- compact_kv
// One warp per head of a cache: lane j finds where row j comes from, then every lane carries its columns of up to 16
// rows through registers, so that all of their loads are in flight at once.

constexpr int kWarps = 4;
constexpr int kRows = 16;              // per trip through the registers
constexpr int kCachesPerLaunch = 224;  // what fits into the 4 KB of a kernel's arguments: 112 layers

struct Cache {
  void* data;
  int32_t heads;
  int32_t row_bytes;
};
struct Caches {
  Cache of[kCachesPerLaunch];
};

// kWidth is how many bytes an access moves: 16 or one.
template <int kWidth>
static __global__ void __launch_bounds__(32 * kWarps, 1)
    compact_kv_kernel(const CompactKvParams p, const __grid_constant__ Caches caches) {
  const Cache cache = caches.of[blockIdx.y];
  const int64_t unit = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, b = unit / max(cache.heads, 1);
  const int lane = threadIdx.x % 32, step = 32 * kWidth;
  uint8_t* head = static_cast<uint8_t*>(cache.data) + unit * p.capacity * cache.row_bytes;
  grid_begin();
  if (unit >= p.batch * cache.heads) return;
  const int64_t count = min(p.counts[b], p.path_rows);
  for (int64_t begin = 0; begin < count; begin += kRows) {
    const int64_t from = lane < kRows && begin + lane < count ? p.source(b, begin + lane) : -1;
    const unsigned moves = __ballot_sync(kAllLanes, from >= 0);
    if (moves == 0) continue;
    uint8_t* to = head + p.target(b, begin) * cache.row_bytes;
    for (int column = lane * kWidth; column - lane * kWidth < cache.row_bytes; column += step) {
      const bool inside = column < cache.row_bytes;
      Packed<uint8_t, kWidth> held[kRows]{};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int64_t slot = __shfl_sync(kAllLanes, from, r);
        if (slot >= 0 && inside) held[r] = load_packed<uint8_t, kWidth>(head + slot * cache.row_bytes + column);
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r)
        if ((moves >> r & 1) && inside) store_packed<uint8_t, kWidth>(to + r * cache.row_bytes + column, held[r]);
    }
  }
}

cudaError_t launch_compact_kv(const CompactKvParams& p, cudaStream_t stream) {
  return run_on_device(p, p.batch * p.path_rows, [&] {
    for (int64_t begin = 0; begin < p.num_caches; begin += kCachesPerLaunch) {
      const int64_t number = min(p.num_caches - begin, int64_t(kCachesPerLaunch));
      Caches caches{};
      int64_t heads = 0;
      bool wide = true;
      for (int64_t i = 0; i < number; ++i) {
        caches.of[i] = {p.caches[begin + i], int32_t(p.heads[begin + i]), int32_t(p.row_bytes[begin + i])};
        heads = max(heads, p.heads[begin + i]);
        wide &= aligned16(p.caches[begin + i], p.row_bytes[begin + i]);
      }
      if (heads == 0) continue;
      const dim3 grid(unsigned(ceil_div(p.batch * heads, kWarps)), unsigned(number));
      const cudaError_t error = launch_overlapping(wide ? compact_kv_kernel<16> : compact_kv_kernel<1>, grid,
                                                   dim3(32 * kWarps), 0, stream, p, caches);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

// ---- gather_rows. A block copies a slice of a row, one piece per thread.

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
    return launch_flat(wide ? gather_rows_kernel<16> : gather_rows_kernel<1>, p.batch * p.path_rows * slices, kThreads,
                       stream, p, slices);
  });
}

}  // namespace dflash
