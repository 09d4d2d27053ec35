// A first pass finds the maximum of each block of 64 logits and any NaN; later ones read only blocks that can matter.
//
// A token needs its Philox word only if its score plus the largest possible noise reaches the best so far, and the
// logarithm if the bound gumbel(word) <= -ln(word / 2^32) does too. fp32 addition is monotone, so a skipped token could
// not have won. Filter thresholds are found exactly, on the blocks that can hold them.
#include "cpu/vocab/scan.h"

DFLASH_NAMESPACE_BEGIN

struct Value {
  float z;
  int64_t weight;
  friend bool operator<(const Value& a, const Value& b) { return a.z > b.z; }  // the largest come first
};

struct Scratch {
  Buffer<float> maxima;
  Buffer<Value> values;
};

// The k-th largest of `count` values. Reorders them.
static float kth(Value* values, int64_t k, int64_t count) {
  std::nth_element(values, values + (k - 1), values + count);
  return values[k - 1].z;
}

// The k-th largest logit.
template <typename T>
static float kth_largest(const T* logits, const Row& row, int64_t k, const float* block_max, Scratch& s) {
  Value* values = s.values.reserve(row.vocab);
  float at_least = -kInf;  // k blocks reach it, so at least k logits do
  if (k <= row.blocks) {
    for (int64_t b = 0; b < row.blocks; ++b) values[b] = {block_max[b], 0};
    at_least = kth(values, k, row.blocks);
  }
  int64_t count = 0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (block_max[b] < at_least) continue;
    const int64_t end = least(row.vocab, (b + 1) * kBlock);
    for (int64_t i = b * kBlock; i < end; ++i)
      if (to_float(logits[i]) >= at_least) values[count++] = {to_float(logits[i]), 0};
  }
  return kth(values, k, count);
}

// The smallest z >= floor that top-p keeps: everything strictly above it weighs less than top_p of the total. Weights
// are summed in buckets of z; only the bucket where the sum reaches the limit is sorted.
template <typename T>
static float top_p_threshold(const T* logits, const Row& row, float top_p, const float* block_max, float top,
                             float floor, Scratch& s) {
  int64_t weight[kBuckets] = {};
  float z[kBlock], e[kBlock];
  int64_t q[kBlock];
  int bucket[kBlock];
  const auto weigh = [&](int64_t b) {
    scaled_block(logits, row.vocab, row.draw.temperature, b, z);
    for (int i = 0; i < kBlock; ++i) {
      const float d = below_top(z[i], top);
      e[i] = z[i] >= floor ? shared_exp(d) : 0.0f;
      bucket[i] = bucket_of(d);
    }
    for (int i = 0; i < kBlock; ++i) q[i] = fixed_point(e[i]);
  };
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (block_max[b] < floor || below_top(block_max[b], top) < -28.0f) continue;  // exp(-28) 2^38 rounds to 0
    weigh(b);
    for (int i = 0; i < kBlock; ++i) weight[bucket[i]] += q[i];
  }
  int64_t total = 0, above = 0;
  for (int64_t w : weight) total += w;
  const double limit = double(top_p) * double(total);
  int crossing = 0;
  while (crossing < kBuckets - 1 && double(above + weight[crossing]) < limit) above += weight[crossing++];
  Value* values = s.values.reserve(row.vocab);
  int64_t found = 0;
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (block_max[b] < floor || bucket_of(below_top(block_max[b], top)) > crossing) continue;
    weigh(b);
    const int64_t count = least(kBlock, row.vocab - b * kBlock);
    for (int i = 0; i < count; ++i)
      if (bucket[i] == crossing && z[i] >= floor) values[found++] = {z[i], q[i]};
  }
  std::sort(values, values + found);
  float threshold = top;
  for (int64_t i = 0; i < found && double(above) < limit;) {
    threshold = values[i].z;
    for (; i < found && values[i].z == threshold; ++i) above += values[i].weight;
  }
  return threshold;
}

template <typename T>
static int64_t select_row(const T* logits, const Row& row, const Filters& filters, Scratch& s) {
  float* block_max = s.maxima.reserve(row.blocks);  // of the logits, then of z
  if (!scan(logits, row.vocab, block_max)) return -1;
  int64_t first = 0;
  for (int64_t b = 1; b < row.blocks; ++b) first = block_max[b] > block_max[first] ? b : first;
  const float largest = block_max[first];
  int64_t best_id = first * kBlock;
  while (to_float(logits[best_id]) != largest) ++best_id;
  if (row.draw.greedy) return best_id;

  const float top = largest / row.draw.temperature;
  if (top == -kInf) return 0;
  float floor = -kInf;
  if (filters.top_k > 0 && filters.top_k < row.vocab)
    floor = kth_largest(logits, row, filters.top_k, block_max, s) / row.draw.temperature;
  for (int64_t b = 0; b < row.blocks; ++b) block_max[b] = block_max[b] / row.draw.temperature;
  if (filters.top_p < 1.0f)
    floor = std::max(floor, top_p_threshold(logits, row, filters.top_p, block_max, top, floor, s));
  if (filters.min_p > 0.0f) {  // a lower bound for skipping; the test itself uses the exponential
    const double bound = double(top) + std::log(double(filters.min_p));
    floor = std::max(floor, std::min(top, float(bound - 1e-3 - 1e-6 * std::fabs(bound))));
  }

  const auto words_of = [&](int64_t id) { return noise_words(uint32_t(id >> 2), row.position, 0, row.seed); };
  float best = sharpened(row.draw, top) + gumbel(words_of(best_id).word[best_id & 3]);

  float z[kBlock], a[kBlock];  // not by for_reaching: a best that a callback writes is a sixth slower
  uint32_t word[kBlock];
  int32_t hit[kBlock];
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (block_max[b] < floor || sharpened(row.draw, block_max[b]) + kLargestNoise < best) continue;
    scaled_block(logits, row.vocab, row.draw.temperature, b, z);
    block_words(uint32_t(b * (kBlock / 4)), row.position, row.seed, word);
    if (!may_reach(z, word, row.draw.sharpness, best, floor, a, hit)) continue;
    for (int i = 0; i < kBlock; ++i) {
      const int64_t id = b * kBlock + i;
      if (!hit[i] || id >= row.vocab) continue;
      if (filters.min_p > 0.0f && z[i] != top && !(shared_exp(z[i] - top) >= filters.min_p)) continue;
      const float score = a[i] + gumbel(word[i]);
      if (score > best || (score == best && id < best_id)) best = score, best_id = id;
    }
  }
  return best_id;
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::select_tokens(const SelectTokensParams& p) {
  parallel_rows(p, p.batch * p.rows, p.batch * p.rows * p.vocab, [&](auto type, int64_t i) {
    static thread_local Scratch scratch;
    const int64_t b = i / p.rows;
    const Row row{draw_of(p.temperature[b], p.sharpness[b]), p.vocab, ceil_div(p.vocab, kBlock), p.position(i),
                  uint64_t(p.seeds[b])};
    const Filters filters{p.top_k[b], p.top_p[b], p.min_p[b]};
    p.ids[i] = select_row(static_cast<const decltype(type)*>(p.logits) + i * p.vocab, row, filters, scratch);
  });
}
