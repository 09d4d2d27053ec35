// m = 1 + |longest prefix with block_ids[j + 1] == posterior[j]|, cut after the first stop token and to the
// room left; tokens[length + 1 ..] = posterior[0 .. m), length += m, num_context = m. Rows one after
// another: a row is a few ids.
#include <algorithm>

#include "cpu/vec.h"
#include "params.h"

DFLASH_NAMESPACE_BEGIN

static void accept_row(const AcceptPrefixParams& p, int64_t b) {
  if (p.done[b] != 0) {
    p.num_context[b] = 0;
    return;
  }
  const int64_t* block_ids = p.block_ids + b * p.rows;
  const int64_t* posterior = p.posterior + b * p.rows;
  const int64_t* stops_end = p.stop_token_ids + p.num_stop_tokens;
  const int64_t length = p.length[b], limit = std::clamp(p.limits[b], int64_t(0), p.capacity);
  const int64_t room = length < 0 || length >= limit ? 0 : limit - 1 - length;
  int64_t* tokens = p.tokens + b * p.capacity + (room ? length + 1 : 0);
  int64_t count = 0, state = kRunning;
  while (state == kRunning) {
    if (count >= room) {
      state = kLimit;
    } else if (posterior[count] < 0) {
      state = kInvalid;
    } else {
      const int64_t token = tokens[count] = posterior[count];
      ++count;
      if (std::find(p.stop_token_ids, stops_end, token) != stops_end) {
        state = kStop;
      } else if (count == p.rows || block_ids[count] != token) {
        if (count >= room) state = kLimit;
        break;
      }
    }
  }
  p.length[b] += count;
  p.num_context[b] = count;
  p.done[b] = state;
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void accept_prefix(const AcceptPrefixParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) accept_row(p, b);
}

}  // namespace dflash::DFLASH_ISA
