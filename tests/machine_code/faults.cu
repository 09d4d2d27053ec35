// Kernels that lint.py must pass (sound_*), and one for each rule that it must find broken.
#include "cuda/base/ptx.cuh"

namespace dflash {

static __device__ int here() { return int(blockIdx.x * blockDim.x + threadIdx.x); }

__global__ void sound_plain(const float* in, float* out, int n) {
  grid_launch_dependents();
  grid_dependency_wait();
  if (here() < n) out[here()] = in[here()] + 1;
}

// The division is a call, and its branches meet again: none of it leads past the wait.
__global__ void sound_with_branches(const float* in, float* out, int64_t n, int64_t m) {
  int64_t i = here();
  if (n > 7) i = i / m;
  grid_dependency_wait();
  for (int64_t k = 0; k < n; ++k)
    if (in[k] > 0) out[i] += in[k];
}

__global__ void linear_kernel_copies(const float* in, float* out) {
  float* tile = shared<float>();
  cp_async16(tile + 4 * threadIdx.x, in + 4 * here());
  grid_dependency_wait();
  cp_async_wait<-1>();
  out[here()] = tile[threadIdx.x];
}

__global__ void block_attention_kernel_reads(const long long* lengths, const float* in, float* out) {
  float* tile = shared<float>();
  const long long length = __ldcg(lengths);
  if (here() < length) cp_async16(tile + 4 * threadIdx.x, in + 4 * here());
  grid_dependency_wait();
  cp_async_wait<-1>();
  out[here()] = tile[threadIdx.x];
}

// Its load may hit what the L1 still has of an earlier kernel.
__global__ void block_attention_kernel_hits_l1(const long long* lengths, float* out) {
  const long long length = *lengths;
  grid_dependency_wait();
  out[here()] = float(length);
}

__global__ void qkv_norm_rope_append_kernel_late(float* out) {
  grid_dependency_wait();
  grid_launch_dependents();
  out[here()] = 1;
}

__global__ void qkv_norm_rope_append_kernel_early(float* out) {
  grid_launch_dependents();
  grid_dependency_wait();
  out[here()] = 1;
}

__global__ void reads_early(const float* in, float* out) {
  const float value = in[here()];
  grid_dependency_wait();
  out[here()] = value;
}

__global__ void writes_early(const float* in, float* out) {
  out[here()] = 0;
  grid_dependency_wait();
  out[here()] += in[here()];
}

__global__ void copies_early(const float* in, float* out) {
  float* tile = shared<float>();
  cp_async16(tile + 4 * threadIdx.x, in + 4 * here());
  grid_dependency_wait();
  cp_async_wait<-1>();
  out[here()] = tile[threadIdx.x];
}

// The source has the wait first; only the way around it reads.
__global__ void waits_on_one_path(const float* in, float* out, int n) {
  if (n > 5) grid_dependency_wait();
  out[here()] = in[here()];
}

__global__ void ends_early(const float* in, float* out, int n) {
  if (here() >= n) return;
  grid_dependency_wait();
  out[here()] = in[here()];
}

__global__ void never_waits(const float* in, float* out) { out[here()] = in[here()]; }

__global__ void uses_local_memory(const float* in, float* out, const int* at) {
  grid_dependency_wait();
  float values[64];
  for (int i = 0; i < 64; ++i) values[at[i] & 63] = in[i];
  for (int i = 0; i < 64; ++i) out[i] = values[at[i + 64] & 63];
}

__global__ void loads_stale(const float* __restrict__ in, float* __restrict__ out) {
  grid_dependency_wait();
  out[here()] = __ldg(in + here());
}

__global__ void copies_four_bytes(const float* in, float* out) {
  float* tile = shared<float>();
  grid_dependency_wait();
  cp_async4_if(tile + threadIdx.x, in + here(), true);
  cp_async_wait<-1>();
  out[here()] = tile[threadIdx.x];
}

}  // namespace dflash
