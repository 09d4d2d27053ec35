// A linear recurrence, one head of one sequence at a time; heads over threads.
#include <algorithm>
#include <cmath>
#include <vector>

#include "cpu/parallel.h"
#include "params.h"

DFLASH_NAMESPACE_BEGIN

// S = a S + k d^T: the one place where a state moves, so that a row moves it to the same bits in every pass.
static void advance(const GatedRecurrenceParams& p, float* state, const float* a, const float* k,
                    const float* d) {
  for (int64_t i = 0; i < p.key_dim; ++i) {
    const float decay = a[p.decay_dim == 1 ? 0 : i];
    for (int64_t j = 0; j < p.value_dim; ++j) {
      const float decayed = decay * state[i * p.value_dim + j];
      state[i * p.value_dim + j] = decayed + k[i] * d[j];
    }
  }
}

static void run_head(const GatedRecurrenceParams& p, int64_t b, int64_t h) {
  const int64_t key_head = h / (p.heads / p.key_heads), size = p.key_dim * p.value_dim;
  const int64_t pending = std::clamp(p.pending[b], int64_t(0), p.block);
  const int64_t keep = std::clamp(p.keep[b], int64_t(0), p.rows);
  float* kept = p.state + (b * p.heads + h) * size;
  for (int64_t t = 0; t < pending; ++t) {
    const int64_t row = b * p.block + t;
    advance(p, kept, p.saved_a + (row * p.heads + h) * p.decay_dim,
            p.saved_k + (row * p.key_heads + key_head) * p.key_dim,
            p.saved_d + (row * p.heads + h) * p.value_dim);
  }
  std::vector<float> state(kept, kept + size), a(p.decay_dim), d(p.value_dim);
  for (int64_t t = 0; t < p.rows; ++t) {
    const int64_t row = b * p.rows + t;
    const float* q = p.q + (row * p.key_heads + key_head) * p.key_dim;
    const float* k = p.k + (row * p.key_heads + key_head) * p.key_dim;
    const float* v = p.v + (row * p.heads + h) * p.value_dim;
    for (int64_t i = 0; i < p.decay_dim; ++i)
      a[i] = std::exp(p.log_decay[(row * p.heads + h) * p.decay_dim + i]);
    for (int64_t j = 0; j < p.value_dim; ++j) {
      float held = 0;
      for (int64_t i = 0; p.beta && i < p.key_dim; ++i)
        held += a[p.decay_dim == 1 ? 0 : i] * state[i * p.value_dim + j] * k[i];
      d[j] = p.beta ? (v[j] - held) * p.beta[row * p.heads + h] : v[j];
    }
    advance(p, state.data(), a.data(), k, d.data());
    float* out = p.out + (row * p.heads + h) * p.value_dim;
    for (int64_t j = 0; j < p.value_dim; ++j) {
      out[j] = 0;
      for (int64_t i = 0; i < p.key_dim; ++i) out[j] += state[i * p.value_dim + j] * q[i];
    }
    if (t + 1 == keep) std::copy(state.begin(), state.end(), kept);
    if (t >= p.block) continue;
    const int64_t slot = b * p.block + t;
    std::copy(a.begin(), a.end(), p.saved_a + (slot * p.heads + h) * p.decay_dim);
    std::copy(d.begin(), d.end(), p.saved_d + (slot * p.heads + h) * p.value_dim);
  }
}

// Behind all heads: several share a key head.
static void save_keys(const GatedRecurrenceParams& p, int64_t b) {
  const int64_t width = p.key_heads * p.key_dim;
  const float* k = p.k + b * p.rows * width;
  std::copy(k, k + std::min(p.rows, p.block) * width, p.saved_k + b * p.block * width);
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void gated_recurrence(const GatedRecurrenceParams& p) {
  parallel_for(p.batch * p.heads, p.batch * p.heads * p.rows * p.key_dim * p.value_dim, p.threads,
               [&](int64_t i) { run_head(p, i / p.heads, i % p.heads); });
  for (int64_t b = 0; b < p.batch; ++b) save_keys(p, b);
}

}  // namespace dflash::DFLASH_ISA
