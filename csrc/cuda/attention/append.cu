// Norm and RoPE of heads, and the append of k and v to the row's slot of the cache. One warp per head and row. The
// normed head is in shared memory, because a lane needs both halves.
//
// A warp looks up the length of its sequence, and from it finds its slot and its row of the table of angles: one load
// waits for another. With `prefetch` both are read before the wait (the rule is in ptx.cuh), and only the head itself
// after it.
//
// append_context_kv does this for k and v only, for all layers in one launch.
#include "common/row_place.h"
#include "cuda/base/device.cuh"

namespace dflash {

constexpr int kWarps = 4;
constexpr int kLayersPerLaunch = 64;

// A load that may come before the wait.
template <typename Value>
static __device__ __forceinline__ Value load_early(const void* at) {
  return __ldcg(static_cast<const Value*>(at));
}

// The norm and rotation of one head. A null weight means no norm.
template <typename T>
struct Turn {
  const T* weight;         // [head_dim]
  const float *cos, *sin;  // [half]
  int head_dim, half;
  float eps, offset;  // norm_offset()

  // At row `angle` of the tables of `p`.
  template <typename Params>
  __device__ __forceinline__ Turn(const Params& p, const T* weight, int64_t angle, bool zero_centered)
      : weight(weight), head_dim(int(p.head_dim)), half(int(p.half)), eps(p.eps), offset(norm_offset(zero_centered)) {
    cos = p.cos + angle * p.half, sin = p.sin + angle * p.half;
  }
};

// A lane's inputs for kWidth dimensions of a head, starting at i.
template <typename T, int kWidth>
struct Piece {
  Packed<T, kWidth> x, weight;
  float cos[kWidth], sin[kWidth];

  __device__ __forceinline__ void read_x(const T* head, int head_dim, int i) {
    if (i < head_dim) x = load_packed<T, kWidth>(head + i);
  }
  __device__ __forceinline__ void read_turn(const Turn<T>& t, int i) {
    if (t.weight && i < t.head_dim) weight = load_early<Packed<T, kWidth>>(t.weight + i);
    constexpr int kAngles = kWidth == 1 ? 1 : 4;  // of one half: the launcher asks for that
#pragma unroll
    for (int e = 0; e < kWidth; e += kAngles) {
      const int j = i + e, angle = j < t.half ? j : j - t.half;
      if (j >= 2 * t.half) continue;
      float c[kAngles], s[kAngles];
      unpack_to<float, kAngles>(load_early<Packed<float, kAngles>>(t.cos + angle), c);
      unpack_to<float, kAngles>(load_early<Packed<float, kAngles>>(t.sin + angle), s);
#pragma unroll
      for (int k = 0; k < kAngles; ++k) cos[e + k] = c[k], sin[e + k] = s[k];
    }
  }
};

// One warp: x [head_dim] -> out [head_dim]. `normed` [head_dim] is the warp's own shared memory. `first` is the lane's
// piece of the first 32 * kWidth dimensions, loaded in advance; the rest, if any, is read in the loop.
template <typename T, int kWidth>
static __device__ void norm_rope(const Turn<T>& t, const T* x, T* out, float* normed, const Piece<T, kWidth>& first) {
  const int begin = threadIdx.x % 32 * kWidth, step = 32 * kWidth;
  Piece<T, kWidth> piece = first;
  float squares = 0.0f;
  for (int i = begin; i < t.head_dim; i += step) {
    if (i >= step) piece.read_x(x, t.head_dim, i);
    float v[kWidth];
    unpack_to<T, kWidth>(piece.x, v);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) normed[i + e] = v[e], squares += v[e] * v[e];
  }
  const float scale = t.weight ? 1.0f / sqrtf(warp_sum(squares) / float(t.head_dim) + t.eps) : 1.0f;
  for (int i = begin; t.weight && i < t.head_dim; i += step) {
    if (i >= step) piece.read_turn(t, i);
    float w[kWidth];
    unpack_to<T, kWidth>(piece.weight, w);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) normed[i + e] = normed[i + e] * scale * (w[e] + t.offset);
  }
  __syncwarp();
  piece = first;
  for (int i = begin; i < t.head_dim; i += step) {
    if (i >= step) piece.read_turn(t, i);
    float v[kWidth];
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      const int j = i + e;
      v[e] = normed[j];
      if (j < t.half)
        v[e] = v[e] * piece.cos[e] - normed[j + t.half] * piece.sin[e];
      else if (j < 2 * t.half)
        v[e] = v[e] * piece.cos[e] + normed[j - t.half] * piece.sin[e];
    }
    store<T, kWidth>(out + i, v);
  }
}

