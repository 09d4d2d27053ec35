// The CPU kernels of one instruction set. table.cpp fills one table per set; dispatch.cpp picks one at run
// time.
#pragma once
#include "params.h"

namespace dflash {

struct CpuKernels {
  const char* isa;
  void (*rms_norm)(const RmsNormParams&);
  void (*silu_mul)(const SiluMulParams&);
  void (*qkv_norm_rope_append)(const QkvNormRopeAppendParams&);
  void (*append_context_kv)(const AppendContextKvParams&);
  void (*append_kv)(const AppendKvParams&);
  void (*block_attention)(const BlockAttentionParams&);
  void (*select_tokens)(const SelectTokensParams&);
  void (*accept_prefix)(const AcceptPrefixParams&);
  void (*linear)(const LinearParams&);
  void (*decoder_layers)(const DecoderLayersParams&);
};

// The best table that this processor runs, or the one that the environment variable DFLASH_ISA names
// (scalar, avx2, avx512); throws std::runtime_error when that one is unknown or cannot run here.
const CpuKernels& cpu_kernels();

}  // namespace dflash
