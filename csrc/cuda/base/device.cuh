// What the CUDA kernels and their launchers share: storage types, 16-byte accesses, warp and block sums.
#pragma once
#include "binding/params.h"
#include "cuda/base/launch.h"
#include "cuda/base/ptx.cuh"

namespace dflash {

// Makes a device current, and the previous one again at the end of the scope: unless that has no context yet, since
// making it current would make one, half a gigabyte that nobody asked for.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : device_(device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device_) error_ = cudaSetDevice(device_);
  }
  ~DeviceScope() {
    if (previous_ >= 0 && previous_ != device_ && has_context(previous_)) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int device_;
  int previous_ = -1;
  cudaError_t error_;
};

// Calls f(T()) with the storage type.
template <typename F>
cudaError_t dispatch(DType dtype, F&& f) {
  if (dtype == DType::kFloat32) return f(float());
  if (dtype == DType::kBFloat16) return f(__nv_bfloat16());
  if (dtype == DType::kFloat16) return f(__half());
  return cudaErrorInvalidValue;
}

// Calls f(), or f(T()) with the storage type, where the device of `p` is current; not at all without work.
template <typename Params, typename F>
cudaError_t run_on_device(const Params& p, int64_t work, F&& f) {
  if (work == 0) return cudaSuccess;
  const DeviceScope scope(p.device);
  if (scope.error() != cudaSuccess) return scope.error();
  if constexpr (std::is_invocable_v<F>)
    return f();
  else
    return dispatch(p.dtype, f);
}

// launch_overlapping with a grid of one dimension and no dynamic shared memory.
template <typename... Parameters>
cudaError_t launch_flat(void (*kernel)(Parameters...), int64_t blocks, int64_t threads, cudaStream_t stream,
                        std::common_type_t<Parameters>... arguments) {
  return launch_overlapping(kernel, dim3(unsigned(blocks)), dim3(unsigned(threads)), 0, stream, arguments...);
}

// True if 16-byte accesses may go to all of these: addresses, and sizes or strides in bytes; null is fine.
template <typename... Values>
bool aligned16(Values... values) {
  return ((uint64_t(values) % 16 == 0) && ...);
}

constexpr __host__ __device__ int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

constexpr unsigned kAllLanes = 0xffffffffu;

__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fffffffu); }

__device__ __forceinline__ int64_t clamped(int64_t x, int64_t most) { return max(int64_t(0), min(x, most)); }

// How a kernel starts that touches no memory before the kernels ahead have ended.
__device__ __forceinline__ void grid_begin() {
  grid_launch_dependents();
  grid_dependency_wait();
}

// ---- storage: fp32 in registers, T in memory, rounded to nearest even

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x) {
  if constexpr (std::is_same_v<T, float>)
    return x;
  else if constexpr (std::is_same_v<T, __half>)
    return __float2half_rn(x);
  else
    return __float2bfloat16_rn(x);
}

template <typename T>
constexpr int kPer16 = 16 / int(sizeof(T));  // elements in 16 bytes

// The elements of 16 bytes, and back.
template <typename T>
__device__ __forceinline__ void unpack(uint4 words, float (&v)[kPer16<T>]) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      v[i] = __uint_as_float(word[i]);
    } else if constexpr (std::is_same_v<T, __half>) {
      __half2 pair;
      memcpy(static_cast<void*>(&pair), &word[i], 4);
      const float2 wide = __half22float2(pair);
      v[2 * i] = wide.x, v[2 * i + 1] = wide.y;
    } else {
      v[2 * i] = __uint_as_float(word[i] << 16), v[2 * i + 1] = __uint_as_float(word[i] & 0xffff0000u);
    }
  }
}

// Two neighbors of 16 bits, the first in the low half.
template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float low, float high) {
  uint32_t word;
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    memcpy(&word, &pair, 4);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    memcpy(&word, &pair, 4);
  }
  return word;
}

template <typename T>
__device__ __forceinline__ uint4 pack(const float (&v)[kPer16<T>]) {
  uint32_t word[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<T, float>)
      word[i] = __float_as_uint(v[i]);
    else
      word[i] = pack_pair<T>(v[2 * i], v[2 * i + 1]);
  }
  return make_uint4(word[0], word[1], word[2], word[3]);
}

