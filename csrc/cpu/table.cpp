#include "cpu/table.h"

#include "cpu/vec.h"

#define DFLASH_QUOTE_(x) #x
#define DFLASH_QUOTE(x) DFLASH_QUOTE_(x)

namespace dflash::DFLASH_ISA {

void rms_norm(const RmsNormParams&);
void silu_mul(const SiluMulParams&);
void qkv_norm_rope_append(const QkvNormRopeAppendParams&);
void append_context_kv(const AppendContextKvParams&);
void append_kv(const AppendKvParams&);
void block_attention(const BlockAttentionParams&);
void select_tokens(const SelectTokensParams&);
void accept_prefix(const AcceptPrefixParams&);
void linear(const LinearParams&);
void decoder_layers(const DecoderLayersParams&);

extern const CpuKernels kernels;
const CpuKernels kernels = {DFLASH_QUOTE(DFLASH_ISA),
                            rms_norm,
                            silu_mul,
                            qkv_norm_rope_append,
                            append_context_kv,
                            append_kv,
                            block_attention,
                            select_tokens,
                            accept_prefix,
                            linear,
                            decoder_layers};

}  // namespace dflash::DFLASH_ISA
