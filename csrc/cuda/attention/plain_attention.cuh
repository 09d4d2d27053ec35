// Attention without tensor cores: one block per query, 128 slots at a time, one key per thread.
#pragma once
#include "cuda/attention/attention.cuh"

namespace dflash {

constexpr int kPlainThreads = 128;
static_assert(kPlainThreads >= kMaxTreeRows, "a thread for each row of a tree");

// Grid: (rows * num_heads, batch). Weights of zero are skipped in the sums, so slots that a query does not see may hold
// anything.
template <typename T>
static __global__ void __launch_bounds__(kPlainThreads, 1) plain_attention_kernel(const BlockAttentionParams p) {
  __shared__ float weights[kPlainThreads], scratch[2][kPlainThreads / 32];
  __shared__ int slots[kPlainThreads];          // of the keys
  __shared__ unsigned char path[kMaxTreeRows];  // of a tree: the block's rows that the query sees
  float* q = shared<float>();                   // [head_dim]
  float* out = q + p.head_dim;                  // [v_head_dim]
  const int64_t row = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads, b = blockIdx.y;
  const int64_t kv_head = head / (p.num_heads / p.num_kv_heads);
  grid_launch_dependents();
  grid_dependency_wait();
  const int length = int(length_of(p, b)), own = int(threadIdx.x);
  int depth = int(row), seen = 0;  // seen: rows of the path
  if (p.ancestors) {
    const Path tree = path_of(p, b, depth);
    if (own < p.rows && tree.holds(own)) path[tree.depth_of(own)] = (unsigned char)own;
    depth = tree.depth(), seen = tree.count();
  }
  const Sight sight = sight_of(p, length, depth);
  const int64_t cache = (b * p.num_kv_heads + kv_head) * p.capacity;
  const T* k = static_cast<const T*>(p.k_cache) + cache * p.head_dim;
  const T* v = static_cast<const T*>(p.v_cache) + cache * p.v_head_dim;
  const T* from = static_cast<const T*>(p.q) + b * p.q_stride_batch + row * p.q_stride_row + head * p.q_stride_head;
  const float scale = p.softcap != 0.0f ? p.scale / p.softcap : p.scale;
  for (int64_t i = threadIdx.x; i < p.head_dim; i += kPlainThreads) q[i] = to_float(from[i]) * scale;
  for (int64_t i = threadIdx.x; i < p.v_head_dim; i += kPlainThreads) out[i] = 0.0f;
  __syncthreads();
  float top = -infinity(), sum = 0.0f;
  for (int first = sight.lo / kPlainThreads * kPlainThreads; first < sight.hi; first += kPlainThreads) {
    int slot = sight.sees(first + own) ? first + own : -1;
    if (p.ancestors && slot >= max(length, 0)) {
      const int place = slot - length;  // a path may be empty
      slot = place < seen && length + path[place] < p.capacity ? length + path[place] : -1;
    }
    float x = -infinity();
    if (slot >= 0) {
      const T* key = k + slot * p.head_dim;
      float part[8] = {};
      int64_t i = 0;
      for (; i + 8 <= p.head_dim; i += 8)
#pragma unroll
        for (int j = 0; j < 8; ++j) part[j] += q[i + j] * to_float(key[i + j]);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (i + j < p.head_dim) part[j] += q[i + j] * to_float(key[i + j]);
      x = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
      if (p.softcap != 0.0f) x = tanhf(x) * p.softcap;
    }
    const float larger = fmaxf(top, block_max(x, scratch[0])), base = larger == -infinity() ? 0.0f : larger;
    const float weight = expf(x - base), alpha = expf(top - base);
    weights[threadIdx.x] = weight, slots[threadIdx.x] = slot;
    sum = sum * alpha + block_sum(weight, scratch[1]);  // also the barrier for the weights
    top = larger;
    const int keys = min(kPlainThreads, sight.hi - first);
    for (int64_t d = threadIdx.x; d < p.v_head_dim; d += kPlainThreads) {
      float part[4] = {};
      for (int i = 0; i < keys; i += 4)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (i + j < keys && weights[i + j] != 0.0f)
            part[j] += weights[i + j] * to_float(v[slots[i + j] * p.v_head_dim + d]);
      out[d] = out[d] * alpha + ((part[0] + part[1]) + (part[2] + part[3]));
    }
    __syncthreads();
  }
  float keep = 1.0f;
  if (p.sinks) {
    const float larger = fmaxf(top, p.sinks[head]), base = larger == -infinity() ? 0.0f : larger;
    keep = expf(top - base);
    sum = sum * keep + expf(p.sinks[head] - base);
  }
  const float factor = sum == 0.0f ? 0.0f : keep / sum;
  T* to = static_cast<T*>(p.out) + ((b * p.rows + row) * p.num_heads + head) * p.v_head_dim;
  for (int64_t i = threadIdx.x; i < p.v_head_dim; i += kPlainThreads) to[i] = from_float<T>(out[i] * factor);
}

}  // namespace dflash
