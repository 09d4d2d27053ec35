// The best tokens of each row by score. The formulas are those of the CPU kernel; exponentials and logarithms round
// differently.
//
// Stage 1, one warp per span of a row, finds the span's largest logit, its largest d / T + noise, and its sums of both
// exponentials, with d below the span's own largest logit. Stage 2, one block per row, combines them: it then knows
// between which bounds the best score of each span lies. `count` spans reach the count-th largest lower bound, so only
// spans and tokens that may reach it are looked at again.
#include "cuda/vocab/best.cuh"

namespace dflash {

constexpr float kAboveLn2 = 0.6932f;

struct Row {
  float temperature, noise_weight;  // noise_weight is 0 at T <= 0
  uint64_t position, seed;
};

static __device__ Row row_of(const TreeCandidatesParams& p, int64_t index) {
  const int64_t b = index / p.depths;
  const float temperature = p.temperature[b];
  return {draw_of(temperature, 1.0f).temperature, temperature > 0.0f ? p.noise_weight : 0.0f,
          uint64_t(p.positions[index]), uint64_t(p.seeds[b])};
}

// gumbel(word) in fp32: the logarithm is of what is far from 1.
static __device__ __forceinline__ float noise_of(uint32_t word) {
  const float u = (float(word) + 0.5f) * 2.3283064365386963e-10f;
  const float rest = (float(~word) + 0.5f) * 2.3283064365386963e-10f;
  return -logf(u < 0.5f ? -log1pf(-u) : -logf(rest));
}

// Writes (largest logit, sum of exp(d), largest d / T + noise, sum of its exp) of each span to the workspace; the first
// is NaN if the span holds one.
template <typename T, int kWidth>
static __global__ void __launch_bounds__(32 * kSpanWarps, 1) measure_spans(const TreeCandidatesParams p) {
  const Span span(p.vocab);
  grid_begin();
  if (span.row >= p.batch * p.depths) return;
  const T* logits = static_cast<const T*>(p.logits) + span.row * p.vocab;
  const Row row = row_of(p, span.row);
  float top = -infinity(), plain = 0.0f, noisy_top = -infinity(), noisy = 0.0f;
  bool nan = false;
  span.for_tokens<kWidth>(logits, [&](uint32_t, float z) { nan |= z != z, top = fmaxf(top, z); });
  top = warp_max(top);
  nan = __ballot_sync(kAllLanes, nan) != 0;
  if (!nan && top > -infinity()) {
    RowNoise words(row.position, row.seed);
    span.for_tokens<kWidth>(logits, [&](uint32_t id, float z) {
      const float d = below_top(z, top);
      plain += expf(d);
      if (row.noise_weight == 0.0f) return;
      const float a = d / row.temperature + noise_of(words.word(id));
      noisy_top = fmaxf(noisy_top, a);
      noisy += expf(a);
    });
    plain = warp_sum(plain), noisy_top = warp_max(noisy_top), noisy = warp_sum(noisy);
  }
  if (threadIdx.x % 32 == 0) {
    const float largest = nan ? not_a_number() : top;
    store16(static_cast<uint4*>(p.workspace) + span.place,
            make_uint4(__float_as_uint(largest), __float_as_uint(plain), __float_as_uint(noisy_top),
                       __float_as_uint(noisy)));
  }
}

static __device__ __forceinline__ float add_exp(float a, float b) {
  const float high = fmaxf(a, b), low = fminf(a, b);
  return low == -infinity() ? high : high + log1pf(expf(low - high));
}

template <typename T>
static __global__ void __launch_bounds__(kRowThreads, 1) choose_candidates(const TreeCandidatesParams p) {
  __shared__ BestScratch s;
  const Spans spans = spans_of(p.vocab);
  const int64_t index = blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits) + index * p.vocab;
  const uint4* measured = static_cast<const uint4*>(p.workspace) + index * spans.count;
  int64_t* ids = p.ids + index * p.count;
  float* scores = p.scores + index * p.count;
  grid_begin();
  const Row row = row_of(p, index);
  const bool is_noisy = row.noise_weight > 0.0f;

