// The best tokens of each row by score, where a score is that of select_tokens (same bits) without filters.
//
// Stage 1, one warp per span of a row, finds the span's best score. Stage 2, one block per row: `count` spans reach the
// count-th largest of these, so only spans that do are looked at again.
#include "cuda/vocab/best.cuh"

namespace dflash {

struct Row {
  Draw draw;
  uint64_t position, seed;
};

static __device__ Row row_of(const TopCandidatesParams& p, int64_t index) {
  const int64_t b = index / p.rows;
  return {draw_of(p.temperature[b], p.sharpness[b]), uint64_t(p.positions[index]), uint64_t(p.seeds[b])};
}

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
  const Row row = row_of(p, span.row);
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
  const Row row = row_of(p, index);
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

// [rows, spans] of float: stage 1's findings.
int64_t top_candidates_workspace(int64_t rows, int64_t vocab) {
  return rows * spans_of(vocab).count * int64_t(sizeof(float));
}

cudaError_t launch_top_candidates(const TopCandidatesParams& p, cudaStream_t stream) {
  const int64_t rows = p.batch * p.rows;
  return run_on_device(p, rows, [&](auto type) {
    using T = decltype(type);
    return launch_stages<T>(p, rows, stream, score_spans<T, kPer16<T>>, score_spans<T, 1>, choose_tokens<T>);
  });
}

}  // namespace dflash
