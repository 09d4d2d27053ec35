// The best tokens of each row. A row is cut into spans. Stage 1, one warp per span, bounds the span's best score; stage
// 2, one block per row, looks again only at the spans and tokens that may be among the best: `count` spans reach the
// count-th largest of what the spans surely reach.
#include "cuda/vocab/logits.cuh"

namespace dflash {

constexpr int64_t kChunk = 256;                          // a span is a number of these
constexpr int64_t kMaxSpans = 1024;                      // per row
constexpr int kSpanWarps = 8, kRowThreads = 512;         // threads of a block of stage 1 (warps) and 2
constexpr int kOwnSpans = int(kMaxSpans / kRowThreads);  // per thread of stage 2
constexpr int kRoom = 2048,
              kRound = 2 * kRowThreads;  // candidates kept; tokens looked at between two barriers

struct Row {
  Draw draw;
  uint64_t position, seed;
};

// Row `index`, which is of sequence b.
template <typename Params>
static __device__ Row row_of(const Params& p, int64_t b, int64_t index, float sharpness) {
  return {draw_of(p.temperature[b], sharpness), uint64_t(p.positions[index]), uint64_t(p.seeds[b])};
}

struct Spans {
  int64_t tokens, count;  // tokens per span, spans per row
};

static __host__ __device__ Spans spans_of(int64_t vocab) {
  const int64_t tokens = ceil_div(ceil_div(vocab, kMaxSpans), kChunk) * kChunk;
  return {tokens, ceil_div(vocab, tokens)};
}

// What a warp of stage 1 looks at: one span of row `row`.
struct Span {
  int64_t place, row, begin, end;

  __device__ __forceinline__ explicit Span(int64_t vocab) {
    const Spans spans = spans_of(vocab);
    place = int64_t(blockIdx.x) * kSpanWarps + threadIdx.x / 32, row = place / spans.count;
    begin = place % spans.count * spans.tokens, end = min(vocab, begin + spans.tokens);
  }

  // f(id, logit) for the lane's tokens.
  template <int kWidth, typename T, typename F>
  __device__ __forceinline__ void for_tokens(const T* logits, F&& f) const {
    for (int64_t id = begin + threadIdx.x % 32 * kWidth; id < end; id += 32 * kWidth) {
      float z[kWidth];
      load<T, kWidth>(logits + id, z);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) f(uint32_t(id + e), z[e]);
    }
  }
};

struct Candidate {
  float score;
  uint32_t id;
};

// The shared memory of stage 2.
struct BestScratch {
  float sums[32];
  float most[kMaxSpans];  // no score of the span is above
  int list[kMaxSpans];    // spans to look at, ascending
  int listed, size;
  Candidate values[kRoom];
  Candidate best[kMaxTreeRows];
};

// Orders s.values and keeps the best in s.best, and in s.values if there are more. Called by the block after a barrier;
// ends with one. Returns how many are left.
static __device__ int cut(BestScratch& s, int size, int64_t count) {
  const auto better = [](Candidate a, Candidate b) { return a.score > b.score || (a.score == b.score && a.id < b.id); };
  for (int i = threadIdx.x; i < size; i += blockDim.x) {
    const Candidate own = s.values[i];
    int rank = 0;
    for (int j = 0; j < size; ++j) rank += better(s.values[j], own);
    if (rank < count) s.best[rank] = own;
  }
  __syncthreads();
  const int left = int(min(int64_t(size), count));
  for (int i = threadIdx.x; i < left; i += blockDim.x) s.values[i] = s.best[i];
  if (threadIdx.x == 0) s.size = left;
  __syncthreads();
  return left;
}

// A finite score that `count` spans reach, at most the count-th largest of `least`: keys of scores that the spans
// surely reach, 0 where there is no span.
static __device__ float floor_of(const uint32_t (&least)[kOwnSpans], int64_t count, int64_t spans) {
  uint32_t reached = 0;
  for (uint32_t bit = 0x80000000u; bit != 0 && count <= spans; bit >>= 1) {
    int more = 0;
#pragma unroll
    for (int i = 0; i < kOwnSpans; ++i) more += __syncthreads_count(least[i] >= (reached | bit));
    if (more >= count) reached |= bit;
  }
  return reached ? fmaxf(from_key(reached), -kLargestFloat) : -kLargestFloat;
}

