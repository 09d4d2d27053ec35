#include "cpu/table.h"

#include "cpu/vec.h"

#define DFLASH_QUOTE_(x) #x
#define DFLASH_QUOTE(x) DFLASH_QUOTE_(x)

namespace dflash::DFLASH_ISA {

#define KERNEL(name, Params) void name(const Params&);
#define CPU_KERNEL KERNEL
#include "kernels.def"

extern const CpuKernels kernels;
const CpuKernels kernels = {
    DFLASH_QUOTE(DFLASH_ISA),
#define KERNEL(name, Params) name,
#define CPU_KERNEL KERNEL
#include "kernels.def"
};

}  // namespace dflash::DFLASH_ISA
