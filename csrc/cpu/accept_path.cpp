// From row 0: emit the row's choice, continue at its child of that id; cut after the first stop token and to
// the room left. Then tokens[length + 1 ..] = what was emitted, length += m, num_context = m, path = the
// rows. A child comes after its parent, so one pass over the rows finds the whole path.
#include <algorithm>

#include "cpu/vec.h"
#include "params.h"

DFLASH_NAMESPACE_BEGIN

// Walks a running row, advances its state and returns how many choices it emitted.
static int64_t accept_running(const AcceptPathParams& p, int64_t b, int64_t* path) {
  const int64_t *ids = p.ids + b * p.rows, *parents = p.parents + b * p.rows;
  const int64_t* choices = p.choices + b * p.rows;
  const int64_t* stops_end = p.stop_token_ids + p.num_stop_tokens;
  const int64_t length = p.length[b], limit = std::clamp(p.limits[b], int64_t(0), p.capacity);
  const int64_t room = length < 0 || length >= limit ? 0 : limit - 1 - length;
  int64_t* tokens = p.tokens + b * p.capacity + (room ? length + 1 : 0);
  int64_t row = 0, count = 0, state = kRunning;
  while (state == kRunning) {
    if (count >= room) {
      state = kLimit;
    } else if (choices[row] < 0) {
      state = kInvalid;
    } else {
      const int64_t token = tokens[count] = choices[row];
      path[count++] = row;
      if (std::find(p.stop_token_ids, stops_end, token) != stops_end) {
        state = kStop;
        break;
      }
      int64_t child = row + 1;
      while (child < p.rows && (parents[child] != row || ids[child] != token)) ++child;
      if (count == p.path_rows || child == p.rows) {
        if (count >= room) state = kLimit;
        break;
      }
      row = child;
    }
  }
  p.length[b] += count;
  p.done[b] = state;
  return count;
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void accept_path(const AcceptPathParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    int64_t* path = p.path + b * p.path_rows;
    const int64_t count = p.done[b] == kRunning ? accept_running(p, b, path) : 0;
    p.num_context[b] = count;
    for (int64_t j = count; j < p.path_rows; ++j) path[j] = j;
  }
}

}  // namespace dflash::DFLASH_ISA
