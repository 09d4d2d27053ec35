// Channels are the lanes. A task takes up to 256 channels of one sequence: it transposes their weights, sets the
// context aside, which the window's new rows may overwrite, and then goes through the rows. Threads share the tasks.
#include "cpu/base/parallel.h"

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kChannels = 256;
constexpr int kVecs = 4;  // side by side: a SiLU is a long chain of operations

// One row of up to kChannels channels. Where they do not fill the last vector, what is behind them is not read: the
// inputs and the result then lie in padded memory.
template <typename T>
static inline void convolve(const T* const* inputs, const float* taps, const float* bias, int64_t width,
                            int64_t channels, bool has_silu, T* out) {
  for (int64_t c = 0; c < channels; c += kVecs * kWidth) {
    Vec sums[kVecs];
    for (int v = 0; v < kVecs; ++v) sums[v] = load(bias + c + v * kWidth);
    for (int64_t j = 0; j < width; ++j)
      for (int v = 0; v < kVecs; ++v)
        sums[v] = fma_vec(load(taps + j * kChannels + c + v * kWidth), load(inputs[j] + c + v * kWidth), sums[v]);
    if (has_silu)
      for (int v = 0; v < kVecs; ++v) sums[v] = silu(sums[v]);
    for (int v = 0; v < kVecs; ++v) store(out + c + v * kWidth, sums[v]);
  }
}

template <typename T>
struct Task {
  const CausalConvParams& p;
  int64_t b, first, channels, reach, pending, keep;
  T* window;       // [reach + block, p.channels], from `first` on
  const T* x;      // [rows, p.channels], likewise
  float* bias;     // [kChannels]
  float* taps;     // [width, kChannels]
  T* context;      // [reach, kChannels]
  T* padded;       // [rows, kChannels], a copy of x if the last vectors are not full
  T* result;       // [kChannels]
  const T** rows;  // [width], the inputs of a row

  Task(const CausalConvParams& p, int64_t b, int64_t first)
      : p(p), b(b), first(first), channels(least(kChannels, p.channels - first)), reach(p.width - 1) {
    static thread_local Buffer<float> floats;
    static thread_local Buffer<T> inputs;
    static thread_local Buffer<const T*> pointers;
    pending = clamped(p.pending[b], p.block), keep = clamped(p.keep[b], p.rows);
    window = static_cast<T*>(p.window) + b * (reach + p.block) * p.channels + first;
    x = static_cast<const T*>(p.x) + b * p.x_stride_batch + first;
    bias = floats.reserve((1 + p.width) * kChannels), taps = bias + kChannels;
    context = inputs.reserve((reach + 1 + (is_full() ? 0 : p.rows)) * kChannels);
    result = context + reach * kChannels, padded = result + kChannels;
    rows = pointers.reserve(p.width);
    const T* weight = static_cast<const T*>(p.weight) + first * p.width;
    for (int64_t c = 0; c < channels; ++c) bias[c] = p.bias ? to_float(static_cast<const T*>(p.bias)[first + c]) : 0.0f;
    for (int64_t j = 0; j < p.width; ++j)
      for (int64_t c = 0; c < channels; ++c) taps[j * kChannels + c] = to_float(weight[c * p.width + j]);
    for (int64_t i = 0; i < reach; ++i)
      std::memcpy(context + i * kChannels, window + (pending + i) * p.channels, sizeof(T) * channels);
    for (int64_t t = 0; !is_full() && t < p.rows; ++t)
      std::memcpy(padded + t * kChannels, x + t * p.x_stride_row, sizeof(T) * channels);
  }

  bool is_full() const { return channels % (kVecs * kWidth) == 0; }

  // Input i of the context and the rows, one after another.
  const T* input(int64_t i) const {
    if (i < reach) return context + i * kChannels;
    return is_full() ? x + (i - reach) * p.x_stride_row : padded + (i - reach) * kChannels;
  }

  void run() const {
    T* out = static_cast<T*>(p.out) + b * p.rows * p.channels + first;
    for (int64_t t = 0; t < p.rows; ++t, out += p.channels) {
      for (int64_t j = 0; j < p.width; ++j) rows[j] = input(t + j);
      convolve(rows, taps, bias, p.width, channels, p.silu, is_full() ? out : result);
      if (!is_full()) std::memcpy(out, result, sizeof(T) * channels);
    }
    for (int64_t i = 0; i < reach; ++i) std::memcpy(window + i * p.channels, input(keep + i), sizeof(T) * channels);
    for (int64_t t = 0; t < least(p.rows, p.block); ++t)
      std::memcpy(window + (reach + t) * p.channels, x + t * p.x_stride_row, sizeof(T) * channels);
  }
};

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::causal_conv(const CausalConvParams& p) {
  const int64_t tiles = ceil_div(p.channels, kChannels);
  parallel_rows(p, p.batch * tiles, p.batch * p.rows * p.channels * p.width,
                [&](auto type, int64_t i) { Task<decltype(type)>(p, i / tiles, i % tiles * kChannels).run(); });
}
