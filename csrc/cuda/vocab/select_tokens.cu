// Gives the same bits as the CPU kernel (noise.h). Three kernels with one block per slice of a row; no block waits for
// another. A row that has its token, or that a stage has nothing to do for, returns at once.
//
// 1. scan_slices finds the largest logit of each span and slice, any NaN and, without filters, the slice's best score.
// 2. find_floors finds the smallest z that top-k and top-p keep: the row's floor. A threshold of either is the smallest
//    z such that everything strictly above weighs less than a limit (in tokens, or fixed-point probability). Every
//    block sums the weights of its tokens in 1024 buckets of z below the largest, and the last one of the row refines
//    the bucket where the sum reaches the limit, by the bits of logits. Integer sums have no order.
//    If top-k is at most the number of spans, the k-th of their largest z bounds the k-th z from below, so few spans
//    are read and few tokens left. They are listed, and the last block chooses among them.
// 3. choose_rows finds the best score at or above the floor.
#include "cuda/vocab/logits.cuh"

namespace dflash {

constexpr int kMaxSpans = 1024, kSliceSpans = 32, kMaxSlices = kMaxSpans / kSliceSpans;
constexpr int kThreads = 256, kBlocks = 3;  // maximum, a small vocabulary uses fewer; blocks that fit on an SM
constexpr int kOwnSpans = kMaxSpans / kThreads;
constexpr unsigned kRoom = 512;  // tokens in the list

using Sum = unsigned long long;

struct Best {
  float value;
  uint32_t id;
};

static __device__ __forceinline__ Best none() { return {-infinity(), 0xffffffffu}; }

static __device__ __forceinline__ Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}

static __device__ __forceinline__ Best warp_best(Best x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2)
    x = better(x, {__shfl_xor_sync(kAllLanes, x.value, step), __shfl_xor_sync(kAllLanes, x.id, step)});
  return x;
}

