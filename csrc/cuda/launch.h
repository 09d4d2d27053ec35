// One launcher per CUDA kernel. Each sets the device of its tensors for the launch, enqueues on the stream
// and returns the launch's error; none waits.
#pragma once
#include <cuda_runtime_api.h>

#include "params.h"

namespace dflash {

// cudaSuccess if this build holds code that the device runs.
cudaError_t probe_kernels(int device);

cudaError_t launch_accept_prefix(const AcceptPrefixParams& p, cudaStream_t stream);

}  // namespace dflash
