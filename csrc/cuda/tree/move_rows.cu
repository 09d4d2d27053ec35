// Slot first[b] + path[b, j] moves to slot first[b] + j, in the caches of all layers. One warp per head of a cache:
// lane j finds where row j comes from, then every lane carries its columns of up to 16 rows through registers, so that
// all of their loads are in flight at once.
#include "cuda/base/device.cuh"

namespace dflash {

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

// ---- gather_rows: out[b, j] = x[b, path[b, j]]. A block copies a slice of a row, one piece per thread.

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
