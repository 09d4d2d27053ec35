// Gives the same bits as the CPU kernel (noise.h). Stage 1, one block per slice of a row, finds the slice's largest
// logit, any NaN and, without filters, its best score; stage 2, one block per row, combines them, after it has found
// thresholds.
//
// A threshold of top-k or top-p is the smallest z such that everything strictly above weighs less than a limit (in
// tokens, or fixed-point probability). Weights are summed in 1024 buckets of z below the largest, and the bucket where
// the sum reaches the limit is refined by 8 bits of the logit at a time. Integer sums have no order.
#include "cuda/vocab/logits.cuh"

namespace dflash {

constexpr int64_t kSelectSlice = 8192;                // tokens per block of stage 1
constexpr int kScanThreads = 256, kRowThreads = 512;  // maximum; a small vocabulary uses fewer

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

struct Row {
  Draw draw;
  Filters filters;
  uint64_t position, seed;
  bool filtered;
};

static __device__ Row row_of(const SelectTokensParams& p, int64_t index) {
  const int64_t b = index / p.rows;
  const Filters filters{p.top_k[b], p.top_p[b], p.min_p[b]};
  return {draw_of(p.temperature[b], p.sharpness[b]), filters, p.position(index), uint64_t(p.seeds[b]),
          (filters.top_k > 0 && filters.top_k < p.vocab) || filters.top_p < 1.0f || filters.min_p > 0.0f};
}

static __device__ float score_of(const Row& row, float z, uint32_t id) {
  RowNoise noise(row.position, row.seed);
  return DFLASH_ADD32(sharpened(row.draw, z), gumbel(noise.word(id)));
}

// Calls f(id, logit) for the tokens from `begin` to `end` whose slice has take(slice), spread over the threads of the
// block. Each thread has kDeep loads in flight.
template <typename T, int kWidth, int kDeep, typename Take, typename F>
static __device__ __forceinline__ void for_tokens(const T* logits, int64_t begin, int64_t end, Take&& take, F&& f) {
  const int64_t step = int64_t(blockDim.x) * kWidth;
  for (int64_t first = begin + int64_t(threadIdx.x) * kWidth; first < end; first += kDeep * step) {
    Packed<T, kWidth> packed[kDeep];
    bool taken[kDeep];
#pragma unroll
    for (int k = 0; k < kDeep; ++k) {
      const int64_t id = first + k * step;
      taken[k] = id < end && take(id / kSelectSlice);
    }
#pragma unroll
    for (int k = 0; k < kDeep; ++k)
      if (taken[k]) packed[k] = load_packed<T, kWidth>(logits + first + k * step);
#pragma unroll
    for (int k = 0; k < kDeep; ++k) {
      if (!taken[k]) continue;
      float v[kWidth];
      unpack_to<T, kWidth>(packed[k], v);
#pragma unroll
      for (int e = 0; e < kWidth; ++e) f(uint32_t(first + k * step + e), v[e]);
    }
  }
}

template <int kWidth>
constexpr int kDeepest = kWidth == 1 ? 8 : 4;

// for_tokens of a slice.
template <typename T, int kWidth, int kDeep, typename F>
static __device__ __forceinline__ void for_slice(const SelectTokensParams& p, const T* logits, int64_t slice, F&& f) {
  const int64_t begin = slice * kSelectSlice, end = min(p.vocab, begin + kSelectSlice);
  for_tokens<T, kWidth, kDeep>(logits, begin, end, [](int64_t) { return true; }, f);
}

// The best score of a slice among tokens with z >= floor and keep(z), or `best` if none is better.
template <typename T, int kWidth, typename Keep>
static __device__ Best best_of_slice(const SelectTokensParams& p, const T* logits, int64_t slice, const Row& row,
                                     float floor, Best best, Keep&& keep) {
  RowNoise noise(row.position, row.seed);
  for_slice<T, kWidth, 1>(p, logits, slice, [&](uint32_t id, float logit) {
    const float z = logit / row.draw.temperature;
    if (!(z >= floor)) return;
    best = better(best, {noisy_score(row.draw, noise, z, id, best.value, [&] { return keep(z); }), id});
  });
  return best;
}

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kScanThreads, 1) scan_slices(const SelectTokensParams p) {
  __shared__ Best scratch[32];
  const int64_t slices = ceil_div(p.vocab, kSelectSlice), index = blockIdx.x / slices;
  const int64_t slice = blockIdx.x % slices;
  const T* logits = static_cast<const T*>(p.logits) + index * p.vocab;
  grid_begin();
  const Row row = row_of(p, index);
  Best largest = none();
  bool nan = false;
  for_slice<T, kWidth, kDeepest<kWidth>>(p, logits, slice, [&](uint32_t id, float logit) {
    nan |= logit != logit;
    largest = better(largest, {logit, id});
  });
  nan = __syncthreads_or(nan);
  largest = block_best(largest, scratch);
  Best best = none();
  if (!nan && !row.draw.greedy && !row.filtered) {
    const float top = largest.value / row.draw.temperature;
    best = {score_of(row, top, largest.id), largest.id};
    best = block_best(best_of_slice<T, kWidth>(p, logits, slice, row, -infinity(), best, [](float) { return true; }),
                      scratch);
  }
  if (threadIdx.x == 0) {
    const float value = nan ? not_a_number() : largest.value;
    store16(static_cast<uint4*>(p.workspace) + index * slices + slice,
            make_uint4(__float_as_uint(value), largest.id, __float_as_uint(best.value), best.id));
  }
}

