// Which row is meant, for CPU and GPU: of a cache and a table of angles, of a tensor with rows put in front, of a table
// of embeddings.
#pragma once
#include "binding/params.h"

namespace dflash {
namespace {  // code of one instruction set must not be merged with that of another, see cpu/base/vec.h

struct RowPlace {
  int64_t slot;   // of the cache; one that it does not have if the row is off
  int64_t angle;  // row of the table
};

DFLASH_ANYWHERE inline int64_t nearest(int64_t x, int64_t first, int64_t last) {
  return x < first ? first : x < last ? x : last;
}

DFLASH_ANYWHERE inline int64_t load_count(const int64_t* at) {
#ifdef __CUDA_ARCH__
  return __ldcg(at);  // may come before the wait, see cuda/base/ptx.cuh
#else
  return *at;
#endif
}

DFLASH_ANYWHERE inline RowPlace place_of(const QkvNormRopeAppendParams& p, int64_t batch, int64_t row) {
  const int64_t context_rows = p.rows - p.q_rows, i = row - context_rows, last = p.positions - 1;
  const int64_t length = nearest(load_count(p.lengths + batch), -p.q_rows, 2 * p.capacity + p.q_rows);
  const int64_t origin = p.origin ? nearest(load_count(p.origin + batch), 0, p.positions) : 0;
  if (i < 0) {
    const int64_t live = nearest(load_count(p.num_context + batch), 0, context_rows);
    const int64_t slot = row < live ? length - live + row : -1;
    return {slot, nearest(origin + slot, 0, last)};
  }
  const int64_t depth = p.depth ? nearest(load_count(p.depth + batch * p.q_rows + i), 0, p.q_rows) : i;
  return {length + i, nearest(origin + length + depth, 0, last)};
}

// Row `index` of a result each of whose sequences begins with `front_rows` rows of another tensor.
struct Source {
  bool is_front;
  int64_t row;  // of that tensor, or among the others
};

DFLASH_ANYWHERE inline Source source_of(int64_t index, int64_t front_rows, int64_t rows_per_sequence) {
  if (front_rows == 0) return {false, index};
  const int64_t all = front_rows + rows_per_sequence, sequence = index / all, i = index % all;
  if (i < front_rows) return {true, sequence * front_rows + i};
  return {false, sequence * rows_per_sequence + i - front_rows};
}

// Where the anchor of a block that is drafted stands, and the ids of its rows.
DFLASH_ANYWHERE inline int64_t anchor_position(const DraftRowsParams& p, int64_t batch) {
  return nearest(p.length[batch], 0, p.capacity - 1);
}

DFLASH_ANYWHERE inline int64_t drafted_id(const DraftRowsParams& p, int64_t batch, int64_t row) {
  if (row == 0) return p.tokens[batch * p.capacity + anchor_position(p, batch)];
  return p.drafts ? p.drafts[batch * p.num_drafts + row - 1] : p.mask_id;
}

// What is embedded for an id.
template <typename T>
DFLASH_ANYWHERE inline const T* embedding_of(const DraftRowsParams& p, int64_t id) {
  if (p.mask_embedding && id == p.mask_id) return static_cast<const T*>(p.mask_embedding);
  return static_cast<const T*>(p.table) + nearest(id, 0, p.vocab - 1) * p.table_stride;
}

}  // namespace
}  // namespace dflash
