// The best tokens of each row by score, where a score is that of select_tokens (same bits) without filters.
//
// The maximum of each block of 64 logits says whether the block can hold one of the best so far. Without noise the row
// is cut into 4 * count interleaved slices: `count` of them reach the count-th largest of
// the slices' maxima, so no logit below that is among the best, and hardly more than `count` are above it. With noise,
// a token's Philox word bounds its noise, and only tokens whose bound reaches the worst of the best so far need the
// logarithm. fp32 addition is monotone, so a skipped token is not among the best. Needs -ffp-contract=off.
#include "common/filters.h"
#include "cpu/base/buffer.h"
#include "cpu/base/parallel.h"
#include "cpu/vocab/best.h"

DFLASH_NAMESPACE_BEGIN

struct Row {
  Draw draw;
  int64_t vocab, blocks;
  uint64_t position, seed;
};

template <typename T>
static void look_at_logits(const T* logits, const Row& row, const float* block_max, Best& best) {
  best.floor = row.blocks >= 4 * best.count ? reached_by_enough(block_max, row.blocks, best.count)
                                            : reached_by_enough(logits, row.vocab, best.count);
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (!(block_max[b] >= best.floor)) continue;
    const int64_t end = std::min(row.vocab, (b + 1) * kBlock);
    for (int64_t id = b * kBlock; id < end; ++id) best.add(to_float(logits[id]), id);
  }
}

template <typename T>
static void look_at_scores(const T* logits, const Row& row, const float* block_max, Best& best) {
  float z[kBlock], a[kBlock];
  uint32_t word[kBlock];
  int32_t hit[kBlock];
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (!(sharpened(row.draw, block_max[b] / row.draw.temperature) + kLargestNoise >= best.floor)) continue;
    scaled_block(logits, row.vocab, row.draw.temperature, b, z);
    block_words(uint32_t(b * (kBlock / 4)), row.position, row.seed, word);
    if (!may_reach(z, word, row.draw.sharpness, best.floor, -kInf, a, hit)) continue;
    for (int i = 0; i < kBlock; ++i)
      if (hit[i]) best.add(a[i] + gumbel(word[i]), b * kBlock + i);
  }
}

template <typename T>
static int64_t best_of_row(const T* logits, const Row& row, int64_t count, int64_t* ids, float* out) {
  static thread_local Buffer<float> maxima;
  float* block_max = maxima.reserve(row.blocks);
  if (!scan(logits, row.vocab, block_max)) return 0;
  Best best(count);
  row.draw.greedy ? look_at_logits(logits, row, block_max, best) : look_at_scores(logits, row, block_max, best);
  best.cut();
  for (int64_t k = 0; k < best.size; ++k) ids[k] = best.kept[k].id, out[k] = to_float(logits[ids[k]]);
  return best.size;
}

template <typename T>
static void top_rows(const TopCandidatesParams& p) {
  const int64_t total = p.batch * p.rows;
  parallel_for(total, total * p.vocab, p.threads, [&](int64_t i) {
    const int64_t b = i / p.rows;
    const Row row{draw_of(p.temperature[b], p.sharpness[b]), p.vocab, (p.vocab + kBlock - 1) / kBlock,
                  uint64_t(p.positions[i]), uint64_t(p.seeds[b])};
    int64_t* ids = p.ids + i * p.count;
    float* out = p.candidate_logits + i * p.count;
    const int64_t found = best_of_row(static_cast<const T*>(p.logits) + i * p.vocab, row, p.count, ids, out);
    for (int64_t k = found; k < p.count; ++k) ids[k] = -1, out[k] = -kInf;
  });
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void top_candidates(const TopCandidatesParams& p) {
  p.dtype == DType::kFloat32 ? top_rows<float>(p) : top_rows<bf16>(p);
}

}  // namespace dflash::DFLASH_ISA
