// Where a row of a pass stands, for CPU and GPU.
#pragma once
#include "params.h"

namespace dflash {
namespace {  // code of one instruction set must not be merged with that of another, see cpu/vec.h

struct RowPlace {
  int64_t slot;   // of the cache; one that it does not have if the row is off
  int64_t angle;  // row of the table
};

DFLASH_ANYWHERE inline int64_t nearest(int64_t x, int64_t first, int64_t last) {
  return x < first ? first : x < last ? x : last;
}

DFLASH_ANYWHERE inline int64_t load_count(const int64_t* at) {
#ifdef __CUDA_ARCH__
  return __ldcg(at);  // may come before the wait, see cuda/ptx.cuh
#else
  return *at;
#endif
}

DFLASH_ANYWHERE inline RowPlace place_of(const QkvNormRopeAppendParams& p, int64_t batch, int64_t row) {
  const int64_t context_rows = p.rows - p.q_rows, i = row - context_rows, last = p.positions - 1;
  const int64_t length = nearest(load_count(p.lengths + batch), -p.q_rows, 2 * p.capacity + p.q_rows);
  if (i < 0) {
    const int64_t live = nearest(load_count(p.num_context + batch), 0, context_rows);
    const int64_t slot = row < live ? length - live + row : -1;
    return {slot, nearest(slot, 0, last)};
  }
  const int64_t depth = p.depth ? nearest(load_count(p.depth + batch * p.q_rows + i), 0, p.q_rows) : i;
  return {length + i, nearest(length + depth, 0, last)};
}

}  // namespace
}  // namespace dflash