// The best of the block, returned to every thread. scratch [32] may be reused after the next barrier.
static __device__ Best block_best(Best x, Best* scratch) {
  x = warp_best(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  return warp_best(threadIdx.x % 32 < blockDim.x / 32 ? scratch[threadIdx.x % 32] : none());
}

// What a row's blocks leave for each other.
struct RowSpace {
  Sum counts[kBuckets], weights[kBuckets];  // of tokens, per bucket
  uint4 found[kMaxSlices];   // the largest logit (NaN if there is one) and its id, the best score and its id
  float most[kMaxSpans];     // the largest logit of a span
  Best best[kMaxSlices];     // of stage 3
  Best listed[kRoom];        // z and id
  unsigned num_listed;       // nothing is listed if it is more than kRoom
  unsigned counted, chosen;  // blocks
  float floor;               // NaN if the row has its token
};

struct Row {
  Draw draw;
  Filters filters;
  uint64_t position, seed;
  bool by_count, by_weight, filtered;  // top-k; top-p; any filter
};

static __device__ Row row_of(const SelectTokensParams& p, int64_t index) {
  const int64_t b = index / p.rows;
  const Filters filters{p.top_k[b], p.top_p[b], p.min_p[b]};
  const bool by_count = filters.top_k > 0 && filters.top_k < p.vocab, by_weight = filters.top_p < 1.0f;
  return {draw_of(p.temperature[b], p.sharpness[b]),
          filters,
          p.position(index),
          uint64_t(p.seeds[b]),
          by_count,
          by_weight,
          by_count || by_weight || filters.min_p > 0.0f};
}

// How rows are cut: spans of 256 tokens, or more in the largest vocabularies, and slices of 32 spans.
struct Cut {
  int shift;  // a span has 1 << shift tokens
  int spans, slices;

  __host__ __device__ explicit Cut(int64_t vocab) : shift(8) {
    while (ceil_div(vocab, int64_t(1) << shift) > kMaxSpans) ++shift;
    spans = int(ceil_div(vocab, int64_t(1) << shift)), slices = int(ceil_div(spans, kSliceSpans));
  }
};

// The tokens of a block.
struct Slice : Cut {
  int64_t row, begin, end;
  int index;

  __device__ __forceinline__ explicit Slice(int64_t vocab)
      : Cut(vocab), row(blockIdx.x / slices), index(int(blockIdx.x % slices)) {
    begin = (int64_t(index) * kSliceSpans) << shift, end = min(vocab, begin + (int64_t(kSliceSpans) << shift));
  }
};

static __device__ float score_of(const Row& row, float z, uint32_t id) {
  RowNoise noise(row.position, row.seed);
  return DFLASH_ADD32(sharpened(row.draw, z), gumbel(noise.word(id)));
}

// Calls f(id of the first, logits, whether they are there) for kWidth neighbors at a time, from `begin` to `end`, whose
// span has take(span). Warps stay together, also in f. Each thread has kDeep loads in flight.
template <typename T, int kWidth, int kDeep = kWidth == 1 ? 8 : 4, typename Take, typename F>
static __device__ __forceinline__ void for_tokens(const T* logits, int64_t begin, int64_t end, int shift, Take&& take,
                                                  F&& f) {
  const int64_t step = int64_t(blockDim.x) * kWidth;
  for (int64_t all = begin; all < end; all += kDeep * step) {
    const int64_t first = all + int64_t(threadIdx.x) * kWidth;
    Packed<T, kWidth> packed[kDeep];
    bool taken[kDeep];
#pragma unroll
    for (int k = 0; k < kDeep; ++k) {
      const int64_t id = first + k * step;
      taken[k] = id < end && take(int(id >> shift));
    }
#pragma unroll
    for (int k = 0; k < kDeep; ++k)
      if (taken[k]) packed[k] = load_packed<T, kWidth>(logits + first + k * step);
#pragma unroll
    for (int k = 0; k < kDeep; ++k) {
      float v[kWidth];
#pragma unroll
      for (int e = 0; e < kWidth; ++e) v[e] = -infinity();
      if (taken[k]) unpack_to<T, kWidth>(packed[k], v);
      f(uint32_t(first + k * step), v, taken[k]);
    }
  }
}

// The best score of a slice among tokens with z >= floor and keep(z) in spans with take(span), or `best` if none is
// better.
template <typename T, int kWidth, typename Take, typename Keep>
static __device__ Best best_of_slice(const T* logits, const Slice& slice, const Row& row, float floor, Best best,
                                     Take&& take, Keep&& keep) {
  RowNoise noise(row.position, row.seed);
  for_tokens<T, kWidth, 1>(
      logits, slice.begin, slice.end, slice.shift, [&](int span) { return take(span, best); },
      [&](uint32_t first, const float (&v)[kWidth], bool there) {
        if (!there) return;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float z = v[e] / row.draw.temperature;
          if (!(z >= floor)) continue;
          const uint32_t id = first + e;
          best = better(best, {noisy_score(row.draw, noise, z, id, best.value, [&] { return keep(z); }), id});
        }
      });
  return best;
}

