// What accept_prefix and accept_path share: emitting the target's choices along a path of rows.
#pragma once
#include "cpu/base/vec.h"
#include "params.h"

DFLASH_NAMESPACE_BEGIN

template <typename Params>
static inline bool is_stop(const Params& p, int64_t b, int64_t token) {
  for (int64_t i = 0; i < p.num_stop_tokens; ++i)
    if (p.stop_token_ids[b * p.num_stop_tokens + i] == token) return true;
  return false;
}

// Emits the choices of row 0 and of the rows that continue it, and advances sequence b, unless it is done.
// next(row, token, count), called after each token with how many there are, returns the row that continues
// the path with it, or -1. Returns the count.
template <typename Params, typename Next>
static inline int64_t emit(const Params& p, int64_t b, const int64_t* choices, const Next& next) {
  int64_t count = 0;
  if (p.done[b] == kRunning) {
    const int64_t length = p.length[b], limit = p.limits[b] < p.capacity ? p.limits[b] : p.capacity;
    const int64_t room = length < 0 || length >= limit ? 0 : limit - 1 - length;
    int64_t* tokens = p.tokens + b * p.capacity + (room ? length + 1 : 0);
    int64_t state = room ? kRunning : kLimit;
    for (int64_t row = 0; state == kRunning && row >= 0;) {
      const int64_t token = choices[row];
      if (token < 0) {
        state = kInvalid;
        break;
      }
      tokens[count++] = token;
      row = next(row, token, count);
      state = is_stop(p, b, token) ? kStop : count >= room ? kLimit : kRunning;
    }
    p.length[b] = length + count;
    p.done[b] = state;
  }
  return p.num_context[b] = count;
}

DFLASH_NAMESPACE_END
