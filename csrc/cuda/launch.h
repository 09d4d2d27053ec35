// One launcher per CUDA kernel. Each sets the device of its tensors for the launch, enqueues on the stream
// and returns the launch's error; none waits.
#pragma once
#include <cuda_runtime_api.h>

#include "params.h"

namespace dflash {

// cudaSuccess if this build holds code that the device runs.
cudaError_t probe_kernels(int device);

cudaError_t launch_rms_norm(const RmsNormParams& p, cudaStream_t stream);
cudaError_t launch_silu_mul(const SiluMulParams& p, cudaStream_t stream);
cudaError_t launch_qkv_norm_rope_append(const QkvNormRopeAppendParams& p, cudaStream_t stream);
cudaError_t launch_append_context_kv(const AppendContextKvParams& p, cudaStream_t stream);
cudaError_t launch_append_kv(const AppendKvParams& p, cudaStream_t stream);
cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream);
cudaError_t launch_linear(const LinearParams& p, cudaStream_t stream);
cudaError_t launch_select_tokens(const SelectTokensParams& p, cudaStream_t stream);
cudaError_t launch_accept_prefix(const AcceptPrefixParams& p, cudaStream_t stream);

}  // namespace dflash