// ---- stage 1

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kThreads, kBlocks) scan_slices(const SelectTokensParams p) {
  __shared__ Best scratch[32];
  __shared__ uint32_t most[kSliceSpans];  // keys
  const Slice slice(p.vocab);
  const T* logits = static_cast<const T*>(p.logits) + slice.row * p.vocab;
  if (threadIdx.x < kSliceSpans) most[threadIdx.x] = 0;
  grid_begin();
  __syncthreads();
  const Row row = row_of(p, slice.row);
  RowSpace& space = static_cast<RowSpace*>(p.workspace)[slice.row];

  // 1. The largest
  Best largest = none();
  bool nan = false;
  for_tokens<T, kWidth>(
      logits, slice.begin, slice.end, slice.shift, [](int) { return true; },
      [&](uint32_t first, const float (&v)[kWidth], bool there) {
        float own = -infinity();
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          nan |= v[e] != v[e], own = fmaxf(own, v[e]);
          if (there) largest = better(largest, {v[e], first + e});
        }
        const uint32_t key = __reduce_max_sync(kAllLanes, key_of(own));  // a warp's tokens are of one span
        if (threadIdx.x % 32 == 0) atomicMax(&most[(first >> slice.shift) % kSliceSpans], key);
      });
  nan = __syncthreads_or(nan);
  largest = block_best(largest, scratch);

  // 2. The best score
  Best best = none();
  if (!nan && !row.draw.greedy && !row.filtered) {
    best = {score_of(row, largest.value / row.draw.temperature, largest.id), largest.id};
    best = best_of_slice<T, kWidth>(
        logits, slice, row, -infinity(), best, [](int, const Best&) { return true; }, [](float) { return true; });
    best = block_best(best, scratch);
  }

  // 3. What the next stages read, and zeros for their sums
  const int span = slice.index * kSliceSpans + int(threadIdx.x);
  if (threadIdx.x < kSliceSpans && span < slice.spans) space.most[span] = from_key(most[threadIdx.x]);
  if (threadIdx.x == 0)
    store16(&space.found[slice.index], make_uint4(__float_as_uint(nan ? not_a_number() : largest.value), largest.id,
                                                  __float_as_uint(best.value), best.id));
  if (!row.filtered) return;
  for (int i = slice.index * blockDim.x + threadIdx.x; i < kBuckets; i += slice.slices * blockDim.x)
    space.counts[i] = space.weights[i] = 0;
  if (slice.index == 0 && threadIdx.x == 0) space.num_listed = space.counted = space.chosen = 0;
}

struct Found {
  bool nan;
  Best largest, best;
};

// What stage 1 has found in a row, returned to every thread.
static __device__ Found found_in(const RowSpace& space, int slices) {
  const int lane = threadIdx.x % 32;
  const uint32_t least = __float_as_uint(-infinity());
  uint4 words = make_uint4(least, 0xffffffffu, least, 0xffffffffu);
  if (lane < slices) words = __ldcg(&space.found[lane]);
  const bool nan = __ballot_sync(kAllLanes, (words.x & 0x7fffffffu) > 0x7f800000u) != 0;
  return {nan, warp_best({__uint_as_float(words.x), words.y}), warp_best({__uint_as_float(words.z), words.w})};
}

// ---- stage 2

// A lower bound of the z that min-p keeps; the test itself uses the exponential.
static __device__ float min_p_floor(const Filters& filters, float top) {
  if (!(filters.min_p > 0.0f)) return -infinity();
  const float bound = top + logf(filters.min_p);
  return fminf(top, bound - 1e-3f - 1e-6f * fabsf(bound));
}

struct Scratch {
  float most[kMaxSpans];  // z
  Sum sums[kBuckets];
  unsigned counts[kBuckets], weights[3][kBuckets];  // weights: 13 bits each, whose sums cannot overflow
  Sum warp_sums[32], above;
  int bin;
  uint32_t edges[2];
  Best best[32];
  unsigned num_listed, at;
  bool is_last;
  float z[kRoom];
  uint32_t ids[kRoom];
  int64_t weight[kRoom];
};

// A z that `count` spans reach, known to 16 bits. A thread has kOwnSpans of them at most.
static __device__ float reached_by(const float* most, int spans, int64_t count) {
  uint32_t keys[kOwnSpans], reached = 0;
#pragma unroll
  for (int i = 0; i < kOwnSpans; ++i) {
    const int span = int(threadIdx.x + i * blockDim.x);
    keys[i] = span < spans ? key_of(most[span]) : 0;
  }
  for (uint32_t bit = 0x80000000u; bit != 0x8000u; bit >>= 1) {
    int more = 0;
#pragma unroll
    for (int i = 0; i < kOwnSpans; ++i) more += __syncthreads_count(keys[i] >= (reached | bit));
    if (more >= count) reached |= bit;
  }
  return from_key(max(reached, key_of(-infinity())));
}