// kWidth elements at once: kPer16<T> of them in one access, or one. Kernels are compiled for both widths, the second
// for shapes whose rows are not a multiple of 16 bytes.
template <typename T, int kWidth>
using Packed = std::conditional_t<kWidth == 1, T, uint4>;

// run_on_device with f(T(), width), the width as a constant: that of 16 bytes if all addresses and sizes (in elements)
// are multiples of it, else 1.
template <typename Params, typename F>
cudaError_t run_packed(const Params& p, int64_t work, std::initializer_list<const void*> addresses,
                       std::initializer_list<int64_t> sizes, F&& f) {
  return run_on_device(p, work, [&](auto type) {
    bool wide = true;
    for (const void* address : addresses) wide &= aligned16(address);
    for (int64_t size : sizes) wide &= aligned16(size * sizeof(type));
    return wide ? f(type, std::integral_constant<int, kPer16<decltype(type)>>())
                : f(type, std::integral_constant<int, 1>());
  });
}

// Packed loads can all be in flight before the first is used.
template <typename T, int kWidth>
__device__ __forceinline__ Packed<T, kWidth> load_packed(const T* from) {
  if constexpr (kWidth == 1)
    return *from;
  else
    return load16(from);
}
template <typename T, int kWidth>
__device__ __forceinline__ void unpack_to(Packed<T, kWidth> packed, float (&v)[kWidth]) {
  if constexpr (kWidth == 1)
    v[0] = to_float(packed);
  else
    unpack<T>(packed, v);
}
template <typename T, int kWidth>
__device__ __forceinline__ void load(const T* from, float (&v)[kWidth]) {
  unpack_to<T, kWidth>(load_packed<T, kWidth>(from), v);
}
template <typename T, int kWidth>
__device__ __forceinline__ void store(T* to, const float (&v)[kWidth]) {
  if constexpr (kWidth == 1)
    *to = from_float<T>(v[0]);
  else
    store16(to, pack<T>(v));
}
template <typename T, int kWidth>
__device__ __forceinline__ void store_packed(T* to, Packed<T, kWidth> packed) {
  if constexpr (kWidth == 1)
    *to = packed;
  else
    store16(to, packed);
}
template <typename T, int kWidth>
__device__ __forceinline__ void copy(const T* from, T* to) {
  store_packed<T, kWidth>(to, load_packed<T, kWidth>(from));
}

// v rounded to T.
template <typename T, int kWidth>
__device__ __forceinline__ void round_to(float (&v)[kWidth]) {
#pragma unroll
  for (int i = 0; i < kWidth; ++i) v[i] = to_float(from_float<T>(v[i]));
}

// The s of gelu(x) = x * sigmoid(s) by the approximation with tanh: sqrt(8 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ float gelu_sigmoid(float x) { return x * 1.5957691216f * __fmaf_rn(x * x, 0.044715f, 1.0f); }

// gate / (1 + exp(-gate)) * up
__device__ __forceinline__ float silu_mul(float gate, float up) { return gate / (1.0f + expf(-gate)) * up; }

// Offset of a piece of 16 bytes of a row in shared memory, in elements of 16 bits, for rows of kWidth. Eight rows at
// the same piece use different banks.
template <int kWidth>
__device__ __forceinline__ int place(int row, int piece) {
  return row * kWidth + (piece ^ (row % 8)) * 8;
}

// ---- reductions: every thread of the warp or block calls, every thread gets the result; fixed order

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

// blockDim.x is a multiple of 32; scratch is shared memory with a float per warp, which nobody has read since the last
// barrier.
__device__ __forceinline__ float block_sum(float x, float* scratch) {
  x = warp_sum(x);
  const unsigned warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_sum(threadIdx.x % 32 < warps ? scratch[threadIdx.x % 32] : 0.0f);
}
__device__ __forceinline__ float block_max(float x, float* scratch) {
  x = warp_max(x);
  const unsigned warps = blockDim.x / 32;
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_max(threadIdx.x % 32 < warps ? scratch[threadIdx.x % 32] : -infinity());
}

}  // namespace dflash
