// A thread has 4 bytes of channels (one, or two neighbours) and a chunk of the rows. The thread of the first chunk
// alone reads the window, into registers, and alone writes it afterwards: later chunks find what is in front of them
// among the rows. Wide convolutions and odd numbers of 16-bit channels go through a plain kernel, one thread per
// channel, with the same bits.
#include "cuda/base/device.cuh"

namespace dflash {

constexpr int kThreads = 128;
constexpr int kChunk = 16;    // rows
constexpr int kMostTaps = 8;  // that fit in registers

template <typename T>
struct Channels {
  static constexpr int kWidth = int(4 / sizeof(T));
  using Word = std::conditional_t<kWidth == 1, T, uint32_t>;

  static __device__ __forceinline__ Word read(const T* from) { return *reinterpret_cast<const Word*>(from); }
  static __device__ __forceinline__ void write(T* to, Word word) { *reinterpret_cast<Word*>(to) = word; }
  static __device__ __forceinline__ void unpack(Word word, float (&v)[kWidth]) {
    T elements[kWidth];
    memcpy(static_cast<void*>(elements), &word, sizeof(word));
#pragma unroll
    for (int e = 0; e < kWidth; ++e) v[e] = to_float(elements[e]);
  }
  static __device__ __forceinline__ Word pack(const float (&v)[kWidth]) {
    if constexpr (kWidth == 1)
      return v[0];
    else
      return pack_pair<T>(v[0], v[1]);
  }
};

static __device__ __forceinline__ float activated(float y, bool silu) { return silu ? y / (1.0f + expf(-y)) : y; }

// One sequence at a thread's first channel. Inputs are counted from the oldest of the context.
template <typename T>
struct Sequence {
  const T* x;
  T *window, *out;
  int64_t x_stride, channels, reach, rows, block, pending, keep;

  __device__ __forceinline__ Sequence(const CausalConvParams& p, int64_t b, int64_t channel) {
    x = static_cast<const T*>(p.x) + b * p.x_stride_batch + channel;
    window = static_cast<T*>(p.window) + b * (p.width - 1 + p.block) * p.channels + channel;
    out = static_cast<T*>(p.out) + b * p.rows * p.channels + channel;
    x_stride = p.x_stride_row, channels = p.channels, reach = p.width - 1, rows = p.rows, block = p.block;
    pending = clamped(p.pending[b], block), keep = clamped(p.keep[b], rows);
  }

