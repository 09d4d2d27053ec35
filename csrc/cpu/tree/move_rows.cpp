// Slot first[b] + path[b, j] moves to slot first[b] + j, in ascending order of j, in every cache. (Cache, sequence)
// pairs over threads.
#include <algorithm>
#include <cstring>

#include "binding/params.h"
#include "cpu/base/parallel.h"

namespace dflash::DFLASH_ISA {

void compact_kv(const CompactKvParams& p) {
  int64_t moves = 0, bytes = 0;
  for (int64_t b = 0; b < p.batch; ++b)
    for (int64_t j = 1; j < p.path_rows; ++j) moves += p.source(b, j) >= 0;
  if (moves == 0) return;
  for (int64_t i = 0; i < p.num_caches; ++i) bytes += p.heads[i] * p.row_bytes[i];
  const auto compact = [&](int64_t index) {
    const int64_t i = index / p.batch, b = index % p.batch, heads = p.heads[i], size = p.row_bytes[i];
    char* cache = static_cast<char*>(p.caches[i]) + b * heads * p.capacity * size;
    for (int64_t j = 1; j < p.path_rows; ++j) {
      const int64_t from = p.source(b, j);
      if (from < 0) continue;
      const int64_t to = p.target(b, j);
      for (int64_t h = 0; h < heads; ++h) {
        char* head = cache + h * p.capacity * size;
        std::memcpy(head + to * size, head + from * size, size);
      }
    }
  };
  parallel_for(p.num_caches * p.batch, moves * bytes / 4, p.threads, compact);
}

// out[b, j] = x[b, path[b, j]]. Rows over threads.
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
