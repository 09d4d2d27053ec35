// Products with the few rows that would leave lanes idle (AVX-512): lanes hold weights as they lie in memory. Sums have
// the order that linear_tile.h describes.
#pragma once
#include "cpu/linear/linear_tile.h"

#if defined(__AVX512F__)
DFLASH_NAMESPACE_BEGIN

constexpr int kFours = kTile / 4;  // features of a tile

// Where the rows of a tile begin; past the end of the matrix its last row again.
template <typename T>
struct RowStarts {
  const T* at[kTile];

  RowStarts(const T* weight, int64_t in, int64_t live) {
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) {
      at[i] = weight;
      if (i + 1 < live) weight += in;
    }
  }
};

// A group of words of a tile's rows from element k as chains take them; load(row) gives those of a row. Requests
// element `next` of each.
template <typename T, typename Load>
static inline void load_quarters(const RowStarts<T>& rows, int64_t k, int64_t next, const Load& load,
                                 Vec (&quarters)[kFours][4]) {
#pragma GCC unroll 4
  for (int f = 0; f < kFours; ++f) {
    Vec four[4];
#pragma GCC unroll 4
    for (int i = 4 * f; i < 4 * f + 4; ++i) {
      four[i % 4] = load(rows.at[i] + k);
      __builtin_prefetch(rows.at[i] + next);
    }
    transpose_quarters(four, quarters[f]);
  }
}

// each[c] = word c of each quarter, in all of the quarter
static inline void spread_quarters(Vec words, Vec (&each)[4]) {
  each[0] = (Vec)_mm512_permute_ps((__m512)words, 0x00);
  each[1] = (Vec)_mm512_permute_ps((__m512)words, 0x55);
  each[2] = (Vec)_mm512_permute_ps((__m512)words, 0xaa);
  each[3] = (Vec)_mm512_permute_ps((__m512)words, 0xff);
}

// total (+)= the four chains, one after another
static inline __m128 add_chains(Vec chains, bool first, __m128 total) {
  const __m512 all = (__m512)chains;
  total = first ? _mm512_castps512_ps128(all) : _mm_add_ps(total, _mm512_castps512_ps128(all));
  total = _mm_add_ps(total, _mm512_extractf32x4_ps(all, 1));
  total = _mm_add_ps(total, _mm512_extractf32x4_ps(all, 2));
  return _mm_add_ps(total, _mm512_extractf32x4_ps(all, 3));
}

static_assert(kTile == 8, "the sums of a row are a vector of 32 bytes");

// sums [ROWS, kTile] = the totals
template <int ROWS>
static inline void store_totals(const __m128 (&totals)[ROWS][kFours], float* sums) {
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r) _mm256_storeu_ps(sums + r * kTile, _mm256_set_m128(totals[r][1], totals[r][0]));
}

// to [live] = from [kTile], finished
template <typename Out>
static inline void store_features(Out* to, const float* from, const Finish& finish, int64_t live) {
  // As many bytes as store_totals wrote at once: a longer load would wait until they are in the cache.
  Vec sum = (Vec)_mm512_zextps256_ps512(_mm256_loadu_ps(from));
  if (finish.scaled) sum *= load(finish.scales);
  if (finish.biased) sum += load(finish.bias);
  Out rounded[kWidth];
  store(rounded, sum);
  copy_features(rounded, live, to);
}

// sums [ROWS, kTile] of ROWS rows of words `stride` apart and `live` features: vectors are words of a
// weight row, as they lie in memory
template <typename T, int ROWS>
static void multiply_few(const Word<T>* x, int64_t stride, int64_t in, const T* weight, int64_t live, float* sums) {
  constexpr int64_t kElements = kGroup * kEach<T>, kAhead = 256 / sizeof(T);
  const RowStarts<T> tile(weight, in, live);
  Vec acc[ROWS][kFours];
  __m128 totals[ROWS][kFours];
  // 1. A group of words of all features, with all rows
  const auto group = [&](int64_t k, const auto& load) {
    const int64_t element = k * kEach<T>;
    Vec weights[kFours][4], each[4];
    load_quarters(tile, element, element_ahead(in, element + kAhead, kTile), load, weights);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      spread_quarters((Vec)_mm512_loadu_ps(x + r * stride + k), each);
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c)
#pragma GCC unroll 4
        for (int f = 0; f < kFours; ++f) acc[r][f] = add_products(weights[f][c], each[c], acc[r][f], Word<T>{});
    }
  };
  // 2. Segments, each summed from zero
  const int64_t words = words_of<T>(in), whole = in / kElements * kGroup;
  for (int64_t first = 0; first < words; first += kSegment) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int f = 0; f < kFours; ++f) acc[r][f] = Vec{};
    int64_t k = first;
    for (; k < least(first + kSegment, whole); k += kGroup)
      group(k, [](const auto* from) { return load_words(from, Word<T>{}); });
    if (k < least(first + kSegment, words))
      group(k, [&](const auto* from) { return load_some<T>(from, in - k * kEach<T>); });
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int f = 0; f < kFours; ++f) totals[r][f] = add_chains(acc[r][f], first == 0, totals[r][f]);
  }
  store_totals(totals, sums);
}

DFLASH_NAMESPACE_END
#endif
