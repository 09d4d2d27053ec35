// The best tokens of each row by score, where a score is that of select_tokens (same bits) without filters.
//
// Stage 1, one warp per span of a row, finds the span's best score. Stage 2, one block per row: `count` spans
// reach the count-th largest of these, so only spans that do are looked at again. With noise, a token needs
// the logarithm only if the bound of its Philox word reaches the score that it has to beat.
#include "cuda/best.cuh"
#include "cuda/launch.h"

namespace dflash {

struct Row {
  float temperature, sharpness;
  uint64_t position, seed;
  bool greedy;
  int64_t line;  // of the logits
};

static __device__ Row row_of(const TopCandidatesParams& p, int64_t index) {
  const int64_t b = index / (p.levels * p.rows), line = b * p.rows + index % p.rows;
  const float temperature = p.temperature[b], sharpness = p.sharpness[index / p.rows];
  return {temperature > kLargestFloat ? kLargestFloat : temperature,
          sharpness >= 0.0f ? sharpness : 0.0f,
          uint64_t(p.positions[line]),
          uint64_t(p.seeds[b]),
          !(temperature > 0.0f) || sharpness == infinity(),
          line};
}

// The score of a token, or -inf if it is surely below `floor`. `group` and `words` are those of the last
// token.
static __device__ __forceinline__ float score_from(const Row& row, float logit, uint32_t id, float floor,
                                                   uint32_t& group, Words4& words) {
  if (row.greedy) return logit;
  const float score = scaled(row.sharpness, logit / row.temperature);
  if (DFLASH_ADD32(score, kLargestNoise) < floor) return -infinity();
  if (id >> 2 != group) group = id >> 2, words = noise_words(group, row.position, 0, row.seed);
  const uint32_t word = word_of(words, id);
  if (DFLASH_ADD32(score, noise_bound(word)) < floor) return -infinity();
  return DFLASH_ADD32(score, gumbel(word));
}

// Writes the best score of each span to the workspace; NaN if the span holds one.
template <typename T, int kWidth>
static __global__ void __launch_bounds__(32 * kSpanWarps, 1) score_spans(const TopCandidatesParams p) {
  const Spans spans = spans_of(p.vocab);
  const int lane = threadIdx.x % 32;
  const int64_t place = int64_t(blockIdx.x) * kSpanWarps + threadIdx.x / 32, index = place / spans.count;
  grid_launch_dependents();
  grid_dependency_wait();
  if (index >= p.batch * p.levels * p.rows) return;
  const int64_t begin = place % spans.count * spans.tokens, end = min(p.vocab, begin + spans.tokens);
  const Row row = row_of(p, index);
  const T* logits = static_cast<const T*>(p.logits) + row.line * p.vocab;
  float best = -infinity();
  bool nan = false;
  uint32_t group = 0xffffffffu;
  Words4 words{};
  for (int64_t id = begin + lane * kWidth; id < end; id += 32 * kWidth) {
    float z[kWidth];
    load<T, kWidth>(logits + id, z);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) {
      nan |= z[e] != z[e];
      best = fmaxf(best, score_from(row, z[e], uint32_t(id + e), best, group, words));
    }
  }
  best = warp_max(best);
  nan = __ballot_sync(kAllLanes, nan) != 0;
  if (lane == 0) static_cast<float*>(p.workspace)[place] = nan ? __uint_as_float(0x7fffffffu) : best;
}

template <typename T>
static __global__ void __launch_bounds__(kRowThreads, 1) choose_tokens(const TopCandidatesParams p) {
  __shared__ BestScratch s;
  const Spans spans = spans_of(p.vocab);
  const int64_t index = blockIdx.x;
  const float* scores = static_cast<const float*>(p.workspace) + index * spans.count;
  int64_t* ids = p.ids + index * p.count;
  float* out = p.candidate_logits + index * p.count;
  grid_launch_dependents();
  grid_dependency_wait();
  const Row row = row_of(p, index);
  const T* logits = static_cast<const T*>(p.logits) + row.line * p.vocab;

  // 1. The best score of each span, and what `count` spans reach
  uint32_t least[kOwnSpans];
  bool nan = false;
#pragma unroll
  for (int i = 0; i < kOwnSpans; ++i) {
    const int64_t span = threadIdx.x + i * kRowThreads;
    const float best = span < spans.count ? __ldcg(scores + span) : -infinity();
    nan |= best != best;
    least[i] = span < spans.count ? to_key(best) : 0;
    if (span < spans.count) s.most[span] = best;
  }
  nan = __syncthreads_or(nan);
  int found = 0;
  if (!nan) {
    const float floor = floor_of(least, p.count, spans.count);

    // 2. The best, and their order
    found = best_of_spans(s, spans, p.vocab, p.count, floor, [&](int64_t id, float at_least) {
      uint32_t group = 0xffffffffu;
      Words4 words{};
      return score_from(row, to_float(logits[id]), uint32_t(id), at_least, group, words);
    });
  }
  for (int64_t k = threadIdx.x; k < p.count; k += blockDim.x) {
    ids[k] = k < found ? int64_t(s.best[k].id) : -1;
    out[k] = k < found ? to_float(logits[s.best[k].id]) : -infinity();
  }
}

// [rows, spans] of float: stage 1's findings.
int64_t top_candidates_workspace(int64_t rows, int64_t vocab) {
  return rows * spans_of(vocab).count * int64_t(sizeof(float));
}

cudaError_t launch_top_candidates(const TopCandidatesParams& p, cudaStream_t stream) {
  const int64_t rows = p.batch * p.levels * p.rows;
  return run_on_device(p, rows, [&](auto type) {
    using T = decltype(type);
    constexpr int kWidth = kPer16<T>;
    const bool wide = aligned16(p.logits, p.vocab * sizeof(T));
    const dim3 grid(unsigned(ceil_div(rows * spans_of(p.vocab).count, kSpanWarps)));
    const cudaError_t error = launch_overlapping(wide ? score_spans<T, kWidth> : score_spans<T, 1>, grid,
                                                 dim3(32 * kSpanWarps), 0, stream, p);
    if (error != cudaSuccess) return error;
    return launch_flat(choose_tokens<T>, rows, kRowThreads, stream, p);
  });
}

}  // namespace dflash