// The best `count` tokens by score(id), in s.best in their order; returns how many there are with a score of at least
// `floor`. Only spans whose s.most reaches that are looked at.
template <typename Score>
static __device__ int best_of_spans(BestScratch& s, Spans spans, int64_t vocab, int64_t count, float floor,
                                    Score&& score) {
  // 1. The spans
  if (threadIdx.x == 0) s.listed = 0, s.size = 0;
  __syncthreads();
  if (threadIdx.x < 32) {
    int listed = 0;
    for (int64_t first = 0; first < spans.count; first += 32) {
      const int64_t span = first + threadIdx.x;
      const bool hit = span < spans.count && s.most[span] >= floor;
      const unsigned hits = __ballot_sync(kAllLanes, hit);
      if (hit) s.list[listed + __popc(hits & ((1u << threadIdx.x) - 1))] = int(span);
      listed += __popc(hits);
    }
    if (threadIdx.x == 0) s.listed = listed;
  }
  __syncthreads();

  // 2. The tokens that may be among the best, in the order of their ids, some at a time
  const int64_t chunks = spans.tokens / kChunk, total = s.listed * chunks * kChunk;
  for (int64_t done = 0; done < total; done += kRound) {
    int size = s.size;
    __syncthreads();
    if (size > kRoom - kRound) {
      size = cut(s, size, count);
      if (size == count) floor = from_key(key_of(s.best[size - 1].score) + 1);  // equal ones that come later lose
    }
    for (int64_t i = done + threadIdx.x; i < min(total, done + kRound); i += kRowThreads) {
      const int64_t id = s.list[i / spans.tokens] * spans.tokens + i % spans.tokens;
      if (id >= vocab) continue;
      const float own = score(id, floor);
      if (own >= floor) s.values[atomicAdd(&s.size, 1)] = {own, uint32_t(id)};
    }
    __syncthreads();
  }

  // 3. Their order
  return cut(s, s.size, count);
}

// [rows, spans] of up to 16 bytes: stage 1's findings.
int64_t candidates_workspace(int64_t rows, int64_t vocab) {
  return rows * spans_of(vocab).count * int64_t(sizeof(uint4));
}

template <typename Params>
static cudaError_t launch_stages(const Params& p, int64_t rows, cudaStream_t stream, void (*look)(Params),
                                 void (*choose)(Params)) {
  const int64_t blocks = ceil_div(rows * spans_of(p.vocab).count, kSpanWarps);
  const cudaError_t error = launch_flat(look, blocks, 32 * kSpanWarps, stream, p);
  return error != cudaSuccess ? error : launch_flat(choose, rows, kRowThreads, stream, p);
}

// ---- top_candidates: scores are those of select_tokens (same bits) without filters

// The score of a token, or NaN if it is surely below `floor`.
static __device__ __forceinline__ float score_of(const Row& row, RowNoise& noise, float logit, uint32_t id,
                                                 float floor) {
  if (row.draw.greedy) return logit;
  return noisy_score(row.draw, noise, logit / row.draw.temperature, id, floor, [] { return true; });
}

// Writes the best score of each span to the workspace; NaN if the span holds one.
template <typename T, int kWidth>
static __global__ void __launch_bounds__(32 * kSpanWarps, 1) score_spans(const TopCandidatesParams p) {
  const Span span(p.vocab);
  grid_begin();
  if (span.row >= p.batch * p.rows) return;
  const Row row = row_of(p, span.row / p.rows, span.row, p.sharpness[span.row / p.rows]);
  RowNoise noise(row.position, row.seed);
  float best = -infinity();
  bool nan = false;
  span.for_tokens<kWidth>(static_cast<const T*>(p.logits) + span.row * p.vocab, [&](uint32_t id, float z) {
    nan |= z != z;
    best = fmaxf(best, score_of(row, noise, z, id, best));
  });
  best = warp_max(best);
  nan = __ballot_sync(kAllLanes, nan) != 0;
  if (threadIdx.x % 32 == 0) static_cast<float*>(p.workspace)[span.place] = nan ? not_a_number() : best;
}