  __device__ __forceinline__ T* slot(int64_t i) const { return window + i * channels; }
  __device__ __forceinline__ const T* row(int64_t t) const { return x + t * x_stride; }
  __device__ __forceinline__ const T* input(int64_t i) const { return i < reach ? slot(pending + i) : row(i - reach); }
};

// Grid: (blocks of channels of all sequences, chunks of rows). kTaps is at least the width: the taps in front of the
// first one count for nothing.
template <typename T, int kTaps>
static __global__ void __launch_bounds__(kThreads, 1) causal_conv_kernel(const CausalConvParams p) {
  using C = Channels<T>;
  constexpr int kWidth = C::kWidth, kReach = kTaps - 1;
  static_assert(kReach <= kChunk, "later chunks do not reach the window");
  const int64_t per_sequence = ceil_div(p.channels, kThreads * kWidth), b = blockIdx.x / per_sequence;
  const int64_t channel = (blockIdx.x % per_sequence * kThreads + threadIdx.x) * kWidth;
  const int missing = kTaps - int(p.width);
  const int64_t first = int64_t(blockIdx.y) * kChunk;
  grid_begin();
  if (channel >= p.channels) return;
  const Sequence<T> at(p, b, channel);

  // 1. All that is read, the window above all
  typename C::Word inputs[kReach + kChunk], context[kReach];
#pragma unroll
  for (int i = 0; i < kReach + kChunk; ++i) {
    inputs[i] = typename C::Word();
    if (i >= missing && first + i - kReach < p.rows) inputs[i] = C::read(at.input(first + i - missing));
  }
#pragma unroll
  for (int i = 0; i < kReach; ++i) {
    context[i] = typename C::Word();
    if (first == 0 && i < at.reach) context[i] = C::read(at.input(at.keep + i));
  }
  float weight[kTaps][kWidth], bias[kWidth];
#pragma unroll
  for (int e = 0; e < kWidth; ++e) {
    bias[e] = p.bias ? to_float(static_cast<const T*>(p.bias)[channel + e]) : 0.0f;
#pragma unroll
    for (int j = 0; j < kTaps; ++j) {
      const int64_t tap = (channel + e) * p.width + j - missing;
      weight[j][e] = j >= missing ? to_float(static_cast<const T*>(p.weight)[tap]) : 0.0f;
    }
  }

  // 2. The rows
  float window[kReach + 1][kWidth];  // the inputs of a row
#pragma unroll
  for (int i = 0; i < kReach; ++i) C::unpack(inputs[i], window[i + 1]);
#pragma unroll
  for (int i = 0; i < kChunk; ++i) {
    if (first + i >= p.rows) break;
#pragma unroll
    for (int j = 0; j < kReach; ++j)
#pragma unroll
      for (int e = 0; e < kWidth; ++e) window[j][e] = window[j + 1][e];
    C::unpack(inputs[kReach + i], window[kReach]);
    float y[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      y[e] = bias[e];
#pragma unroll
      for (int j = 0; j < kTaps; ++j)
        if (j >= missing) y[e] = __fmaf_rn(weight[j][e], window[j][e], y[e]);
      y[e] = activated(y[e], p.silu);
    }
    C::write(at.out + (first + i) * p.channels, C::pack(y));
  }

  // 3. The window
  if (first > 0) return;
#pragma unroll
  for (int i = 0; i < kReach; ++i)
    if (i < at.reach) C::write(at.slot(i), context[i]);
  const int64_t stored = min(p.rows, p.block);
#pragma unroll
  for (int i = 0; i < kChunk; ++i)
    if (i < stored) C::write(at.slot(at.reach + i), inputs[kReach + i]);
  for (int64_t t = kChunk; t < stored; ++t) C::write(at.slot(at.reach + t), C::read(at.row(t)));
}

// A thread has all rows of a channel. The new context is at or ahead of the slots that it goes to.
template <typename T>
static __global__ void __launch_bounds__(kThreads, 1) plain_conv_kernel(const CausalConvParams p) {
  const int64_t index = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t b = index / p.channels, channel = index % p.channels;
  grid_begin();
  if (b >= p.batch) return;
  const Sequence<T> at(p, b, channel);
  const T* weight = static_cast<const T*>(p.weight) + channel * p.width;
  for (int64_t t = 0; t < p.rows; ++t) {
    float y = p.bias ? to_float(static_cast<const T*>(p.bias)[channel]) : 0.0f;
    for (int64_t j = 0; j < p.width; ++j) y = __fmaf_rn(to_float(weight[j]), to_float(*at.input(t + j)), y);
    at.out[t * p.channels] = from_float<T>(activated(y, p.silu));
  }
  for (int64_t i = 0; i < at.reach; ++i) *at.slot(i) = *at.input(at.keep + i);
  for (int64_t t = 0; t < min(p.rows, p.block); ++t) *at.slot(at.reach + t) = *at.row(t);
}

cudaError_t launch_causal_conv(const CausalConvParams& p, cudaStream_t stream) {
  return run_on_device(p, p.batch * p.channels, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = Channels<T>::kWidth;
    const uint64_t addresses = uint64_t(p.x) | uint64_t(p.window) | uint64_t(p.out);
    const bool whole = (p.channels | p.x_stride_batch | p.x_stride_row) % kWidth == 0 && addresses % 4 == 0;
    if (p.width > kMostTaps || !whole)
      return launch_flat(plain_conv_kernel<T>, ceil_div(p.batch * p.channels, kThreads), kThreads, stream, p);
    const int64_t blocks = p.batch * ceil_div(p.channels, kThreads * kWidth);
    const int64_t chunks = max(int64_t(1), ceil_div(p.rows, kChunk));  // without rows, the window still moves
    return launch_overlapping(p.width <= 4 ? causal_conv_kernel<T, 4> : causal_conv_kernel<T, kMostTaps>,
                              dim3(unsigned(blocks), unsigned(chunks)), dim3(kThreads), 0, stream, p);
  });
}

}  // namespace dflash
