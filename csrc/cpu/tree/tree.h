// Where a block stands in its sequence, and, if it is a tree, bits of each row's ancestors and of the row itself, see
// BlockAttentionParams.
#pragma once
#include "cpu/base/vec.h"

DFLASH_NAMESPACE_BEGIN

// The length of sequence b, clamped to -rows .. 2 * capacity + rows, so that no sum overflows. A window is at most
// capacity + rows, and what is farther out sees the same slots.
template <typename Params>
static inline int64_t length_of(const Params& p, int64_t b) {
  return most(-p.rows, least(p.lengths[b], 2 * p.capacity + p.rows));
}

// ancestors [sequences * rows, ceil(rows / 64)]; bits at or past `rows` are off.
static inline uint64_t ancestor_word(const int64_t* ancestors, int64_t rows, int64_t row, int64_t word) {
  const uint64_t bits = uint64_t(ancestors[row * ((rows + 63) / 64) + word]);
  const int64_t left = rows - 64 * word;
  return left < 64 ? bits & ((uint64_t(1) << left) - 1) : bits;
}

static inline int64_t depth_of(const int64_t* ancestors, int64_t rows, int64_t row) {
  int64_t count = 0;
  for (int64_t word = 0; 64 * word < rows; ++word)
    count += __builtin_popcountll(ancestor_word(ancestors, rows, row, word));
  return count > 0 ? count - 1 : 0;
}

DFLASH_NAMESPACE_END
