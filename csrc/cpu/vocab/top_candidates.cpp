// The best tokens of each row by score, where a score is that of select_tokens (same bits) without filters. Block
// maxima say which blocks can hold one. Without noise `count` of 4 * count interleaved slices reach the count-th
// largest of the slices' maxima, so no logit below that is among the best, and hardly more than `count` are above it.
// With noise the word bounds a token's noise, as in select_tokens.
#include "cpu/vocab/scan.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
static void look_at_logits(const T* logits, const Row& row, const float* block_max, Best& best) {
  best.floor = row.blocks >= 4 * best.count ? reached_by_enough(block_max, row.blocks, best.count)
                                            : reached_by_enough(logits, row.vocab, best.count);
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (!(block_max[b] >= best.floor)) continue;
    const int64_t end = least(row.vocab, (b + 1) * kBlock);
    for (int64_t id = b * kBlock; id < end; ++id) best.add(to_float(logits[id]), id);
  }
}

template <typename T>
static void look_at_scores(const T* logits, const Row& row, const float* block_max, Best& best) {
  for (int64_t b = 0; b < row.blocks; ++b) {
    if (!(sharpened(row.draw, block_max[b] / row.draw.temperature) + kLargestNoise >= best.floor)) continue;
    for_reaching(logits, row, b, best.floor, -kInf,
                 [&](int64_t id, float, float score, uint32_t word) { best.add(score + gumbel(word), id); });
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

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::top_candidates(const TopCandidatesParams& p) {
  best_of_rows(p, p.rows, p.sharpness, p.candidate_logits,
               [&](const Row& row, const auto* logits, int64_t* ids, float* out) {
                 return best_of_row(logits, row, p.count, ids, out);
               });
}
