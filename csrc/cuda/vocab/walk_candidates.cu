// A path through the candidates of each slot, or all links between them (params.h has the formulas). For a path, one
// block per sequence; a warp per candidate multiplies three rows of the rank, then the first warp chooses. Only the
// predecessor's row is known late: every row that may be needed is fetched into L2 first, and the noise is drawn ahead.
// Bits are those of select_tokens. For links, one block per slot; a warp per token before makes its whole list.
#include "cuda/vocab/logits.cuh"

namespace dflash {

constexpr int kMaxWarps = 16;
constexpr int kNoises = 4096;  // drawn ahead
constexpr int kOwn = int(kMaxCandidates / 32);
static_assert(kNoises >= kMaxCandidates, "the noise of a slot is drawn at once");

struct Choice {
  Draw draw;
  Filters filters;
};

struct Scratch {
  float score[kMaxCandidates], noise[kNoises];
  int64_t weight[kMaxCandidates];
  int64_t chosen;
};

// The best of a slot's candidates, -1 if there is none; to all lanes of the warp that calls it. s.score holds S, -inf
// where there is no candidate. Writes S / temperature, -inf where filtered, to `out`.
static __device__ int64_t choose(Scratch& s, const Choice& c, const int64_t* ids, int count, const float* noise,
                                 float* out) {
  // 1. S / temperature, and what is a candidate
  const int lane = threadIdx.x % 32;
  float score[kOwn], top = -infinity();
  bool live[kOwn], any = false, nan = false;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int k = lane + 32 * i;
    score[i] = k < count ? s.score[k] : -infinity();
    nan |= score[i] != score[i];
    any |= live[i] = score[i] > -infinity();
    if (live[i] && !c.draw.greedy) score[i] = score[i] / c.draw.temperature;
    if (live[i]) top = fmaxf(top, score[i]);
  }
  nan = __ballot_sync(kAllLanes, nan) != 0;
  any = __ballot_sync(kAllLanes, any) != 0;
  if (nan || !any) return -1;

  // 2. What the filters keep
  if (!c.draw.greedy && any_filter(c.filters)) {
    top = warp_max(top);
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (lane + 32 * i < count) s.score[lane + 32 * i] = score[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwn; ++i)
      if (lane + 32 * i < count)
        s.weight[lane + 32 * i] = weight_in_top_k(s.score, count, lane + 32 * i, top, c.filters);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      live[i] = live[i] && is_kept(s.score, s.weight, count, lane + 32 * i, top, c.filters);
      score[i] = live[i] ? score[i] : -infinity();
    }
  }

  // 3. The best, with noise
  float best = -infinity();
  int64_t best_id = INT64_MAX;
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int k = lane + 32 * i;
    if (k < count) out[k] = score[i];
    if (!live[i]) continue;
    const float value = c.draw.greedy ? score[i] : DFLASH_ADD32(sharpened(c.draw, score[i]), noise[k]);
    const int64_t id = ids[k];
    if (value > best || (value == best && id < best_id)) best = value, best_id = id;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const float value = __shfl_xor_sync(kAllLanes, best, step);
    const int64_t id = __shfl_xor_sync(kAllLanes, best_id, step);
    if (value > best || (value == best && id < best_id)) best = value, best_id = id;
  }
  return best_id;
}

// The sum over r of predecessor[r] * hidden[r] * successor[r], [rank] each; to all lanes of the warp that calls it.
template <typename T, int kWidth>
static __device__ float pair_score(const T* predecessor, const T* hidden, const T* successor, int64_t rank) {
  float sum = 0.0f;
  for (int64_t i = threadIdx.x % 32 * kWidth; i < rank; i += 32 * kWidth) {
    float a[kWidth], h[kWidth], c[kWidth];
    load<T, kWidth>(predecessor + i, a);
    load<T, kWidth>(hidden + i, h);
    load<T, kWidth>(successor + i, c);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) sum = fmaf(a[e] * h[e], c[e], sum);
  }
  return warp_sum(sum);
}

