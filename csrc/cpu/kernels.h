// Declares the CPU kernels of the instruction set this file is compiled for. One that differs from another
// only in products (DFLASH_BASE names the other) has kernels of its own where they have products, and the
// other's elsewhere.
#pragma once
#include "params.h"

#define CPU_KERNEL KERNEL
#define KERNEL(name, Params) void name(const Params&);

#if defined(DFLASH_BASE)
namespace dflash::DFLASH_BASE {
#include "kernels.def"
}
namespace dflash::DFLASH_ISA {
using namespace DFLASH_BASE;
void linear(const LinearParams&);  // from PRODUCT_KERNELS of CMakeLists.txt
void experts(const ExpertsParams&);
void decoder_layers(const DecoderLayersParams&);
}  // namespace dflash::DFLASH_ISA
#else
namespace dflash::DFLASH_ISA {
#include "kernels.def"
}
#endif