  // 1. The largest logit and both sums
  float largest[kOwnSpans], noisy_top[kOwnSpans], plain = 0.0f, noisy = 0.0f, top = -infinity();
  uint4 words[kOwnSpans];
  bool nan = false;
#pragma unroll
  for (int i = 0; i < kOwnSpans; ++i) {
    const int64_t span = threadIdx.x + i * kRowThreads;
    words[i] = make_uint4(__float_as_uint(-infinity()), 0, __float_as_uint(-infinity()), 0);
    if (span < spans.count) words[i] = __ldcg(measured + span);
    largest[i] = __uint_as_float(words[i].x), noisy_top[i] = __uint_as_float(words[i].z);
    nan |= largest[i] != largest[i];
    top = fmaxf(top, largest[i]);
  }
  nan = __syncthreads_or(nan);
  top = block_max(top, s.sums);
  if (nan || top == -infinity()) {
    for (int64_t k = threadIdx.x; k < p.count; k += blockDim.x) ids[k] = -1, scores[k] = -infinity();
    return;
  }
#pragma unroll
  for (int i = 0; i < kOwnSpans; ++i) {
    const float d = below_top(largest[i], top);
    plain += __uint_as_float(words[i].y) * expf(d);
    if (!is_noisy) continue;
    noisy += __uint_as_float(words[i].w) * expf(d / row.temperature);
    noisy_top[i] += d / row.temperature;
  }
  __syncthreads();
  const float plain_shift = logf(1.0f - row.noise_weight) - logf(block_sum(plain, s.sums));
  __syncthreads();
  const float noisy_sum = block_sum(noisy, s.sums);
  const float noisy_shift = is_noisy ? logf(row.noise_weight) - logf(noisy_sum) : -infinity();

  // 2. Between which bounds the best score of each span lies, and what `count` spans reach
  uint32_t least[kOwnSpans];
#pragma unroll
  for (int i = 0; i < kOwnSpans; ++i) {
    const int64_t span = threadIdx.x + i * kRowThreads;
    const float a = below_top(largest[i], top) + plain_shift, b = noisy_top[i] + noisy_shift;
    // Stage 1 rounded other differences.
    const float margin = b > -infinity() ? 1e-3f + 1e-6f * fabsf(noisy_top[i]) : 0.0f;
    least[i] = span < spans.count ? key_of(fminf(fmaxf(a, b - margin), 0.0f)) : 0;
    if (span < spans.count) s.most[span] = is_noisy ? fmaxf(a, b + margin) + kAboveLn2 : a;
  }
  const float floor = floor_of(least, p.count, spans.count);

  // 3. The best, and their order
  const int found = best_of_spans(s, spans, p.vocab, p.count, floor, [&](int64_t id, float) {
    const float d = below_top(to_float(logits[id]), top), a = d + plain_shift;
    float b = -infinity();
    if (is_noisy) {
      if (!(d > -infinity())) return -infinity();
      RowNoise words(row.position, row.seed);
      b = d / row.temperature + noise_of(words.word(uint32_t(id))) + noisy_shift;
    }
    return fminf(add_exp(a, b), 0.0f);
  });
  for (int64_t k = threadIdx.x; k < p.count; k += blockDim.x) {
    ids[k] = k < found ? int64_t(s.best[k].id) : -1;
    scores[k] = k < found ? s.best[k].score : -infinity();
  }
}

// [rows, spans] of 16 bytes: stage 1's findings.
int64_t tree_candidates_workspace(int64_t rows, int64_t vocab) {
  return rows * spans_of(vocab).count * int64_t(sizeof(uint4));
}

cudaError_t launch_tree_candidates(const TreeCandidatesParams& p, cudaStream_t stream) {
  const int64_t rows = p.batch * p.depths;
  return run_on_device(p, rows, [&](auto type) {
    using T = decltype(type);
    return launch_stages<T>(p, rows, stream, measure_spans<T, kPer16<T>>, measure_spans<T, 1>, choose_candidates<T>);
  });
}

}  // namespace dflash
