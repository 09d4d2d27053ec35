// Only in a build with DFLASH_TRACE=ON: when each block of each kernel came to its wait, left it and ended,
// which no profiler shows of kernels that overlap. bench/gpu/timeline.py draws it. What a block does before
// its wait is not seen, and the stores cost about a microsecond per block.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <vector>

namespace dflash {

struct TraceRecord {
  uint64_t arrived, waited, ended;  // nanoseconds of %globaltimer
  uint32_t kernel, multiprocessor, block, grid;
};

struct TraceBuffer {
  unsigned long long* count;  // of records, also of those that found no room
  TraceRecord* records;       // [capacity]
  uint64_t capacity;
};

static __device__ TraceBuffer trace_buffer;  // a file's own

// Sets the buffer of every file.
inline std::vector<cudaError_t (*)(const TraceBuffer&)>& trace_setters() {
  static std::vector<cudaError_t (*)(const TraceBuffer&)> setters;
  return setters;
}
static const bool trace_is_registered = [] {
  trace_setters().push_back(
      [](const TraceBuffer& buffer) { return cudaMemcpyToSymbol(trace_buffer, &buffer, sizeof buffer); });
  return true;
}();

// FNV-1a of a kernel's name.
constexpr __host__ __device__ uint32_t trace_name(const char* name) {
  uint32_t hash = 2166136261u;
  for (; *name; ++name) hash = (hash ^ uint8_t(*name)) * 16777619u;
  return hash;
}

static __device__ __forceinline__ uint64_t trace_now() {
  uint64_t time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time)::"memory");
  return time;
}

// Has the waits of ptx.cuh; at the end of the kernel, thread 0 writes the block's record.
class TraceScope {
 public:
  __device__ __forceinline__ TraceScope(uint32_t kernel, bool later)
      : kernel_(kernel), arrived_(trace_now()) {
    if (!later) wait();
  }
  __device__ __forceinline__ void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    waited_ = trace_now();
  }
  __device__ __forceinline__ ~TraceScope() {
    const uint64_t ended = trace_now();
    if (threadIdx.x + threadIdx.y + threadIdx.z > 0 || !trace_buffer.count) return;
    const unsigned long long at = atomicAdd(trace_buffer.count, 1ull);
    if (at >= trace_buffer.capacity) return;
    uint32_t multiprocessor;
    asm volatile("mov.u32 %0, %smid;" : "=r"(multiprocessor));
    trace_buffer.records[at] = {
        arrived_,
        waited_,
        ended,
        kernel_,
        multiprocessor,
        blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z),
        gridDim.x * gridDim.y * gridDim.z,
    };
  }

 private:
  uint32_t kernel_;
  uint64_t arrived_, waited_;
};

}  // namespace dflash

// A kernel calls one of the first two once, in its outermost scope, so that the record is written where the
// kernel ends.
#define grid_dependency_wait() grid_dependency_wait_unless(false)
#define grid_dependency_wait_unless(later)                        \
  constexpr uint32_t kTraceName = ::dflash::trace_name(__func__); \
  ::dflash::TraceScope trace_scope(kTraceName, later)
#define grid_dependency_wait_later() trace_scope.wait()