// s.sums is in falling order of z. Returns the last non-empty bin such that `above` plus all bins before it weigh less
// than `limit`; -1 if there is none. Adds the weight of the bins before it to `above`. If `of_total`, the limit becomes
// that share of all bins.
static __device__ int crossing_bin(Scratch& s, double& limit, bool of_total, Sum& above) {
  const int each = int(ceil_div(kBuckets, blockDim.x)), first = threadIdx.x * each;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  Sum own = 0;
  for (int i = first; i < first + each && i < kBuckets; ++i) own += s.sums[i];
  Sum before = own;  // still includes the thread's own
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Sum other = __shfl_up_sync(kAllLanes, before, step);
    if (int(lane) >= step) before += other;
  }
  if (lane == 31) s.warp_sums[warp] = before;
  if (threadIdx.x == 0) s.bin = -1;
  __syncthreads();
  before -= own;
  Sum total = 0;
  for (unsigned w = 0; w < blockDim.x / 32; ++w) {
    if (w == warp) before += total;
    total += s.warp_sums[w];
  }
  if (of_total) limit = DFLASH_MUL64(limit, double(int64_t(total)));
  before += above;
  int found = -1;
  Sum at_found = 0;
  for (int i = first; i < first + each && i < kBuckets; ++i) {
    const Sum weight = s.sums[i];
    if (weight && double(before) < limit) found = i, at_found = before;
    before += weight;
  }
  if (found >= 0) atomicMax(&s.bin, found);
  __syncthreads();
  const int bin = s.bin;
  if (found >= 0 && found == bin) s.above = at_found;
  __syncthreads();
  if (bin >= 0) above = s.above;
  return bin;
}

// Keys of logits without the bits that all of a storage type share.
template <typename T>
constexpr int kSharedBits = std::is_same_v<T, float>    ? 0
                            : std::is_same_v<T, __half> ? 13
                                                        : 16;

template <typename T>
static __device__ __forceinline__ uint32_t short_key(float logit) {
  return key_of(logit) >> kSharedBits<T>;
}
template <typename T>
static __device__ __forceinline__ float from_short_key(uint32_t key) {
  key <<= kSharedBits<T>;
  return from_key(key & 0x80000000u ? key : key | ((1u << kSharedBits<T>)-1));
}

// What the last block of a row reads again.
template <typename T, int kWidth>
struct Whole {
  const T* logits;
  const Slice& slice;
  int64_t vocab;
  float temperature, top;
  uint32_t largest;  // key

  __device__ __forceinline__ int bucket(float z) const { return bucket_of(below_top(z, top)); }

  // Calls f(logit) for the tokens with keys from `low` to `high`, in spans that may reach a bucket. Few do, so f is not
  // copied for each of a thread's tokens.
  template <typename F>
  __device__ __forceinline__ void for_logits(const Scratch& s, int most, uint32_t low, uint32_t high, F&& f) const {
    for_tokens<T, kWidth, 4>(
        logits, 0, vocab, slice.shift, [&](int span) { return bucket(s.most[span]) <= most; },
        [&](uint32_t first, const float (&v)[kWidth], bool there) {
          unsigned hits = 0;
#pragma unroll
          for (int e = 0; e < kWidth; ++e) {
            const uint32_t key = short_key<T>(v[e]);
            hits |= unsigned(there && low <= key && key <= high) << e;
          }
          for (; hits; hits &= hits - 1) f(to_float(logits[first + __ffs(int(hits)) - 1]));
        });
  }

