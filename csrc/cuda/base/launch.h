// One launcher per CUDA kernel, launch_<name>. Each sets the device of its tensors for the launch, enqueues on the
// stream and returns the launch's error; none waits.
#pragma once
#include <cuda_runtime_api.h>

#include "binding/params.h"

namespace dflash {

#define KERNEL(name, Params) cudaError_t launch_##name(const Params& p, cudaStream_t stream);
DFLASH_KERNELS(KERNEL, KERNEL, DFLASH_NOTHING)
#undef KERNEL

// False if the process is known to have no context on a device.
bool has_context(int device);

// cudaSuccess if this build holds code that the device runs.
cudaError_t probe_kernels(int device);

// True if the device runs code of this build that waits in an overlapping launch, and overlap is on.
bool overlaps(int device);
// Later launches overlap, where the device can, or none does.
void set_overlap(bool on);

// ---- what callers provide besides tensors; answered from shapes, without a GPU

constexpr int64_t kNumCounters = 512;  // in the array that blocks sharing a result count themselves in

// How a kernel cuts its work, and the bytes that it needs for that.
struct Workspace {
  int64_t splits;  // as the params have it
  int64_t bytes;   // of scratch memory; if there are any, `linear` wants counters too
};

// splits 0: the tensors go through the plain kernel.
Workspace block_attention_workspace(DType dtype, const void* k_cache, const void* v_cache, int64_t batch, int64_t rows,
                                    int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim,
                                    int64_t capacity);

// splits 0: the kernel does not take this product; the weights are contiguous.
Workspace linear_workspace(DType dtype, int64_t rows, int64_t in, int num_weights, const void* const* weights,
                           const int64_t* features, bool gated, Format format);

// splits 0: the kernel does not take these rows or weights; the weights are contiguous.
Workspace experts_workspace(DType dtype, const void* gate_up, const void* down, int64_t rows, int64_t top_k,
                            int64_t hidden, int64_t width);

// Bytes of scratch memory.
int64_t select_tokens_workspace(int64_t rows, int64_t vocab);
int64_t candidates_workspace(int64_t rows, int64_t vocab);  // of tree_candidates and top_candidates

}  // namespace dflash
