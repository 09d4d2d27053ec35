// Runs CUDA kernels on the CPU. g++ compiles a .cu file as C++ after this header (-include), with
// cuda/base/ptx.cuh of this folder in place of the one in csrc. README.md says what is emulated, what is
// caught and how.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <vector>

// build.py gives the zero-initialised variables of a .cu file a section of their own, which is poisoned
// before each block: that is the static shared memory. Kernels are static functions (the linker merges what
// inline ones hold), and launchers keep no static variables.
#undef __shared__
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __forceinline__
#undef __launch_bounds__
#undef __grid_constant__
#define __shared__ static
#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (::emulation::thread_index)
#define blockIdx (::emulation::block_index)
#define blockDim (::emulation::block_dim)
#define gridDim (::emulation::grid_dim)

namespace emulation {

extern uint3 thread_index, block_index;  // of the thread that runs
extern dim3 block_dim, grid_dim;

// Ends the block that runs: synchronize() returns an error with this text.
[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));

// A kernel's parameters as CUDA lays them out.
using Parameters = std::vector<unsigned char>;

// Queues the kernel at `address`, or the PTX that stands for it (ptx.h). An overlapping one may start as soon as every
// block of the one ahead has called grid_launch_dependents(), even if that one waits itself: its threads then stop at
// grid_dependency_wait().
cudaError_t enqueue(const void* address, dim3 grid, dim3 block, size_t shared, bool overlaps,
                    std::function<void()> kernel, Parameters parameters);

enum class Barrier { kSync, kCount, kAnd, kOr };
int barrier(Barrier kind, int predicate);  // of the block

enum class WarpOp { kSync, kShuffle, kBallot, kAny, kAll, kAdd, kMin, kMax, kAnd, kOr, kXor, kMatch, kCollective };
// Returns once every lane of the mask has come to the same operation. The last to come computes all results.
uint64_t warp(WarpOp op, unsigned mask, uint64_t value, int source = 0);
// The same for an instruction of all 32 lanes: the last to come calls run(payloads of the lanes).
void warp_collective(void (*run)(void* const* payloads), void* payload);
unsigned lane();

// An access to memory by the current thread, where the compiler does not tell of it.
void touch(const void* address, size_t bytes, bool stores);
// Memory that the current thread keeps until it ends.
char* thread_memory(size_t bytes);

unsigned char* dynamic_shared();
void expect_shared(const void* address, size_t bytes, const char* what);  // inside this block's shared memory
void expect_aligned(const void* address, size_t bytes, const char* what);
void copy_async(void* shared, const void* global, unsigned bytes, unsigned zeros);
void commit_async();
void wait_async(int groups_left);  // -1: everything, committed or not
void dependency_wait();
void launch_dependents();

// What a cache policy looks like.
constexpr uint64_t kPolicy = 0x12f0000000000000;

// Blocks of one grid take turns here.
void fence();
// Around a read and write of `address` that nothing comes between.
void before_atomic(const void* address);
void after_atomic(const void* address, size_t bytes);

template <typename T>
uint64_t to_bits(T value) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "a lane holds at most 8 bytes");
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <typename T>
T from_bits(uint64_t bits) {
  T value;
  std::memcpy(static_cast<void*>(&value), &bits, sizeof(T));
  return value;
}

template <typename... T>
Parameters laid_out(const T&... arguments) {
  Parameters bytes;
  [[maybe_unused]] const auto add = [&](const auto& argument) {
    using Argument = std::decay_t<decltype(argument)>;
    static_assert(std::is_trivially_copyable_v<Argument>);
    bytes.resize((bytes.size() + alignof(Argument) - 1) / alignof(Argument) * alignof(Argument) + sizeof(Argument));
    std::memcpy(bytes.data() + bytes.size() - sizeof(Argument), &argument, sizeof(Argument));
  };
  (add(arguments), ...);
  return bytes;
}

template <typename T>
T shuffle(unsigned mask, T value, int source) {
  return from_bits<T>(warp(WarpOp::kShuffle, mask, to_bits(value), source));
}

}  // namespace emulation

// ---- barriers and warps

inline void __syncthreads() { emulation::barrier(emulation::Barrier::kSync, 0); }
inline int __syncthreads_count(int predicate) { return emulation::barrier(emulation::Barrier::kCount, predicate); }
inline int __syncthreads_and(int predicate) { return emulation::barrier(emulation::Barrier::kAnd, predicate); }
inline int __syncthreads_or(int predicate) { return emulation::barrier(emulation::Barrier::kOr, predicate); }
inline void __syncwarp(unsigned mask = 0xffffffffu) { emulation::warp(emulation::WarpOp::kSync, mask, 0); }

