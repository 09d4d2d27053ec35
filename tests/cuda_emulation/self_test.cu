// Small kernels, each right with kFault = false and wrong with true in a way that a GPU need not show: the
// emulation must show it. Each is launched as one block or a few of kThreads threads.
#include "cuda/base/ptx.cuh"
#include "self_test.h"

namespace dflash {

constexpr int kThreads = 64;

// out = in reversed, through shared memory.
template <bool kFault>
static __global__ void missing_barrier(const float* in, float* out) {
  __shared__ float tile[kThreads];
  tile[threadIdx.x] = in[threadIdx.x];
  if (!kFault) __syncthreads();
  out[threadIdx.x] = tile[kThreads - 1 - threadIdx.x];
}

// The same twice: the second pass overwrites what others may still read.
template <bool kFault>
static __global__ void missing_second_barrier(const float* in, float* out) {
  __shared__ float tile[kThreads];
  float sum = 0;
  for (int pass = 1; pass <= 2; ++pass) {
    tile[threadIdx.x] = in[threadIdx.x] * pass;
    __syncthreads();
    sum += tile[kThreads - 1 - threadIdx.x];
    if (!kFault) __syncthreads();
  }
  out[threadIdx.x] = sum / 3;
}

// out = in reversed within each warp.
template <bool kFault>
static __global__ void missing_syncwarp(const float* in, float* out) {
  float* tile = shared<float>();
  tile[threadIdx.x] = in[threadIdx.x];
  if (!kFault) __syncwarp();
  out[threadIdx.x] = tile[threadIdx.x ^ 31];
}

// 16 bytes per thread through cp.async.
enum class CopyFault { kNone, kNoWait, kNoBarrier, kWrongGroup };
template <CopyFault kFault>
static __global__ void copy(const float* in, float* out) {
  float* tile = shared<float>();  // [2][kThreads]: the halves of in, one group each
  const int lane = threadIdx.x;
  for (int half = 0; half < 2; ++half) {
    if (lane < kThreads / 4) cp_async16(tile + half * kThreads + 4 * lane, in + half * kThreads + 4 * lane);
    cp_async_commit();
  }
  for (int half = 0; half < 2; ++half) {
    if (kFault == CopyFault::kWrongGroup || half == 0)
      cp_async_wait<1>();
    else if (kFault != CopyFault::kNoWait)
      cp_async_wait<0>();
    if (kFault != CopyFault::kNoBarrier) __syncthreads();
    out[half * kThreads + lane] = tile[half * kThreads + kThreads - 1 - lane];
  }
}

// The source is overwritten before the copy has happened.
template <bool kFault>
static __global__ void copy_of_a_changing_source(const float* in, float* out) {
  float* tile = shared<float>();
  out[threadIdx.x] = in[threadIdx.x];
  __syncthreads();
  if (threadIdx.x < kThreads / 4) cp_async16(tile + 4 * threadIdx.x, out + 4 * threadIdx.x);
  cp_async_commit();
  if (!kFault) cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = -1;
  if (kFault) cp_async_wait<0>();
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}

// out = 0 where nothing was stored, in elsewhere.
template <bool kFault>
static __global__ void unwritten_shared(const float* in, float* out) {
  __shared__ float tile[kThreads];
  if (!kFault || threadIdx.x % 8) tile[threadIdx.x] = threadIdx.x % 8 ? in[threadIdx.x] : 0;
  __syncthreads();
  out[threadIdx.x] = tile[threadIdx.x];
}

template <bool kFault>
static __global__ void unwritten_register(const float* in, float* out) {
  float values[4];
  for (int i = kFault; i < 4; ++i) values[i] = in[threadIdx.x];
  for (int i = 1; i < 4; ++i) values[0] += values[i];
  out[threadIdx.x] = values[0] / 4;
}

// Half of a warp at a barrier of the block, half at one of the warp.
template <bool kFault>
static __global__ void divergent_barrier(const float* in, float* out) {
  if (kFault && threadIdx.x % 32 < 16)
    __syncwarp();
  else
    __syncthreads();
  out[threadIdx.x] = in[threadIdx.x];
}

// Lanes at or past 24 leave before the others sum what they hold.
template <bool kFault>
static __global__ void lane_left(const float* in, float* out) {
  const unsigned lane = threadIdx.x % 32, mask = kFault ? 0xffffffffu : 0x00ffffffu;
  out[threadIdx.x] = in[threadIdx.x];
  if (lane >= 24) return;
  if (__ballot_sync(mask, lane < 24) != 0x00ffffffu) out[threadIdx.x] = -1;
}

// A shuffle reads a lane that its mask leaves out.
template <bool kFault>
static __global__ void lane_outside(const float* in, float* out) {
  const unsigned lane = threadIdx.x % 32;
  float value = in[threadIdx.x];
  if (lane < 16) value = __shfl_sync(0x0000ffffu, value, kFault ? lane + 16 : lane);
  out[threadIdx.x] = value;
}

template <bool kFault>
static __global__ void misaligned_load(const float* in, float* out) {
  if (threadIdx.x % 4) return;
  const float* from = in + threadIdx.x;
  const uint4 words = load16(from + kFault * (threadIdx.x == 32));
  store16(out + threadIdx.x, words);
}

template <bool kFault>
static __global__ void past_dynamic_shared(const float* in, float* out) {
  float* tile = shared<float>();
  tile[threadIdx.x + kFault] = in[threadIdx.x];
  out[threadIdx.x] = in[threadIdx.x];
}

template <bool kFault>
static __global__ void past_static_shared(const float* in, float* out) {
  __shared__ float tile[kThreads];
  tile[threadIdx.x + kFault] = in[threadIdx.x];
  out[threadIdx.x] = tile[threadIdx.x + kFault];
}

template <bool kFault>
static __global__ void past_global(const float* in, float* out) {
  if (kFault && threadIdx.x == 0 && in[kThreads] == 1) return;
  out[threadIdx.x] = in[threadIdx.x];
}

// Two launches, the second overlapping the first: out = in + 1 + 1.
static __global__ void first_half(const float* in, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  grid_launch_dependents();
  out[i] = in[i] + 1;
}
template <bool kFault>
static __global__ void early_read(float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  float value = 0;
  if (kFault) value = out[i];
  grid_dependency_wait();
  if (!kFault) value = out[i];
  out[i] = value + 1;
}

// The same by one block, which starts when the kernel ahead, of one block too, has stored all. By then it may
// read the right values, or those that its multiprocessor still has.
template <bool kAtomic>
static __global__ void store_and_release(const float* in, float* out) {
  if (kAtomic)
    atomicExch(out + threadIdx.x, in[threadIdx.x] + 1);
  else
    out[threadIdx.x] = in[threadIdx.x] + 1;
  __syncthreads();
  grid_launch_dependents();
}

// Stores before the kernel ahead has read: out = 5.
template <bool kFault>
static __global__ void early_store(float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (kFault) out[i] = 5;
  grid_dependency_wait();
  if (!kFault) out[i] = 5;
}

// Some threads leave without having waited: out = in + 1 + 1.
template <bool kFault>
static __global__ void early_end(float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (kFault && i % 32 == 31) return;
  grid_dependency_wait();
  out[i] += 1;
}

// Stands between a kernel that stores and one that reads before its own wait, which is right only if this one
// lets it start after its wait: then what is ahead of this one has ended.
template <bool kFault>
static __global__ void lets_the_next_start() {
  if (kFault) grid_launch_dependents();
  grid_dependency_wait();
  if (!kFault) grid_launch_dependents();
}
static __global__ void read_before_the_wait(float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const float value = out[i];
  grid_dependency_wait();
  out[i] = value + 1;
}

// The last of 4 blocks adds up what each has stored; the counter must be 0 again for the next launch.
template <bool kFault>
static __global__ void last_block(const float* in, float* partial, unsigned* counter, float* out) {
  __shared__ bool last;
  if (threadIdx.x == 0) {
    partial[blockIdx.x] = in[blockIdx.x];
    __threadfence();
    last = atomicAdd(counter, 1u) == gridDim.x - 1;
    if (last && !kFault) *counter = 0;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  float sum = 0;
  for (unsigned b = 0; b < gridDim.x; ++b) sum += partial[b];
  out[threadIdx.x] = sum;
}

// 4 blocks read a slot, out[0], and one overwrites it: the last to have read it. The counter, the last of
// out, wraps to zero.
static __global__ void fill_slot(const float* in, float* out) {
  out[threadIdx.x] = threadIdx.x < kThreads - 1 ? in[threadIdx.x] : 0.0f;
}
template <bool kFault>
static __global__ void overwritten_slot(const float* in, float* out) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i > 0 && i < kThreads - 1) out[i] = in[i] * out[0];
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    const unsigned ticket = atomicInc(reinterpret_cast<unsigned*>(out + kThreads - 1), gridDim.x - 1);
    __threadfence();
    if (ticket == (kFault ? 0 : gridDim.x - 1)) out[0] = -5;
  }
}

