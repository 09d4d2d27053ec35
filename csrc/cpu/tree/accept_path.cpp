// From row 0: emit the row's choice, continue at its child of that id; cut after the first stop token and to
// the room left. Then tokens[length + 1 ..] = what was emitted, length += m, num_context = m, path = the
// rows, chain_choices and chain_ids = the same as a chain would tell it. A child comes after its parent, so
// one pass over the rows finds the whole path.
#include "cpu/tree/accept.h"

namespace dflash::DFLASH_ISA {

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
