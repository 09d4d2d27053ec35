// What a C++ compiler cannot compile: launches, dynamic shared memory and PTX, one function per instruction. Kernels go
// through these, and the emulation of tests/cuda_emulation has its own.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace dflash {

// ---- launches and dynamic shared memory

// True if launches of `kernel` may overlap on the current device (probe.cu).
bool launches_overlap(const void* kernel);

// Enqueues kernel<<<grid, block, shared, stream>>>(arguments...); more than 48 KB of shared memory is asked for. An
// overlapping launch (programmatic dependent launch, from sm_90) may start before the kernel ahead of it on the stream
// has ended. So each of its threads calls grid_dependency_wait(), and writes nothing before.
//
// Before its wait a kernel may read what no kernel that may still be running writes. If the kernel ahead calls
// grid_launch_dependents() after its own wait, it is the only one: all before it have ended. If it does so before its
// wait, any kernel ahead may still be running, and only what none of them ever writes may be read, such as weights.
// Early reads go past the L1, which may hold older bytes: __ldcg or cp_async16.
template <typename... Parameters>
cudaError_t launch_overlapping(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                               std::common_type_t<Parameters>... arguments) {
  if (shared > 48 * 1024) {
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared));
    if (error != cudaSuccess) return error;
  }
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &attribute;
  config.numAttrs = launches_overlap(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// Waits until the kernel ahead has ended and its writes are visible; nothing in an ordinary launch.
__device__ __forceinline__ void grid_dependency_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets an overlapping launch after this kernel start, once every block has called it or ended.
__device__ __forceinline__ void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The dynamic shared memory of the block, aligned to 128 bytes.
template <typename T>
__device__ __forceinline__ T* shared() {
  extern __shared__ __align__(128) unsigned char dynamic_shared_memory[];
  return reinterpret_cast<T*>(dynamic_shared_memory);
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// x, of which the compiler knows nothing: what follows from it is computed here, not ahead of a loop, where it would
// hold registers.
__device__ __forceinline__ int64_t opaque(int64_t x) {
  asm volatile("" : "+l"(x));
  return x;
}

// (x & mask) | bits in one instruction: of two constants nvcc makes two.
__device__ __forceinline__ uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) {
  uint32_t y;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(y) : "r"(x), "r"(mask), "r"(bits));
  return y;
}

// The lower or the upper half of a word, twice.
__device__ __forceinline__ uint32_t lower_twice(uint32_t word) { return __byte_perm(word, 0, 0x1010); }
__device__ __forceinline__ uint32_t upper_twice(uint32_t word) { return __byte_perm(word, 0, 0x3232); }

// The float 2^23, plus a byte of a word.
template <int kByte>
__device__ __forceinline__ float byte_from_2p23(uint32_t word) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440 + kByte));
}

// a * b + c of two pairs of bfloat16, each rounded once.
__device__ __forceinline__ uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// ---- a counter that blocks share

// Adds one, or wraps to zero where the counter stands at `last`; returns what it was. What a block has read or stored
// before a barrier ahead of this comes before what the blocks that count later do after a barrier.
__device__ __forceinline__ unsigned count_up(unsigned* counter, unsigned last) {
  unsigned before;
  asm volatile("atom.acq_rel.gpu.global.inc.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(last) : "memory");
  return before;
}

// ---- loads and stores of 16 bytes; addresses are multiples of 16

__device__ __forceinline__ uint4 load16(const void* address) { return *static_cast<const uint4*>(address); }

__device__ __forceinline__ void store16(void* address, uint4 value) { *static_cast<uint4*>(address) = value; }

// Asks for the line of an address in global memory, which comes into the L2 later.
__device__ __forceinline__ void prefetch_l2(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// A cache policy for the functions that end in _hint: the line is the first to leave the L2.
__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 2^x with a relative error of at most 2^-22, in one instruction; results below 2^-126 are 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// ---- cp.async: 16 bytes from global to shared memory, past the registers. The copy has happened, for the thread that
// issued it, when cp_async_wait<n>() returns and at most n groups were committed after it; for other threads after a
// barrier as well. Until then the destination holds anything.

__device__ __forceinline__ void cp_async16(void* shared, const void* global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}
// Zeros where not valid; `global` is then not read, but must be an aligned address.
__device__ __forceinline__ void cp_async16_if(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}
// The same with 4 bytes.
__device__ __forceinline__ void cp_async4_if(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 4 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async16_hint_if(void* shared, const void* global, uint64_t policy, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(shared_address(shared)),
               "l"(global), "r"(valid ? 16 : 0), "l"(policy)
               : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kLeft of the thread's committed groups are under way; -1: none, committed or not.
template <int kLeft>
__device__ __forceinline__ void cp_async_wait() {
  if constexpr (kLeft < 0)
    asm volatile("cp.async.wait_all;" ::: "memory");
  else
    asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// ---- ldmatrix and mma, by all lanes of a warp, on 16-bit elements

// Four matrices of 8 x 8. Lane l gives the address of row l % 8 of matrix l / 8; its out[m] holds elements 2 * (l % 4)
// and + 1 of row l / 4 of matrix m, or of its transpose.
__device__ __forceinline__ void ldmatrix(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}
__device__ __forceinline__ void ldmatrix_transposed(uint32_t (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row))
               : "memory");
}

// d [16, 8] += a [16, 16] b [16, 8], the last argument naming the type of a and b. With g = lane / 4 and
// t = 2 * (lane % 4), a register holds two neighbours (low half first):
//   a[0..3]: (g, t), (g + 8, t), (g, t + 8), (g + 8, t + 8), + 1 along the columns
//   b[0..1]: (t, g), (t + 8, g), + 1 along the rows
//   d[0..3]: (g, t), (g, t + 1), (g + 8, t), (g + 8, t + 1)
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                                             __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

}  // namespace dflash