// out[60] = the sum of out[0 .. 59], which 4 blocks have stored, by the last of them to count itself. The
// counter is the last of out.
enum class CountFault { kNone, kNoFenceAhead, kNoFenceAfter, kNoAtomic };
template <CountFault kFault>
static __global__ void counted(const float* in, float* out) {
  __shared__ bool last;
  unsigned* counter = reinterpret_cast<unsigned*>(out + kThreads - 1);
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < 60) out[i] = in[i];
  if (kFault != CountFault::kNoFenceAhead && kFault != CountFault::kNoAtomic) __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    unsigned before;
    if (kFault == CountFault::kNoAtomic) {
      before = *counter;
      __threadfence();
      *counter = before == gridDim.x - 1 ? 0 : before + 1;
    } else {
      before = atomicInc(counter, gridDim.x - 1);
    }
    last = before == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  if (kFault != CountFault::kNoFenceAfter) __threadfence();
  if (threadIdx.x > 0) return;
  float sum = 0;
  for (int j = 0; j < 60; ++j) sum += out[j];
  out[60] = sum;
}

// One warp: out [16, 8] = a [16, 16] b [16, 8], or b given as [8, 16] without the transposition.
template <typename T>
static __global__ void tensor_core(const T* a, const T* b, float* out, bool transposed) {
  __shared__ __align__(16) T tile_a[16 * 16], tile_b[16 * 8];
  const int lane = threadIdx.x;
  store16(tile_a + 8 * lane, load16(a + 8 * lane));
  if (lane < 16) store16(tile_b + 8 * lane, load16(b + 8 * lane));
  __syncwarp();
  uint32_t fragment_a[4], twice[4];  // b's two matrices, twice
  ldmatrix(fragment_a, tile_a + lane % 16 * 16 + lane / 16 * 8);
  if (transposed)  // rows of b are along k
    ldmatrix_transposed(twice, tile_b + lane % 16 * 8);
  else
    ldmatrix(twice, tile_b + lane % 8 * 16 + lane / 8 % 2 * 8);
  const uint32_t fragment_b[2] = {twice[0], twice[1]};
  float d[4] = {};
  mma_m16n8k16(d, fragment_a, fragment_b, T());
  for (int i = 0; i < 4; ++i) out[(lane / 4 + 8 * (i / 2)) * 8 + 2 * (lane % 4) + i % 2] = d[i];
}

