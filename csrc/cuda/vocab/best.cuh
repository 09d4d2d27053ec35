// What the kernels share that find the best tokens of each row. A row is cut into spans. Stage 1, one warp per span,
// bounds the span's best score; stage 2, one block per row, looks again only at the spans and tokens that may be among
// the best.
#pragma once
#include "cuda/vocab/logits.cuh"

namespace dflash {

constexpr int64_t kChunk = 256;                          // a span is a number of these
constexpr int64_t kMaxSpans = 1024;                      // per row
constexpr int kSpanWarps = 8, kRowThreads = 512;         // threads of a block of stage 1 (warps) and 2
constexpr int kOwnSpans = int(kMaxSpans / kRowThreads);  // per thread of stage 2
constexpr int kRoom = 2048,
              kRound = 2 * kRowThreads;  // candidates kept; tokens looked at between two barriers

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

// Both stages; the first is compiled for accesses of 16 bytes and for narrow ones.
template <typename T, typename Params>
static cudaError_t launch_stages(const Params& p, int64_t rows, cudaStream_t stream, void (*wide)(Params),
                                 void (*narrow)(Params), void (*choose)(Params)) {
  const int64_t blocks = ceil_div(rows * spans_of(p.vocab).count, kSpanWarps);
  const cudaError_t error =
      launch_flat(aligned16(p.logits, p.vocab * sizeof(T)) ? wide : narrow, blocks, 32 * kSpanWarps, stream, p);
  return error != cudaSuccess ? error : launch_flat(choose, rows, kRowThreads, stream, p);
}

}  // namespace dflash
