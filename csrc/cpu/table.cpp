#include "cpu/table.h"

#include "cpu/vec.h"

#define DFLASH_QUOTE_(x) #x
#define DFLASH_QUOTE(x) DFLASH_QUOTE_(x)

DFLASH_NAMESPACE_BEGIN

void rms_norm(const RmsNormParams&);
void silu_mul(const SiluMulParams&);

extern const CpuKernels kernels;
const CpuKernels kernels = {DFLASH_QUOTE(DFLASH_ISA), rms_norm, silu_mul};

DFLASH_NAMESPACE_END