template <typename T, int kWidth>
static __device__ void copy_head(const T* x, T* out, int head_dim, const Piece<T, kWidth>& first) {
  const int begin = threadIdx.x % 32 * kWidth, step = 32 * kWidth;
  if (begin < head_dim) store_packed<T, kWidth>(out + begin, first.x);
  for (int i = begin + step; i < head_dim; i += step) copy<T, kWidth>(x + i, out + i);
}

template <typename T, int kWidth>
static __global__ void __launch_bounds__(32 * kWarps, 1) qkv_norm_rope_append_kernel(const QkvNormRopeAppendParams p) {
  const int d = int(p.head_dim);
  const int64_t heads = p.num_heads + 2 * p.num_kv_heads;
  const int64_t unit = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, index = unit / heads;
  const int64_t head = unit % heads, b = index / p.rows, row = index % p.rows;
  const bool is_query = head < p.num_heads, is_value = head >= p.num_heads + p.num_kv_heads;
  // A gated query head is followed by its gate: two heads' room each.
  const int64_t gates = p.gated ? p.num_heads : 0;
  const int64_t slot_in_row = is_query && p.gated ? 2 * head : head + gates;
  const T* x = static_cast<const T*>(p.qkv) + (index * (heads + gates) + slot_in_row) * d;
  float* normed = shared<float>() + threadIdx.x / 32 * d;
  if (!p.prefetch) grid_dependency_wait();
  const bool exists = index < p.batch * p.rows;
  const RowPlace place = exists ? place_of(p, b, row) : RowPlace{-1, 0};
  const void* weight = is_query ? p.q_norm_weight : p.k_norm_weight;
  const Turn<T> turn(p, static_cast<const T*>(weight), place.angle, p.zero_centered);
  Piece<T, kWidth> first{};  // requested before the slot is used
  if (!is_value) first.read_turn(turn, threadIdx.x % 32 * kWidth);
  grid_dependency_wait();
  grid_launch_dependents();  // not before: attention relies on it, see block_attention.cu
  if (!exists) return;
  first.read_x(x, d, threadIdx.x % 32 * kWidth);
  if (is_query) {
    const int64_t q_row = row - (p.rows - p.q_rows);
    if (q_row < 0) return;
    T* out = static_cast<T*>(p.q_out) + ((b * p.q_rows + q_row) * p.num_heads + head) * d;
    norm_rope<T, kWidth>(turn, x, out, normed, first);
    return;
  }
  if (place.slot < 0 || place.slot >= p.capacity) return;
  const int64_t kv_head = head - p.num_heads - (is_value ? p.num_kv_heads : 0);
  const int64_t slot = ((b * p.num_kv_heads + kv_head) * p.capacity + place.slot) * d;
  if (is_value)
    copy_head<T, kWidth>(x, static_cast<T*>(p.v_cache) + slot, d, first);
  else
    norm_rope<T, kWidth>(turn, x, static_cast<T*>(p.k_cache) + slot, normed, first);
}

struct Caches {
  void* k[kLayersPerLaunch];
  void* v[kLayersPerLaunch];
};

template <typename T, int kWidth>
static __global__ void __launch_bounds__(32 * kWarps, 1)
    append_context_kv_kernel(const AppendContextKvParams p, const __grid_constant__ Caches caches) {
  const int d = int(p.head_dim);
  const int64_t heads = 2 * p.num_kv_heads, rows = p.batch * p.rows;
  const int64_t unit = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t layer = unit / (rows * heads), row = unit / heads % rows, head = unit % heads;
  grid_begin();
  if (layer >= p.num_layers) return;
  const int64_t position = p.positions[row];
  const bool is_value = head >= p.num_kv_heads;
  const T *x = static_cast<const T*>(p.kv) + unit * d, *weight = static_cast<const T*>(p.k_norm_weight);
  const Turn<T> turn(p, weight ? weight + layer * d : nullptr, row, false);
  Piece<T, kWidth> first{};
  first.read_x(x, d, threadIdx.x % 32 * kWidth);
  if (!is_value) first.read_turn(turn, threadIdx.x % 32 * kWidth);
  if (position < 0 || position >= p.capacity) return;
  const int64_t kv_head = head % p.num_kv_heads;
  const int64_t slot = ((row / p.rows * p.num_kv_heads + kv_head) * p.capacity + position) * d;
  if (is_value)
    copy_head<T, kWidth>(x, static_cast<T*>(caches.v[layer]) + slot, d, first);
  else
    norm_rope<T, kWidth>(turn, x, static_cast<T*>(caches.k[layer]) + slot, shared<float>() + threadIdx.x / 32 * d,
                         first);
}

