#pragma once
#include <cuda_runtime_api.h>

#include <string>

namespace dflash {

// One case of self_test.cu: in and out are float [64] ([128] for the copies).
cudaError_t launch_self_test(const std::string& name, bool fault, const float* in, float* out, cudaStream_t stream);
// partial is float [4], counter unsigned [1].
cudaError_t launch_last_block(bool fault, const float* in, float* partial, unsigned* counter, float* out,
                              cudaStream_t stream);
// a [16, 16], b [16, 8] if transposed, else [8, 16]; out float [16, 8].
cudaError_t launch_tensor_core(bool half, const void* a, const void* b, float* out, bool transposed,
                               cudaStream_t stream);

}  // namespace dflash