  // The least key whose logit is in a bucket or above; one more than the largest if there is none.
  __device__ uint32_t least_key(int most) const {
    uint32_t low = short_key<T>(-infinity()), high = largest + 1;
    while (low < high) {
      const uint32_t middle = low + (high - low) / 2;
      if (bucket(from_short_key<T>(middle) / temperature) <= most)
        high = middle;
      else
        low = middle + 1;
    }
    return low;
  }
};

// The smallest z such that everything strictly above weighs less than the limit. s.sums has the weights of buckets;
// weight(z) is that of a token.
template <typename T, int kWidth, typename Weight>
static __device__ float threshold(const Whole<T, kWidth>& whole, Scratch& s, double limit, bool of_total,
                                  Weight&& weight) {
  Sum above = 0;
  const int bucket = crossing_bin(s, limit, of_total, above);
  if (bucket < 0) return whole.top;
  if (threadIdx.x < 2) s.edges[threadIdx.x] = whole.least_key(bucket - int(threadIdx.x));
  __syncthreads();
  uint32_t low = s.edges[0], high = s.edges[1] - 1;  // between which keys the threshold lies
  while (low < high) {
    const int shift = max(0, 22 - __clz(int(high - low)));  // at most kBuckets bins
    for (int i = threadIdx.x; i < kBuckets; i += blockDim.x) s.sums[i] = 0;
    __syncthreads();
    Sum own = 0;  // of a run of tokens in one bin
    uint32_t bin = 0;
    const auto add_own = [&] {
      if (own) atomicAdd(&s.sums[bin], own);
    };
    whole.for_logits(s, bucket, low, high, [&](float logit) {
      const uint32_t at = (high - short_key<T>(logit)) >> shift;
      if (at != bin) add_own(), own = 0, bin = at;
      own += weight(logit / whole.temperature);
    });
    add_own();
    high -= uint32_t(crossing_bin(s, limit, false, above)) << shift;
    if ((high - low) >> shift) low = high - ((1u << shift) - 1);
  }
  return from_short_key<T>(low) / whole.temperature;
}

// The fixed-point weight of a token below the largest z.
static __device__ __forceinline__ Sum weight_of(float z, float top) {
  return Sum(fixed_point(shared_exp(below_top(z, top))));
}

