// m = 1 + |longest prefix with block_ids[j + 1] == posterior[j]|, cut after the first stop token and to the
// room left; tokens[length + 1 ..] = posterior[0 .. m), length += m, num_context = m. Rows one after
// another: a row is a few ids.
#include "cpu/tree/accept.h"

namespace dflash::DFLASH_ISA {

void accept_prefix(const AcceptPrefixParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    const int64_t* ids = p.block_ids + b * p.rows;
    emit(p, b, p.posterior + b * p.rows, [&](int64_t row, int64_t token, int64_t) {
      return row + 1 < p.rows && ids[row + 1] == token ? row + 1 : -1;
    });
  }
}

}  // namespace dflash::DFLASH_ISA
