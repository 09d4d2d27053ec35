// The denominator of log probabilities. Rows over threads: a row's sum has one order, whatever the number of threads.
#include "cpu/vocab/scan.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
static float log_sum_exp_row(const T* logits, int64_t vocab) {
  static thread_local Buffer<float> buffer;
  const int64_t blocks = ceil_div(vocab, kBlock);
  float *block_max = buffer.reserve(blocks), top = -kInf;
  if (!scan(logits, vocab, block_max)) return __builtin_nanf("");
  for (int64_t b = 0; b < blocks; ++b) top = block_max[b] > top ? block_max[b] : top;
  if (std::fabs(top) == kInf) return top;
  const double sum = sum_exp(blocks, [&](int64_t b) {
    Block x = load_block(logits, vocab, b);
    for (Vec& v : x.v) v -= top;
    return x;
  });
  return float(double(top) + log64(sum));
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::log_sum_exp(const LogSumExpParams& p) {
  parallel_rows(p, p.rows, p.rows * p.vocab, [&](auto type, int64_t row) {
    p.out[row] = log_sum_exp_row(static_cast<const decltype(type)*>(p.logits) + row * p.vocab, p.vocab);
  });
}
