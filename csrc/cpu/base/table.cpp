#include "cpu/base/table.h"

#include "cpu/base/kernels.h"

#define DFLASH_QUOTE_(x) #x
#define DFLASH_QUOTE(x) DFLASH_QUOTE_(x)

namespace dflash::DFLASH_ISA {

extern const CpuKernels kernels;
const CpuKernels kernels = {DFLASH_QUOTE(DFLASH_ISA),
#define KERNEL(name, Params) DFLASH_ISA::name,
                            DFLASH_KERNELS(KERNEL, KERNEL, KERNEL)
#undef KERNEL
};

}  // namespace dflash::DFLASH_ISA