template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = int(emulation::lane());
  return emulation::shuffle(mask, value, (lane & ~(width - 1)) | (source & (width - 1)));
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int with, int width = 32) {
  const int lane = int(emulation::lane()), source = lane ^ with;
  return emulation::shuffle(mask, value, (source & ~(width - 1)) > (lane & ~(width - 1)) ? lane : source);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int lane = int(emulation::lane()), place = lane & (width - 1);
  return emulation::shuffle(mask, value, place + int(by) < width ? lane + int(by) : lane);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32) {
  const int lane = int(emulation::lane()), place = lane & (width - 1);
  return emulation::shuffle(mask, value, place - int(by) >= 0 ? lane - int(by) : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return unsigned(emulation::warp(emulation::WarpOp::kBallot, mask, predicate != 0));
}
inline int __any_sync(unsigned mask, int predicate) {
  return int(emulation::warp(emulation::WarpOp::kAny, mask, predicate != 0));
}
inline int __all_sync(unsigned mask, int predicate) {
  return int(emulation::warp(emulation::WarpOp::kAll, mask, predicate != 0));
}
template <typename T>
unsigned __match_any_sync(unsigned mask, T value) {
  return unsigned(emulation::warp(emulation::WarpOp::kMatch, mask, emulation::to_bits(value)));
}
// Reductions of 32-bit integers; int and unsigned differ in min and max only.
#define DFLASH_EMULATED_REDUCE(name, op, T)                                                                \
  inline T name(unsigned mask, T value) {                                                                  \
    return T(emulation::warp(emulation::WarpOp::op, mask, uint64_t(int64_t(value)), std::is_signed_v<T>)); \
  }
DFLASH_EMULATED_REDUCE(__reduce_add_sync, kAdd, int)
DFLASH_EMULATED_REDUCE(__reduce_add_sync, kAdd, unsigned)
DFLASH_EMULATED_REDUCE(__reduce_min_sync, kMin, int)
DFLASH_EMULATED_REDUCE(__reduce_min_sync, kMin, unsigned)
DFLASH_EMULATED_REDUCE(__reduce_max_sync, kMax, int)
DFLASH_EMULATED_REDUCE(__reduce_max_sync, kMax, unsigned)
DFLASH_EMULATED_REDUCE(__reduce_and_sync, kAnd, unsigned)
DFLASH_EMULATED_REDUCE(__reduce_or_sync, kOr, unsigned)
DFLASH_EMULATED_REDUCE(__reduce_xor_sync, kXor, unsigned)
#undef DFLASH_EMULATED_REDUCE

// ---- memory

inline void __threadfence() { emulation::fence(); }
inline void __threadfence_block() {}

// Threads switch at barriers, warp operations, fences and atomics only, so an atomic is a plain read and
// write. Not instrumented, because a plain access would be a race.
template <typename T, typename F>
__attribute__((no_sanitize("thread"), noinline)) T emulated_atomic(T* address, F&& change) {
  emulation::before_atomic(address);
  const T old = *address;
  *address = change(old);
  emulation::after_atomic(address, sizeof(T));
  return old;
}
template <typename T>
T atomicAdd(T* address, std::common_type_t<T> value) {
  return emulated_atomic(address, [&](T old) { return T(old + value); });
}
template <typename T>
T atomicMax(T* address, std::common_type_t<T> value) {
  return emulated_atomic(address, [&](T old) { return std::max(old, value); });
}
template <typename T>
T atomicMin(T* address, std::common_type_t<T> value) {
  return emulated_atomic(address, [&](T old) { return std::min(old, value); });
}
template <typename T>
T atomicOr(T* address, std::common_type_t<T> value) {
  return emulated_atomic(address, [&](T old) { return T(old | value); });
}
template <typename T>
T atomicAnd(T* address, std::common_type_t<T> value) {
  return emulated_atomic(address, [&](T old) { return T(old & value); });
}
template <typename T>
T atomicExch(T* address, std::common_type_t<T> value) {
  return emulated_atomic(address, [&](T) { return value; });
}
template <typename T>
T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value) {
  return emulated_atomic(address, [&](T old) { return old == expected ? value : old; });
}
inline unsigned atomicInc(unsigned* address, unsigned limit) {
  return emulated_atomic(address, [&](unsigned old) { return old >= limit ? 0u : old + 1; });
}

template <typename T>
T __ldg(const T* address) {
  return *address;
}
template <typename T>
T __ldcg(const T* address) {
  return *address;
}
template <typename T>
T __ldcs(const T* address) {
  return *address;
}
template <typename T>
void __stcs(T* address, std::common_type_t<T> value) {
  *address = value;
}
template <typename T>
void __stcg(T* address, std::common_type_t<T> value) {
  *address = value;
}

// ---- arithmetic

template <typename T>
constexpr std::enable_if_t<std::is_integral_v<T>, T> min(T a, T b) {
  return b < a ? b : a;
}
template <typename T>
constexpr std::enable_if_t<std::is_integral_v<T>, T> max(T a, T b) {
  return a < b ? b : a;
}
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
inline unsigned __float_as_uint(float x) { return emulation::from_bits<unsigned>(emulation::to_bits(x)); }
inline float __uint_as_float(unsigned x) { return emulation::from_bits<float>(x); }
inline int __float_as_int(float x) { return int(__float_as_uint(x)); }
inline float __int_as_float(int x) { return __uint_as_float(unsigned(x)); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __ddiv_rn(double a, double b) { return a / b; }
