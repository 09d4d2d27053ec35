// RMSNorm over a head, half-split RoPE, and the append of one row: shared by every op that fills a cache.
#pragma once
#include <cmath>

#include "cpu/base/vec.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
struct NormRope {
  const T* weight;         // [head_dim] or null: no norm
  const float *cos, *sin;  // [half]
  int64_t half, head_dim;
  float eps, offset;  // norm_offset()

  // At row `angle` of the tables of `p`.
  template <typename Params>
  NormRope(const Params& p, const void* weight, int64_t angle, bool zero_centered)
      : weight(static_cast<const T*>(weight)), half(p.half), head_dim(p.head_dim), eps(p.eps) {
    cos = p.cos + angle * half, sin = p.sin + angle * half, offset = norm_offset(zero_centered);
  }

  // x [head_dim] -> out [head_dim]
  void operator()(const T* x, T* out) const {
    const int64_t n = head_dim, rotated = 2 * half;
    const float scale = weight ? 1.0f / std::sqrt(sum_of_squares(x, n) / float(n) + eps) : 1.0f;
    const auto normed = [&](int64_t i, auto count) {
      return weight ? load(x + i, count) * scale * (load(weight + i, count) + offset) : load(x + i, count);
    };
    over_vectors(half, [&](int64_t i, auto count) {
      const Vec a = normed(i, count), b = normed(half + i, count), c = load(cos + i, count), s = load(sin + i, count);
      store(out + i, fma_vec(a, c, -(b * s)), count);
      store(out + half + i, fma_vec(b, c, a * s), count);
    });
    over_vectors(n - rotated,
                 [&](int64_t i, auto count) { store(out + rotated + i, normed(rotated + i, count), count); });
  }
};

// k, v [num_kv_heads, head_dim] to a slot of a sequence in caches [batch, num_kv_heads, capacity, head_dim]; one that
// they do not have appends nothing.
template <typename T, typename Params>
static inline void append_row(const Params& p, const T* k, const T* v, const NormRope<T>& norm_rope, void* k_cache,
                              void* v_cache, int64_t sequence, int64_t slot) {
  if (slot < 0 || slot >= p.capacity) return;
  for (int64_t h = 0; h < p.num_kv_heads; ++h) {
    const int64_t at = ((sequence * p.num_kv_heads + h) * p.capacity + slot) * p.head_dim;
    norm_rope(k + h * p.head_dim, static_cast<T*>(k_cache) + at);
    std::memcpy(static_cast<T*>(v_cache) + at, v + h * p.head_dim, p.head_dim * sizeof(T));
  }
}

DFLASH_NAMESPACE_END
