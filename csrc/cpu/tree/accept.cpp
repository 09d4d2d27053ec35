// Emits the target's choices along a path of rows, cut after the first stop token and to the room left. Rows one after
// another: a row is a few ids.
#include "binding/params.h"
#include "cpu/base/vec.h"

DFLASH_NAMESPACE_BEGIN

template <typename Params>
static inline bool is_stop(const Params& p, int64_t b, int64_t token) {
  for (int64_t i = 0; i < p.num_stop_tokens; ++i)
    if (p.stop_token_ids[b * p.num_stop_tokens + i] == token) return true;
  return false;
}

// Emits the choices of row 0 and of the rows that continue it, and advances sequence b, unless it is done. next(row,
// token, count), called after each token with how many there are, returns the row that continues the path with it, or
// -1. Returns the count.
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

namespace dflash::DFLASH_ISA {

// m = 1 + |longest prefix with block_ids[j + 1] == posterior[j]|; tokens[length + 1 ..] = posterior[0 .. m), length +=
// m, num_context = m.
void accept_prefix(const AcceptPrefixParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t* ids = p.block_ids + b * p.rows;
    emit(p, b, p.posterior + b * p.rows,
         [&](int64_t row, int64_t token, int64_t) { return row + 1 < p.rows && ids[row + 1] == token ? row + 1 : -1; });
  }
}

// From row 0: emit the row's choice, continue at its child of that id. Then tokens[length + 1 ..] = what was emitted,
// length += m, num_context = m, path = the rows, chain_choices and chain_ids = the same as a chain would tell it. A
// child comes after its parent, so one pass over the rows finds the whole path.
void accept_path(const AcceptPathParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t *ids = p.ids + b * p.rows, *parents = p.parents + b * p.rows;
    int64_t *path = p.path + b * p.path_rows, *choices = p.chain_choices + b * p.path_rows;
    int64_t* drafts = p.chain_ids + b * p.path_rows;
    for (int64_t j = 0; j < p.path_rows; ++j) path[j] = j, choices[j] = drafts[j] = -1;
    drafts[0] = ids[0];
    emit(p, b, p.choices + b * p.rows, [&](int64_t row, int64_t token, int64_t count) -> int64_t {
      path[count - 1] = row, choices[count - 1] = token;
      if (count == p.path_rows) return -1;
      int64_t child = row + 1;
      while (child < p.rows && (parents[child] != row || ids[child] != token)) ++child;
      if (child == p.rows) return -1;
      drafts[count] = token;
      return child;
    });
  }
}

}  // namespace dflash::DFLASH_ISA