cudaError_t launch_qkv_norm_rope_append(const QkvNormRopeAppendParams& p, cudaStream_t stream) {
  const int64_t units = p.batch * p.rows * (p.num_heads + 2 * p.num_kv_heads);
  return run_on_device(p, units * p.head_dim, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = kPer16<T>;
    const bool wide = aligned16(p.qkv, p.q_norm_weight, p.k_norm_weight, p.q_out, p.k_cache, p.v_cache,
                                p.head_dim * sizeof(T), p.cos, p.sin, p.half * sizeof(float));
    return launch_overlapping(wide ? qkv_norm_rope_append_kernel<T, kWidth> : qkv_norm_rope_append_kernel<T, 1>,
                              dim3(unsigned(ceil_div(units, kWarps))), dim3(32 * kWarps),
                              kWarps * p.head_dim * sizeof(float), stream, p);
  });
}

cudaError_t launch_append_context_kv(const AppendContextKvParams& all, cudaStream_t stream) {
  const int64_t units = all.batch * all.rows * 2 * all.num_kv_heads;  // per layer
  return run_on_device(all, units * all.head_dim, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = kPer16<T>;
    bool wide =
        aligned16(all.kv, all.k_norm_weight, all.head_dim * sizeof(T), all.cos, all.sin, all.half * sizeof(float));
    for (int64_t i = 0; i < all.num_layers; ++i) wide &= aligned16(all.k_caches[i], all.v_caches[i]);
    for (int64_t begin = 0; begin < all.num_layers; begin += kLayersPerLaunch) {
      AppendContextKvParams p = all;
      Caches caches{};
      p.num_layers = min(all.num_layers - begin, int64_t(kLayersPerLaunch));
      p.kv = static_cast<const T*>(all.kv) + begin * units * all.head_dim;
      if (all.k_norm_weight) p.k_norm_weight = static_cast<const T*>(all.k_norm_weight) + begin * all.head_dim;
      for (int64_t i = 0; i < p.num_layers; ++i) {
        caches.k[i] = all.k_caches[begin + i];
        caches.v[i] = all.v_caches[begin + i];
      }
      const cudaError_t error =
          launch_overlapping(wide ? append_context_kv_kernel<T, kWidth> : append_context_kv_kernel<T, 1>,
                             dim3(unsigned(ceil_div(p.num_layers * units, kWarps))), dim3(32 * kWarps),
                             kWarps * p.head_dim * sizeof(float), stream, p, caches);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

// ---- append_kv

// T is any type as wide as an element; the kernel only copies it.
template <typename T, int kWidth>
static __global__ void __launch_bounds__(32 * kWarps, 1) append_kv_kernel(const AppendKvParams p) {
  const int64_t heads = 2 * p.num_kv_heads;
  const int64_t unit = int64_t(blockIdx.x) * kWarps + threadIdx.x / 32, index = unit / heads;
  const bool is_value = unit % heads >= p.num_kv_heads;
  const int64_t b = index / p.rows, row = index % p.rows, head = unit % p.num_kv_heads;
  const int64_t d = is_value ? p.v_head_dim : p.head_dim;
  const T* from =
      is_value ? static_cast<const T*>(p.value) + b * p.v_stride_batch + head * p.v_stride_head + row * p.v_stride_row
               : static_cast<const T*>(p.key) + b * p.k_stride_batch + head * p.k_stride_head + row * p.k_stride_row;
  const int64_t begin = threadIdx.x % 32 * kWidth;
  grid_begin();
  if (index >= p.batch * p.rows) return;
  const int64_t position = p.positions[index];
  Packed<T, kWidth> first{};  // requested before the position is used
  if (begin < d) first = load_packed<T, kWidth>(from + begin);
  if (position < 0 || position >= p.capacity) return;
  const int64_t slot = (b * p.num_kv_heads + head) * p.capacity + position;
  T* to = static_cast<T*>(is_value ? p.v_cache : p.k_cache) + slot * d;
  if (begin < d) store_packed<T, kWidth>(to + begin, first);
  for (int64_t i = begin + 32 * kWidth; i < d; i += 32 * kWidth) copy<T, kWidth>(from + i, to + i);
}

cudaError_t launch_append_kv(const AppendKvParams& p, cudaStream_t stream) {
  const int64_t units = p.batch * p.rows * 2 * p.num_kv_heads;
  const auto launch = [&](auto type, auto width) {
    return launch_flat(append_kv_kernel<decltype(type), width>, ceil_div(units, kWarps), 32 * kWarps, stream, p);
  };
  return run_packed(p, units, {p.key, p.value, p.k_cache, p.v_cache},
                    {p.head_dim, p.v_head_dim, p.k_stride_batch, p.k_stride_head, p.k_stride_row, p.v_stride_batch,
                     p.v_stride_head, p.v_stride_row},
                    launch);
}

}  // namespace dflash
