// Rows over OpenMP threads. torch loads libgomp before this module, so both share one pool.
#pragma once
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "cpu/vec.h"

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kParallelElements = 32768;  // below this a parallel region costs more than it saves

// fn(i) for i in [0, n); `elements` is the work in all, in array elements.
template <typename Fn>
static inline void parallel_for(int64_t n, int64_t elements, int threads, const Fn& fn) {
  if (threads > 1 && n > 1 && elements >= kParallelElements) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t i = 0; i < n; ++i) fn(i);
  } else {
    for (int64_t i = 0; i < n; ++i) fn(i);
  }
}

DFLASH_NAMESPACE_END
