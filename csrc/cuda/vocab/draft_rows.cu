// embeds[b, i] = scale * embedding of row i of the block that is drafted. One block per row of the result, and one more
// per sequence for its anchor and positions.
#include "common/row_place.h"
#include "cuda/base/device.cuh"

namespace dflash {

constexpr int kThreads = 256;

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kThreads, 1) draft_rows_kernel(const DraftRowsParams p) {
  const int64_t b = blockIdx.y, row = blockIdx.x;
  grid_dependency_wait();
  // Not before: what is launched from here on may read early what the last step has left, see ptx.cuh.
  grid_launch_dependents();
  if (row == p.rows) {
    if (threadIdx.x == 0) p.anchor[b] = drafted_id(p, b, 0);
    for (int64_t i = threadIdx.x; i < p.num_drafts; i += kThreads)
      p.positions[b * p.num_drafts + i] = anchor_position(p, b) + 1 + i;
    return;
  }
  const T* x = embedding_of<T>(p, drafted_id(p, b, row));
  T* out = static_cast<T*>(p.embeds) + (b * p.rows + row) * p.hidden;
  for (int64_t i = threadIdx.x * kWidth; i < p.hidden; i += kThreads * kWidth) {
    float v[kWidth];
    load<T, kWidth>(x + i, v);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) v[e] *= p.scale;
    store<T, kWidth>(out + i, v);
  }
}

cudaError_t launch_draft_rows(const DraftRowsParams& p, cudaStream_t stream) {
  return run_on_device(p, p.batch, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = kPer16<T>;
    const bool wide = aligned16(p.table, p.mask_embedding, p.embeds, p.hidden * sizeof(T), p.table_stride * sizeof(T));
    return launch_overlapping(wide ? draft_rows_kernel<T, kWidth> : draft_rows_kernel<T, 1>,
                              dim3(unsigned(p.rows + 1), unsigned(p.batch)), dim3(kThreads), 0, stream, p);
  });
}

}  // namespace dflash
