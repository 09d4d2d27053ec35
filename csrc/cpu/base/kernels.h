// Declares the CPU kernels of the instruction set this file is compiled for. A set with DFLASH_BASE compiles only the
// kernels with products; the base set's serve for the rest.
#pragma once
#include "binding/params.h"

#define DECLARE(name, Params) void name(const Params&);

#if defined(DFLASH_BASE)
namespace dflash::DFLASH_BASE {
#define KERNEL DECLARE
#define CPU_KERNEL DECLARE
#include "binding/kernels.def"
}  // namespace dflash::DFLASH_BASE
namespace dflash::DFLASH_ISA {
using namespace DFLASH_BASE;
#define KERNEL(name, Params)
#define PRODUCT_KERNEL DECLARE
#define CPU_PRODUCT_KERNEL DECLARE
#include "binding/kernels.def"
}  // namespace dflash::DFLASH_ISA
#else
namespace dflash::DFLASH_ISA {
#define KERNEL DECLARE
#define CPU_KERNEL DECLARE
#include "binding/kernels.def"
}  // namespace dflash::DFLASH_ISA
#endif

#undef DECLARE