// The row's token among those in the list.
static __device__ void choose_listed(const SelectTokensParams& p, const Row& row, RowSpace& space, Scratch& s,
                                     int64_t index, int count, Best largest, float top) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    s.z[i] = __ldcg(&space.listed[i].value);
    s.ids[i] = __ldcg(&space.listed[i].id);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += blockDim.x) s.weight[i] = weight_in_top_k(s.z, count, i, top, row.filters);
  __syncthreads();
  Best best = {score_of(row, top, largest.id), largest.id};
  for (int i = threadIdx.x; i < count; i += blockDim.x)
    if (is_kept(s.z, s.weight, count, i, top, row.filters))
      best = better(best, {score_of(row, s.z[i], s.ids[i]), s.ids[i]});
  best = block_best(best, s.best);
  if (threadIdx.x == 0) p.ids[index] = best.id, space.floor = not_a_number();
}

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kThreads, kBlocks) find_floors(const SelectTokensParams p) {
  __shared__ Scratch s;
  const Slice slice(p.vocab);
  const T* logits = static_cast<const T*>(p.logits) + slice.row * p.vocab;
  grid_begin();

  // 1. Rows that have their token, or need no threshold
  const Row row = row_of(p, slice.row);
  RowSpace& space = static_cast<RowSpace*>(p.workspace)[slice.row];
  const auto [nan, largest, unfiltered] = found_in(space, slice.slices);
  const float temperature = row.draw.temperature, top = largest.value / temperature;
  const bool is_done = nan || row.draw.greedy || top == -infinity() || !row.filtered;
  const float from_min_p = min_p_floor(row.filters, top);
  if (is_done || !(row.by_count || row.by_weight)) {
    if (slice.index != 0 || threadIdx.x != 0) return;
    const int64_t id = row.draw.greedy ? largest.id : top == -infinity() ? 0 : unfiltered.id;
    if (is_done) p.ids[slice.row] = nan ? -1 : id;
    space.floor = is_done ? not_a_number() : from_min_p;
    return;
  }

  // 2. A z that top-k tokens surely reach
  for (int i = threadIdx.x; i < slice.spans; i += blockDim.x) s.most[i] = __ldcg(&space.most[i]) / temperature;
  for (int i = threadIdx.x; i < kBuckets; i += blockDim.x)
    s.counts[i] = s.weights[0][i] = s.weights[1][i] = s.weights[2][i] = 0;
  if (threadIdx.x == 0) s.num_listed = 0;
  __syncthreads();
  const bool is_listed = row.by_count && row.filters.top_k <= slice.spans;
  const float bound = is_listed ? reached_by(s.most, slice.spans, row.filters.top_k) : -infinity();

  // 3. The tokens of the slice
  unsigned rest = 0;  // in the last bucket; they have no weight
  for_tokens<T, kWidth, 2>(
      logits, slice.begin, slice.end, slice.shift, [&](int span) { return s.most[span] >= bound; },
      [&](uint32_t first, const float (&v)[kWidth], bool there) {
        if (!there) return;
#pragma unroll
        for (int e = 0; e < kWidth; ++e) {
          const float z = v[e] / temperature;
          if (!(z >= bound)) continue;
          if (is_listed) {
            const unsigned at = atomicAdd(&s.num_listed, 1);
            if (at < kRoom) s.z[at] = z, s.ids[at] = first + e;
          }
          const int bucket = bucket_of(below_top(z, top));
          if (bucket == kBuckets - 1) {
            ++rest;
            continue;
          }
          if (row.by_count) atomicAdd(&s.counts[bucket], 1);
          if (!row.by_weight) continue;
          const Sum weight = weight_of(z, top);
#pragma unroll
          for (int i = 0; i < 3; ++i)
            if (weight) atomicAdd(&s.weights[i][bucket], unsigned(weight >> 13 * i) & 8191);
        }
      });
  if (rest) atomicAdd(&s.counts[kBuckets - 1], rest);
  __syncthreads();

  // 4. The sums and the list of the row
  for (int i = threadIdx.x; i < kBuckets; i += blockDim.x) {
    const Sum weight = s.weights[0][i] + (Sum(s.weights[1][i]) << 13) + (Sum(s.weights[2][i]) << 26);
    if (s.counts[i]) atomicAdd(&space.counts[i], Sum(s.counts[i]));
    if (weight) atomicAdd(&space.weights[i], weight);
  }
  const unsigned size = s.num_listed;
  if (threadIdx.x == 0 && size) s.at = atomicAdd(&space.num_listed, size);
  __syncthreads();
  for (unsigned i = threadIdx.x; i < size && s.at + size <= kRoom; i += blockDim.x)
    space.listed[s.at + i] = {s.z[i], s.ids[i]};
  __syncthreads();
  const unsigned last = unsigned(slice.slices) - 1;
  if (threadIdx.x == 0) s.is_last = count_up(&space.counted, last) == last;
  __syncthreads();
  if (!s.is_last) return;
  const unsigned listed = __ldcg(&space.num_listed);
  if (is_listed && listed <= kRoom) {
    choose_listed(p, row, space, s, slice.row, int(listed), largest, top);
    return;
  }

  // 5. The thresholds
  const Whole<T, kWidth> whole{logits, slice, p.vocab, temperature, top, short_key<T>(largest.value)};
  float floor = -infinity();
  if (row.by_count) {
    for (int i = threadIdx.x; i < kBuckets; i += blockDim.x) s.sums[i] = __ldcg(&space.counts[i]);
    floor = threshold(whole, s, double(row.filters.top_k), false, [](float) { return Sum(1); });
  }
  if (row.by_weight) {
    const auto weight = [&](float z) { return z >= floor ? weight_of(z, top) : 0; };
    const int lowest = whole.bucket(floor);  // what is below the floor weighs nothing
    for (int i = threadIdx.x; i < kBuckets; i += blockDim.x) s.sums[i] = i < lowest ? __ldcg(&space.weights[i]) : 0;
    __syncthreads();
    Sum own = 0;
    if (lowest < kBuckets - 1)  // the bucket that has been refined
      whole.for_logits(s, lowest, s.edges[0], s.edges[1] - 1, [&](float logit) { own += weight(logit / temperature); });
#pragma unroll
    for (int step = 16; step > 0; step /= 2) own += __shfl_xor_sync(kAllLanes, own, step);
    if (own && threadIdx.x % 32 == 0) atomicAdd(&s.sums[lowest], own);
    floor = fmaxf(floor, threshold(whole, s, double(row.filters.top_p), true, weight));
  }
  if (threadIdx.x == 0) space.floor = fmaxf(floor, from_min_p);
}

