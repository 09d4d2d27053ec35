// The CPU kernels of one instruction set. table.cpp fills one table per set; dispatch.cpp picks one at run time.
#pragma once
#include <string>
#include <vector>

#include "binding/params.h"

namespace dflash {

struct CpuKernels {
  const char* isa;
#define KERNEL(name, Params) void (*name)(const Params&);
  DFLASH_KERNELS(KERNEL, KERNEL, KERNEL)
#undef KERNEL
};

// The best table that this processor runs, or the one that the environment variable DFLASH_ISA names (one of
// cpu_isas()); throws std::runtime_error when that one is unknown or cannot run here.
const CpuKernels& cpu_kernels();

// The instruction sets of this build that run on this processor, from the plainest to the best.
std::vector<std::string> cpu_isas();

// Rows up to which a pass through the kernels is faster than torch's (measured by bench_first_token.py).
int64_t skinny_rows(DType dtype);

}  // namespace dflash
