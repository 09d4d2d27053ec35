// embeds[b, i] = scale * embedding of row i of the block that is drafted. Rows over threads.
#include "common/row_place.h"
#include "cpu/base/parallel.h"
#include "cpu/base/vec.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
static void draft_row(const DraftRowsParams& p, int64_t index) {
  const T* x = embedding_of<T>(p, drafted_id(p, index / p.rows, index % p.rows));
  T* out = static_cast<T*>(p.embeds) + index * p.hidden;
  if (p.scale == 1.0f) {
    std::memcpy(out, x, p.hidden * sizeof(T));
    return;
  }
  int64_t c = 0;
  for (; c + kWidth <= p.hidden; c += kWidth) store(out + c, load(x + c) * p.scale);
  for (; c < p.hidden; ++c) store_one(out + c, to_float(x[c]) * p.scale);
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void draft_rows(const DraftRowsParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    p.anchor[b] = drafted_id(p, b, 0);
    for (int64_t i = 0; i < p.num_drafts; ++i) p.positions[b * p.num_drafts + i] = anchor_position(p, b) + 1 + i;
  }
  const int64_t rows = p.batch * p.rows;
  parallel_for(rows, rows * p.hidden, p.threads, [&](int64_t index) {
    p.dtype == DType::kFloat32 ? draft_row<float>(p, index) : draft_row<bf16>(p, index);
  });
}

}  // namespace dflash::DFLASH_ISA