// The shared memory of stage 2.
struct Scratch {
  Sum weight[kBuckets];
  Sum warp_sums[32];
  Sum total, above;
  int bin;
  Best best[32];
};

// s.weight[0 .. bins) is in falling order of z. Returns the last non-empty bin such that `above` plus all bins before
// it weigh less than `limit`; -1 if there is none. Adds the weight of the bins before it to `above`.
static __device__ int crossing_bin(Scratch& s, int bins, double limit, Sum& above) {
  const int each = int(ceil_div(bins, blockDim.x)), first = threadIdx.x * each;
  const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  Sum own = 0;
  for (int i = first; i < first + each && i < bins; ++i) own += s.weight[i];
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
  for (unsigned w = 0; w < warp; ++w) before += s.warp_sums[w];
  before += above;
  int found = -1;
  Sum at_found = 0;
  for (int i = first; i < first + each && i < bins; ++i) {
    const Sum weight = s.weight[i];
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

// The smallest z = logit / temperature such that everything strictly above it weighs less than the limit. Tokens below
// `floor` have no weight.
template <typename T, int kWidth, typename Weight>
static __device__ float threshold(const SelectTokensParams& p, const T* logits, const uint4* partial, const Row& row,
                                  float top, float floor, Scratch& s, double share, bool of_total, Weight&& weight) {
  const auto largest = [&](int64_t slice) { return __uint_as_float(__ldcg(&partial[slice].x)) / row.draw.temperature; };
  const auto clear = [&](int bins) {
    __syncthreads();
    for (int i = threadIdx.x; i < bins; i += blockDim.x) s.weight[i] = 0;
    if (threadIdx.x == 0) s.total = 0;
    __syncthreads();
  };
  clear(kBuckets);
  Sum total = 0, rest = 0;  // rest: the last bucket, which holds most tokens of a peaked distribution
  for_tokens<T, kWidth, kDeepest<kWidth>>(
      logits, 0, p.vocab, [&](int64_t slice) { return floor == -infinity() || largest(slice) >= floor; },
      [&](uint32_t, float logit) {
        const float z = logit / row.draw.temperature;
        const Sum w = weight(z);
        const int bucket = bucket_of(below_top(z, top));
        if (bucket == kBuckets - 1)
          rest += w;
        else if (w)
          atomicAdd(&s.weight[bucket], w);
        total += w;
      });
  if (rest) atomicAdd(&s.weight[kBuckets - 1], rest);
  double limit = share;
  if (of_total) {
    if (total) atomicAdd(&s.total, total);
    __syncthreads();
    limit = DFLASH_MUL64(share, double(int64_t(s.total)));
  }
  Sum above = 0;
  const int bucket = crossing_bin(s, kBuckets, limit, above);
  if (bucket < 0) return top;
  uint32_t prefix = 0, known = 0;  // the bits of the key found so far
  for (int shift = 24; shift >= (std::is_same_v<T, __nv_bfloat16> ? 16 : 0); shift -= 8) {
    clear(256);
    for_tokens<T, kWidth, kDeepest<kWidth>>(
        logits, 0, p.vocab, [&](int64_t slice) { return bucket_of(below_top(largest(slice), top)) <= bucket; },
        [&](uint32_t, float logit) {
          const float z = logit / row.draw.temperature;
          const uint32_t key = key_of(logit);
          if ((key & known) != prefix || bucket_of(below_top(z, top)) != bucket) return;
          const Sum w = weight(z);
          if (w) atomicAdd(&s.weight[255 - (key >> shift & 255)], w);
        });
    const int bin = crossing_bin(s, 256, limit, above);
    prefix |= uint32_t(255 - bin) << shift;
    known |= 255u << shift;
  }
  // The low half of a negative bf16's key is all ones; prefix has zeros there, which from_key turns into ones.
  const uint32_t bits = __float_as_uint(from_key(prefix));
  const float logit = __uint_as_float(std::is_same_v<T, __nv_bfloat16> ? bits & 0xffff0000u : bits);
  return logit / row.draw.temperature;
}

template <typename T, int kWidth>
static __global__ void __launch_bounds__(kRowThreads, 1) choose_rows(const SelectTokensParams p) {
  __shared__ Scratch s;
  const int64_t slices = ceil_div(p.vocab, kSelectSlice), index = blockIdx.x;
  const T* logits = static_cast<const T*>(p.logits) + index * p.vocab;
  const uint4* partial = static_cast<const uint4*>(p.workspace) + index * slices;
  grid_begin();
  const Row row = row_of(p, index);
  Best largest = none(), best = none();
  bool nan = false;
  for (int64_t slice = threadIdx.x; slice < slices; slice += blockDim.x) {
    const uint4 words = __ldcg(partial + slice);
    nan |= (words.x & 0x7fffffffu) > 0x7f800000u;
    largest = better(largest, {__uint_as_float(words.x), words.y});
    best = better(best, {__uint_as_float(words.z), words.w});
  }
  nan = __syncthreads_or(nan);
  largest = block_best(largest, s.best);
  const float top = largest.value / row.draw.temperature;
  if (nan || row.draw.greedy || top == -infinity()) {
    if (threadIdx.x == 0) p.ids[index] = nan ? -1 : row.draw.greedy ? int64_t(largest.id) : 0;
    return;
  }
  if (row.filtered) {
    float floor = -infinity();
    if (row.filters.top_k > 0 && row.filters.top_k < p.vocab)
      floor = threshold<T, kWidth>(p, logits, partial, row, top, floor, s, double(row.filters.top_k), false,
                                   [](float) { return Sum(1); });
    if (row.filters.top_p < 1.0f)
      floor = max(floor, threshold<T, kWidth>(
                             p, logits, partial, row, top, floor, s, double(row.filters.top_p), true, [&](float z) {
                               return z >= floor ? Sum(fixed_point(shared_exp(below_top(z, top)))) : Sum(0);
                             }));
    best = {score_of(row, top, largest.id), largest.id};
    const auto keep = [&](float z) {
      return !(row.filters.min_p > 0.0f) || z == top || shared_exp(z - top) >= row.filters.min_p;
    };
    for (int64_t slice = 0; slice < slices; ++slice) {
      const float most = __uint_as_float(__ldcg(&partial[slice].x)) / row.draw.temperature;
      if (most < floor || DFLASH_ADD32(sharpened(row.draw, most), kLargestNoise) < best.value) continue;
      best = best_of_slice<T, kWidth>(p, logits, slice, row, floor, best, keep);
    }
  }
  best = block_best(best, s.best);
  if (threadIdx.x == 0) p.ids[index] = best.id;
}

// [rows, slices] of 16 bytes: stage 1's findings for each slice.
int64_t select_tokens_workspace(int64_t rows, int64_t vocab) {
  return rows * ceil_div(vocab, kSelectSlice) * int64_t(sizeof(uint4));
}

cudaError_t launch_select_tokens(const SelectTokensParams& p, cudaStream_t stream) {
  const int64_t rows = p.batch * p.rows, slices = ceil_div(p.vocab, kSelectSlice);
  return run_packed(p, rows, {p.logits}, {p.vocab}, [&](auto type, auto width) {
    using T = decltype(type);
    const auto threads = [&](int most) { return min(int64_t(most), ceil_div(p.vocab, 32 * width) * 32); };
    const cudaError_t error = launch_flat(scan_slices<T, width>, rows * slices, threads(kScanThreads), stream, p);
    if (error != cudaSuccess) return error;
    return launch_flat(choose_rows<T, width>, rows, threads(kRowThreads), stream, p);
  });
}

}  // namespace dflash
