// Declares the CPU kernels of the instruction set this file is compiled for. A set with DFLASH_BASE compiles only the
// kernels with products; the base set's serve for the rest.
#pragma once
#include "binding/params.h"

#define DECLARE(name, Params) void name(const Params&);

#if defined(DFLASH_BASE)
namespace dflash::DFLASH_BASE {
DFLASH_KERNELS(DECLARE, DECLARE, DECLARE)
}  // namespace dflash::DFLASH_BASE
namespace dflash::DFLASH_ISA {
using namespace DFLASH_BASE;
DFLASH_KERNELS(DFLASH_NOTHING, DECLARE, DECLARE)
}  // namespace dflash::DFLASH_ISA
#else
namespace dflash::DFLASH_ISA {
DFLASH_KERNELS(DECLARE, DECLARE, DECLARE)
}  // namespace dflash::DFLASH_ISA
#endif

#undef DECLARE