// Every collective of a warp, against the same in plain loops over `in` (small whole numbers).
static __global__ void collectives(const float* in, float* out) {
  const int lane = threadIdx.x % 32, value = int(in[threadIdx.x]);
  const float* own = in + threadIdx.x - lane;
  int sum = 0, least = 1 << 30, most = -(1 << 30);
  unsigned odd = 0, equal = 0;
  for (int l = 0; l < 32; ++l) {
    const int v = int(own[l]);
    sum += v, least = min(least, v), most = max(most, v), odd |= unsigned(v & 1) << l;
    equal |= unsigned(v == value) << l;
  }
  bool good = __reduce_add_sync(~0u, value) == sum && __reduce_min_sync(~0u, value) == least;
  good &= __reduce_max_sync(~0u, value) == most && __ballot_sync(~0u, value & 1) == odd;
  good &= __any_sync(~0u, value & 1) == (odd != 0) && __all_sync(~0u, value & 1) == (odd == ~0u);
  good &= __match_any_sync(~0u, value) == equal;
  good &= __shfl_xor_sync(~0u, in[threadIdx.x], 5) == own[lane ^ 5];
  good &= __shfl_down_sync(~0u, value, 3) == int(own[lane + 3 < 32 ? lane + 3 : lane]);
  good &= __shfl_up_sync(~0u, value, 3, 8) == int(own[lane % 8 >= 3 ? lane - 3 : lane]);
  good &= __syncthreads_count(lane < 3) == int(3 * blockDim.x / 32);
  good &= __syncthreads_or(threadIdx.x == 40) == 1 && __syncthreads_and(threadIdx.x != 40) == 0;
  out[threadIdx.x] = good ? in[threadIdx.x] : -1;
}