template <typename T>
static __global__ void __launch_bounds__(kRowThreads, 1) choose_tokens(const TopCandidatesParams p) {
  __shared__ BestScratch s;
  const Spans spans = spans_of(p.vocab);
  const int64_t index = blockIdx.x;
  const float* scores = static_cast<const float*>(p.workspace) + index * spans.count;
  int64_t* ids = p.ids + index * p.count;
  float* out = p.candidate_logits + index * p.count;
  grid_begin();
  const Row row = row_of(p, index / p.rows, index, p.sharpness[index / p.rows]);
  const T* logits = static_cast<const T*>(p.logits) + index * p.vocab;

  // 1. The best score of each span, and what `count` spans reach
  uint32_t least[kOwnSpans];
  bool nan = false;
#pragma unroll
  for (int i = 0; i < kOwnSpans; ++i) {
    const int64_t span = threadIdx.x + i * kRowThreads;
    const float best = span < spans.count ? __ldcg(scores + span) : -infinity();
    nan |= best != best;
    least[i] = span < spans.count ? key_of(best) : 0;
    if (span < spans.count) s.most[span] = best;
  }
  nan = __syncthreads_or(nan);
  int found = 0;
  if (!nan) {
    const float floor = floor_of(least, p.count, spans.count);

    // 2. The best, and their order
    found = best_of_spans(s, spans, p.vocab, p.count, floor, [&](int64_t id, float at_least) {
      RowNoise noise(row.position, row.seed);
      return score_of(row, noise, to_float(logits[id]), uint32_t(id), at_least);
    });
  }
  for (int64_t k = threadIdx.x; k < p.count; k += blockDim.x) {
    ids[k] = k < found ? int64_t(s.best[k].id) : -1;
    out[k] = k < found ? to_float(logits[s.best[k].id]) : -infinity();
  }
}

cudaError_t launch_top_candidates(const TopCandidatesParams& p, cudaStream_t stream) {
  const int64_t rows = p.batch * p.rows;
  return run_packed(p, rows, {p.logits}, {p.vocab}, [&](auto type, auto width) {
    using T = decltype(type);
    return launch_stages(p, rows, stream, score_spans<T, width>, choose_tokens<T>);
  });
}

// ---- tree_candidates: scores by the formulas of the CPU kernel; exponentials and logarithms round differently. Stage
// 1 finds a span's largest logit and d / T + noise, and its sums of both exponentials, with d below the span's own
// largest logit; only stage 2 knows between which bounds the span's best score lies.

constexpr float kAboveLn2 = 0.6932f;

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
  const Row row = row_of(p, span.row / p.depths, span.row, 1.0f);
  const float noise_weight = row.draw.temperature > 0.0f ? p.noise_weight : 0.0f;
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
      if (noise_weight == 0.0f) return;
      const float a = d / row.draw.temperature + noise_of(words.word(id));
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
  const Row row = row_of(p, index / p.depths, index, 1.0f);
  const float noise_weight = row.draw.temperature > 0.0f ? p.noise_weight : 0.0f;
  const bool is_noisy = noise_weight > 0.0f;

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
    noisy += __uint_as_float(words[i].w) * expf(d / row.draw.temperature);
    noisy_top[i] += d / row.draw.temperature;
  }
  __syncthreads();
  const float plain_shift = logf(1.0f - noise_weight) - logf(block_sum(plain, s.sums));
  __syncthreads();
  const float noisy_sum = block_sum(noisy, s.sums);
  const float noisy_shift = is_noisy ? logf(noise_weight) - logf(noisy_sum) : -infinity();

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
      b = d / row.draw.temperature + noise_of(words.word(uint32_t(id))) + noisy_shift;
    }
    return fminf(add_exp(a, b), 0.0f);
  });
  for (int64_t k = threadIdx.x; k < p.count; k += blockDim.x) {
    ids[k] = k < found ? int64_t(s.best[k].id) : -1;
    scores[k] = k < found ? s.best[k].score : -infinity();
  }
}

cudaError_t launch_tree_candidates(const TreeCandidatesParams& p, cudaStream_t stream) {
  const int64_t rows = p.batch * p.depths;
  return run_packed(p, rows, {p.logits}, {p.vocab}, [&](auto type, auto width) {
    using T = decltype(type);
    return launch_stages(p, rows, stream, measure_spans<T, width>, choose_candidates<T>);
  });
}

}  // namespace dflash