// ---- stage 3

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kThreads, kBlocks) choose_rows(const SelectTokensParams p) {
  __shared__ Best scratch[32];
  __shared__ float most[kSliceSpans];  // z
  __shared__ bool is_last;
  const Slice slice(p.vocab);
  grid_begin();
  RowSpace& space = static_cast<RowSpace*>(p.workspace)[slice.row];
  const float floor = __ldcg(&space.floor);
  if (floor != floor) return;
  const Row row = row_of(p, slice.row);
  const Best largest = found_in(space, slice.slices).largest;
  const float top = largest.value / row.draw.temperature;
  const int span = slice.index * kSliceSpans + int(threadIdx.x);
  if (threadIdx.x < kSliceSpans)
    most[threadIdx.x] = span < slice.spans ? __ldcg(&space.most[span]) / row.draw.temperature : -infinity();
  __syncthreads();
  Best best = {score_of(row, top, largest.id), largest.id};
  best = best_of_slice<T, kWidth>(
      static_cast<const T*>(p.logits) + slice.row * p.vocab, slice, row, floor, best,
      [&](int span, const Best& best) {
        const float z = most[span % kSliceSpans];
        return z >= floor && !(DFLASH_ADD32(sharpened(row.draw, z), kLargestNoise) < best.value);
      },
      [&](float z) { return !(row.filters.min_p > 0.0f) || z == top || shared_exp(z - top) >= row.filters.min_p; });
  best = block_best(best, scratch);
  if (threadIdx.x == 0) {
    space.best[slice.index] = best;
    const unsigned last = unsigned(slice.slices) - 1;
    is_last = count_up(&space.chosen, last) == last;
  }
  __syncthreads();
  if (!is_last || threadIdx.x >= 32) return;
  best = none();
  if (int(threadIdx.x) < slice.slices)
    best = {__ldcg(&space.best[threadIdx.x].value), __ldcg(&space.best[threadIdx.x].id)};
  best = warp_best(best);
  if (threadIdx.x == 0) p.ids[slice.row] = best.id;
}

int64_t select_tokens_workspace(int64_t rows, int64_t) { return rows * int64_t(sizeof(RowSpace)); }

cudaError_t launch_select_tokens(const SelectTokensParams& p, cudaStream_t stream) {
  const int64_t rows = p.batch * p.rows;
  return run_packed(p, rows, {p.logits}, {p.vocab}, [&](auto type, auto width) {
    using T = decltype(type);
    const int64_t blocks = rows * Cut(p.vocab).slices;
    const int64_t threads = min(int64_t(kThreads), ceil_div(p.vocab, 32 * width) * 32);
    for (auto* stage : {scan_slices<T, width>, find_floors<T, width>, choose_rows<T, width>}) {
      const cudaError_t error = launch_flat(stage, blocks, threads, stream, p);
      if (error != cudaSuccess) return error;
    }
    return cudaSuccess;
  });
}

}  // namespace dflash