template <bool kFault>
static cudaError_t run(const std::string& name, const float* in, float* out, cudaStream_t stream) {
  const dim3 one(1), block(kThreads);
  const size_t bytes = kThreads * sizeof(float);
  if (name == "missing_barrier") return launch(missing_barrier<kFault>, one, block, 0, stream, in, out);
  if (name == "missing_second_barrier") return launch(missing_second_barrier<kFault>, one, block, 0, stream, in, out);
  if (name == "missing_syncwarp") return launch(missing_syncwarp<kFault>, one, block, bytes, stream, in, out);
  constexpr auto no_wait = kFault ? CopyFault::kNoWait : CopyFault::kNone;
  constexpr auto no_barrier = kFault ? CopyFault::kNoBarrier : CopyFault::kNone;
  constexpr auto wrong_group = kFault ? CopyFault::kWrongGroup : CopyFault::kNone;
  if (name == "copy_without_wait") return launch(copy<no_wait>, one, block, 2 * bytes, stream, in, out);
  if (name == "copy_without_barrier") return launch(copy<no_barrier>, one, block, 2 * bytes, stream, in, out);
  if (name == "copy_of_a_later_group") return launch(copy<wrong_group>, one, block, 2 * bytes, stream, in, out);
  if (name == "copy_of_a_changing_source")
    return launch(copy_of_a_changing_source<kFault>, one, block, bytes, stream, in, out);
  if (name == "unwritten_shared") return launch(unwritten_shared<kFault>, one, block, 0, stream, in, out);
  if (name == "unwritten_register") return launch(unwritten_register<kFault>, one, block, 0, stream, in, out);
  if (name == "divergent_barrier") return launch(divergent_barrier<kFault>, one, block, 0, stream, in, out);
  if (name == "lane_left") return launch(lane_left<kFault>, one, block, 0, stream, in, out);
  if (name == "lane_outside") return launch(lane_outside<kFault>, one, block, 0, stream, in, out);
  if (name == "misaligned_load") return launch(misaligned_load<kFault>, one, block, 0, stream, in, out);
  if (name == "past_dynamic_shared") return launch(past_dynamic_shared<kFault>, one, block, bytes, stream, in, out);
  if (name == "past_static_shared") return launch(past_static_shared<kFault>, one, block, 0, stream, in, out);
  if (name == "past_global") return launch(past_global<kFault>, one, block, 0, stream, in, out);
  if (name == "collectives") return launch(collectives, one, block, 0, stream, in, out);
  if (name == "early_read") {
    launch(first_half, dim3(kThreads / 32), dim3(32), 0, stream, in, out);
    return launch_overlapping(early_read<kFault>, dim3(kThreads / 32), dim3(32), 0, stream, out);
  }
  if (name == "early_read_of_stores" || name == "early_read_of_atomics") {
    launch(name == "early_read_of_stores" ? store_and_release<false> : store_and_release<true>, one, block, 0, stream,
           in, out);
    return launch_overlapping(early_read<kFault>, one, block, 0, stream, out);
  }
  if (name == "early_store") {
    launch(first_half, dim3(kThreads / 32), dim3(32), 0, stream, in, out);
    return launch_overlapping(early_store<kFault>, dim3(kThreads / 32), dim3(32), 0, stream, out);
  }
  if (name == "early_end") {
    launch(first_half, dim3(kThreads / 32), dim3(32), 0, stream, in, out);
    return launch_overlapping(early_end<kFault>, dim3(kThreads / 32), dim3(32), 0, stream, out);
  }
  if (name == "read_two_kernels_ahead") {
    launch(first_half, dim3(kThreads / 32), dim3(32), 0, stream, in, out);
    launch_overlapping(lets_the_next_start<kFault>, dim3(3), dim3(32), 0, stream);
    return launch_overlapping(read_before_the_wait, dim3(kThreads / 32), dim3(32), 0, stream, out);
  }
  constexpr auto no_fence_ahead = kFault ? CountFault::kNoFenceAhead : CountFault::kNone;
  constexpr auto no_fence_after = kFault ? CountFault::kNoFenceAfter : CountFault::kNone;
  constexpr auto no_atomic = kFault ? CountFault::kNoAtomic : CountFault::kNone;
  const dim3 four(4), quarter(kThreads / 4);
  if (name == "no_fence_ahead") {
    launch(fill_slot, one, block, 0, stream, in, out);
    return launch(counted<no_fence_ahead>, four, quarter, 0, stream, in, out);
  }
  if (name == "no_fence_after") {
    launch(fill_slot, one, block, 0, stream, in, out);
    return launch(counted<no_fence_after>, four, quarter, 0, stream, in, out);
  }
  if (name == "no_atomic") {
    launch(fill_slot, one, block, 0, stream, in, out);
    return launch(counted<no_atomic>, four, quarter, 0, stream, in, out);
  }
  if (name == "overwritten_slot") {
    launch(fill_slot, one, block, 0, stream, in, out);
    return launch(overwritten_slot<kFault>, dim3(4), dim3(kThreads / 4), 0, stream, in, out);
  }
  return cudaErrorInvalidValue;
}

cudaError_t launch_self_test(const std::string& name, bool fault, const float* in, float* out, cudaStream_t stream) {
  return fault ? run<true>(name, in, out, stream) : run<false>(name, in, out, stream);
}

cudaError_t launch_last_block(bool fault, const float* in, float* partial, unsigned* counter, float* out,
                              cudaStream_t stream) {
  return launch(fault ? last_block<true> : last_block<false>, dim3(4), dim3(kThreads), 0, stream, in, partial, counter,
                out);
}

cudaError_t launch_tensor_core(bool half, const void* a, const void* b, float* out, bool transposed,
                               cudaStream_t stream) {
  if (half)
    return launch(tensor_core<__half>, dim3(1), dim3(32), 0, stream, static_cast<const __half*>(a),
                  static_cast<const __half*>(b), out, transposed);
  return launch(tensor_core<__nv_bfloat16>, dim3(1), dim3(32), 0, stream, static_cast<const __nv_bfloat16*>(a),
                static_cast<const __nv_bfloat16*>(b), out, transposed);
}

}  // namespace dflash