template <typename T, int kWidth>
static __global__ void __launch_bounds__(32 * kMaxWarps, 1) walk(const WalkCandidatesParams p) {
  __shared__ Scratch s;
  const int64_t b = blockIdx.x, first = b * p.slots * p.count;
  const int64_t* ids = p.ids + first;
  int64_t* path = p.path + b * p.slots;
  float* scores = p.scores + first;
  const T *predecessors = static_cast<const T*>(p.predecessors), *successors = static_cast<const T*>(p.successors);
  const auto known = [&](int64_t id) { return id >= 0 && id < p.codes; };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t total = p.slots * p.count, ahead = kNoises / p.count;  // slots whose noise is drawn at once
  grid_begin();

  // 1. Fetch the rows of the codebooks
  constexpr int64_t kLine = 128 / int64_t(sizeof(T));
  const int64_t lines = ceil_div(p.rank, kLine);
  for (int64_t i = threadIdx.x; i < total * lines; i += blockDim.x) {
    const int64_t id = ids[i / lines];
    if (!known(id)) continue;
    prefetch_l2(successors + id * p.rank + i % lines * kLine);
    prefetch_l2(predecessors + id * p.rank + i % lines * kLine);
  }

  const Choice choice{draw_of(p.temperature[b], p.sharpness[b]), {p.top_k[b], p.top_p[b], p.min_p[b]}};
  int64_t previous = p.anchor[b], slot = 0;
  for (; slot < p.slots; ++slot) {
    // 2. Draw noise
    if (slot % ahead == 0 && !choice.draw.greedy) {
      for (int64_t i = threadIdx.x; i < min(ahead * p.count, total - slot * p.count); i += blockDim.x) {
        RowNoise noise(p.positions[b * p.slots + slot + i / p.count], p.seeds[b], uint32_t(p.stream));
        s.noise[i] = gumbel(noise.word(uint32_t(ids[slot * p.count + i])));
      }
    }

    // 3. Score the candidates
    const T* hidden = static_cast<const T*>(p.hidden) + (b * p.slots + slot) * p.rank;
    for (int64_t k = warp; k < p.count; k += warps) {
      const int64_t id = ids[slot * p.count + k];
      float sum = 0.0f;
      if (known(id) && known(previous))
        sum = pair_score<T, kWidth>(predecessors + previous * p.rank, hidden, successors + id * p.rank, p.rank);
      if (lane == 0) s.score[k] = known(id) ? p.logits[first + slot * p.count + k] + sum : -infinity();
    }
    __syncthreads();

    // 4. Choose
    if (warp == 0) {
      const int64_t chosen = choose(s, choice, ids + slot * p.count, int(p.count), s.noise + slot % ahead * p.count,
                                    scores + slot * p.count);
      if (lane == 0) s.chosen = chosen;
    }
    __syncthreads();
    previous = s.chosen;
    if (previous < 0) break;
    if (threadIdx.x == 0) path[slot] = previous;
  }

  // 5. Nothing from the first slot on without a choice
  for (int64_t i = slot + threadIdx.x; i < p.slots; i += blockDim.x) path[i] = -1;
  for (int64_t i = slot * p.count + threadIdx.x; i < total; i += blockDim.x) scores[i] = -infinity();
}

cudaError_t launch_walk_candidates(const WalkCandidatesParams& p, cudaStream_t stream) {
  const auto launch = [&](auto type, auto width) {
    return launch_flat(walk<decltype(type), width>, p.batch, 32 * min(p.count, int64_t(kMaxWarps)), stream, p);
  };
  return run_packed(p, p.batch * p.slots, {p.hidden, p.predecessors, p.successors}, {p.rank}, launch);
}

template <typename T, int kWidth>
static __global__ void __launch_bounds__(32 * kMaxWarps, 1) link(const LinkCandidatesParams p) {
  __shared__ float own[kMaxCandidates], all_scores[kMaxWarps][kMaxCandidates];
  const int64_t row = blockIdx.x, slot = row % p.slots;
  const int64_t* ids = p.ids + row * p.count;
  const T *predecessors = static_cast<const T*>(p.predecessors), *successors = static_cast<const T*>(p.successors);
  const T* hidden = static_cast<const T*>(p.hidden) + row * p.rank;
  const auto known = [&](int64_t id) { return id >= 0 && id < p.codes; };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32, count = int(p.count);
  float* score = all_scores[warp];
  grid_begin();

  // 1. Which are candidates, and the probability of other tokens
  for (int k = threadIdx.x; k < count; k += blockDim.x) {
    const float z = p.scores[row * count + k];
    own[k] = known(ids[k]) && z > -infinity() ? z : -infinity();
  }
  __syncthreads();
  float rest = 0.0f;
  for (int k = lane; k < count; k += 32) rest += expf(own[k]);
  rest = fmaxf(1.0f - warp_sum(rest), 0.0f);

  for (int before = warp; before < count; before += warps) {
    // 2. The scores after one token
    const int64_t previous = slot > 0 ? ids[before - count] : p.anchor[row / p.slots];
    const bool paired = known(previous);
    for (int k = 0; k < count; ++k) {
      float sum = own[k];
      if (paired && sum > -infinity())
        sum += pair_score<T, kWidth>(predecessors + previous * p.rank, hidden, successors + ids[k] * p.rank, p.rank);
      if (lane == 0) score[k] = sum;
    }
    __syncwarp();
    float top = rest > 0.0f ? 0.0f : -infinity(), sum = 0.0f;
    bool valid = paired || slot == 0;
    for (int k = lane; k < count; k += 32) valid &= score[k] < infinity(), top = fmaxf(top, score[k]);
    top = warp_max(top);
    valid = __ballot_sync(kAllLanes, !valid) == 0 && top > -infinity();

    // 3. Their order, with the sum of probabilities at one
    for (int k = lane; k < count && valid; k += 32) sum += expf(score[k] - top);
    const float shift = top + logf((rest > 0.0f ? rest * expf(-top) : 0.0f) + warp_sum(sum));
    __syncwarp();
    for (int k = lane; k < count; k += 32) score[k] = valid ? fminf(score[k] - shift, 0.0f) : -infinity();
    __syncwarp();
    for (int k = lane; k < count; k += 32) {
      int place = 0;
      for (int other = 0; other < count; ++other) {
        const bool tied = score[other] == score[k] && (ids[other] < ids[k] || (ids[other] == ids[k] && other < k));
        place += score[other] > score[k] || tied;
      }
      const int64_t at = (row * count + before) * count + place;
      p.links[at] = score[k], p.order[at] = uint8_t(k);
    }
    __syncwarp();
  }
}

cudaError_t launch_link_candidates(const LinkCandidatesParams& p, cudaStream_t stream) {
  const auto launch = [&](auto type, auto width) {
    return launch_flat(link<decltype(type), width>, p.batch * p.slots, 32 * min(p.count, int64_t(kMaxWarps)), stream,
                       p);
  };
  return run_packed(p, p.batch * p.slots, {p.hidden, p.predecessors, p.successors}, {p.rank}, launch);
}

}  // namespace dflash
