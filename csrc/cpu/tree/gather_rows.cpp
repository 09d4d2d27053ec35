// out[b, j] = x[b, path[b, j]]. Rows over threads.
#include <algorithm>
#include <cstring>

#include "cpu/base/parallel.h"
#include "params.h"

namespace dflash::DFLASH_ISA {

void gather_rows(const GatherRowsParams& p) {
  const auto gather = [&](int64_t index) {
    const int64_t b = index / p.path_rows, j = index % p.path_rows;
    const int64_t row = std::clamp(p.path[index], int64_t(0), p.rows - 1);
    std::memcpy(static_cast<char*>(p.out) + (b * p.out_rows + j) * p.row_bytes,
                static_cast<const char*>(p.x) + (b * p.rows + row) * p.row_bytes, p.row_bytes);
  };
  const int64_t n = p.batch * p.path_rows;
  parallel_for(n, n * p.row_bytes / 4, p.threads, gather);
}

}  // namespace dflash::DFLASH_ISA
