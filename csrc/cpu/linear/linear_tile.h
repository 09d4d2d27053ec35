// The products of linear.cpp: a tile of weight rows with rows of x.
//
// What is multiplied at once is a word: a float, or a pair of bf16, whose second element is added first, as vdpbf16ps
// does. Sums have the same order in all kernels and with every instruction set, but for tiles (linear_amx.h). Of a
// segment of kSegment words, word k belongs to chain k / 4 % 4; a chain is summed from zero, one word after another,
// and then added to the total, so that long sums stay precise. A vector of 16 words of a weight row has four words of
// each chain in its four quarters, which is how few rows are multiplied; many rows take one chain after another. Groups
// of 16 are padded with zero words.
#pragma once
#include <type_traits>

#include "cpu/base/vec.h"

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kSegment = 128, kGroup = 16;         // words
constexpr int kChains = 4;                             // of a segment; a group has four words of each
constexpr int64_t kSegmentStride = kSegment + kGroup;  // rows of a copied tile do not share cache sets
constexpr int kTile = 8;  // features; lines that are requested for more get lost where rows share cache sets
constexpr int kAccumulators = kWidth == 16 ? 16 : 8;  // vectors
// Features that NV vectors of rows are multiplied with at once.
template <int NV>
constexpr int kAtOnce = NV * kTile <= kAccumulators ? kTile : kAccumulators / NV / 4 * 4;
constexpr int kFewRows = 8;  // at once, of those that are not in lanes

// The word that T is multiplied as: a float, or a pair of bf16.
template <typename T>
using Word = std::conditional_t<sizeof(T) == 2, uint32_t, float>;

template <typename T>
constexpr int64_t kEach = sizeof(Word<T>) / sizeof(T);  // elements in a word

// Words of a row that has `in` elements, in whole groups.
template <typename T>
static inline int64_t words_of(int64_t in) {
  return ((in + kEach<T> - 1) / kEach<T> + kGroup - 1) / kGroup * kGroup;
}

// kWidth words. For AVX2 GCC 12 would make two halves of memcpy, and put them together in memory.
template <typename From>
static inline Vec load_words(const From* from) {
  typedef float Anywhere __attribute__((vector_size(4 * DFLASH_WIDTH), aligned(1), may_alias));
  return *reinterpret_cast<const Anywhere*>(from);
}
static inline Vec spread(float word) { return splat(word); }
static inline Vec spread(uint32_t word) { return (Vec)(UVec{} + word); }
static inline Vec add_products(Vec w, Vec x, Vec sums, float) { return fma_vec(w, x, sums); }
static inline Vec add_products(Vec w, Vec x, Vec sums, uint32_t) {
#if defined(__AVX512BF16__)
  return (Vec)_mm512_dpbf16_ps((__m512)sums, (__m512bh)w, (__m512bh)x);
#else
  const auto first = [](Vec pairs) { return (Vec)((UVec)pairs << 16); };
  const auto second = [](Vec pairs) { return (Vec)((UVec)pairs & 0xffff0000u); };
  return fma_vec(first(w), first(x), fma_vec(second(w), second(x), sums));
#endif
}

// kWidth words, made of `live` elements and zeros
template <typename T>
static inline Vec load_some(const T* from, int64_t live) {
  constexpr int64_t count = kWidth * kEach<T>;
  if (live >= count) return load_words(from);
  T some[count] = {};
  for (int64_t i = 0; i < live; ++i) some[i] = from[i];
  return load_words(some);
}

#if defined(__AVX512F__)
// 16 x 16 words: out[j * out_step + i] = in[i] word j
static inline void transpose16(const Vec (&in)[16], uint32_t* out, int64_t out_step) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32((__m512i)in[2 * i], (__m512i)in[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)in[2 * i], (__m512i)in[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i p = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88), q = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    const __m512i r = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88),
                  s = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    _mm512_storeu_si512(out + i * out_step, _mm512_shuffle_i32x4(p, r, 0x88));
    _mm512_storeu_si512(out + (4 + i) * out_step, _mm512_shuffle_i32x4(q, s, 0x88));
    _mm512_storeu_si512(out + (8 + i) * out_step, _mm512_shuffle_i32x4(p, r, 0xdd));
    _mm512_storeu_si512(out + (12 + i) * out_step, _mm512_shuffle_i32x4(q, s, 0xdd));
  }
}
#endif

// out[j * out_step + i] = in[i] word j
static inline void transpose(const Vec (&in)[kWidth], float* out, int64_t out_step) {
#if defined(__AVX512F__)
  transpose16(in, reinterpret_cast<uint32_t*>(out), out_step);
#else
  for (int i = 0; i < kWidth; ++i)
    for (int j = 0; j < kWidth; ++j) out[j * out_step + i] = in[i][j];
#endif
}

// packed [words, lanes] = [rows, words]^T, lanes past the last row zero; load(row, word) gives kWidth words
template <typename Load>
static inline void transpose_rows(int64_t rows, int64_t words, int64_t lanes, float* packed, const Load& load) {
  for (int64_t k = 0; k < words; k += kWidth)
    for (int64_t first = 0; first < lanes; first += kWidth) {
      Vec tile[kWidth];
#pragma GCC unroll 16
      for (int i = 0; i < kWidth; ++i) tile[i] = first + i < rows ? load(first + i, k) : Vec{};
      transpose(tile, packed + k * lanes + first, lanes);
    }
}

// copied [all, stride] = the words of rows that are `in` apart, padded with zeros, as are rows after the last
template <typename T>
static void copy_rows(const T* x, int64_t rows, int64_t all, int64_t in, int64_t stride, Word<T>* copied) {
  for (int64_t r = 0; r < all; ++r)
    for (int64_t k = 0; k < stride; k += kWidth) {
      const int64_t left = in - k * kEach<T>;
      store(reinterpret_cast<float*>(copied) + r * stride + k,
            r < rows && left > 0 ? load_some<T>(x + r * in + k * kEach<T>, left) : Vec{});
    }
}

// packed [words_of(in), lanes] = x^T of rows that are `in` apart
template <typename T>
static void pack_rows(const T* x, int64_t rows, int64_t in, int64_t lanes, Word<T>* packed) {
  transpose_rows(rows, words_of<T>(in), lanes, reinterpret_cast<float*>(packed), [&](int64_t r, int64_t k) {
    const int64_t element = k * kEach<T>;
    return load_some<T>(x + r * in + element, in - element);
  });
}

// What to request early, as an offset from the start of a tile's row: element k, or past the row's end the next tile's.
static inline int64_t element_ahead(int64_t in, int64_t k, int64_t features) {
  return k < in ? k : features * in + k - in;
}

// The words of a tile's rows from `first`; past the end of the matrix its last row again, whose sums are dropped.
template <typename T>
static inline void copy_segment(const T* weight, int64_t in, int64_t live, int64_t first, int64_t words,
                                Word<T>* copied) {
  const int64_t left = in - first * kEach<T>;
  const T* from[kTile];
#pragma GCC unroll 8
  for (int i = 0; i < kTile; ++i) from[i] = weight + least(i, live - 1) * in + first * kEach<T>;
  // All rows in turn: of one after another GCC makes `rep movs`, which takes longer to begin than to copy.
  const auto copy = [&](int64_t count, const auto& load) {
    for (int64_t k = 0; k < count; k += kWidth)
#pragma GCC unroll 8
      for (int i = 0; i < kTile; ++i)
        store(reinterpret_cast<float*>(copied + i * kSegmentStride + k), load(from[i] + k * kEach<T>, k));
  };
  if (left >= kSegment * kEach<T>)
    copy(kSegment, [](const T* at, int64_t) { return load_words(at); });
  else
    copy(words, [&](const T* at, int64_t k) { return load_some<T>(at, left - k * kEach<T>); });
}

// sums [TILE, NV vectors] (+)= copied [TILE, words] packed [words, NV vectors], of one segment. Meanwhile a segment of
// weights at `next` comes from memory to the L2 cache: rows lie powers of two apart, and the L1 cache does not hold
// that many lines of them. A non-temporal hint instead, here and in load_quarters, was measured on Zen 4: 0.93x to 1.0x
// with 1 and 16 rows of 4096 -> 12288, 1.02x with 40. Inlined, GCC runs out of registers.
template <typename T, int NV, int TILE>
__attribute__((noinline)) static void multiply_segment(const Word<T>* copied, const Word<T>* packed, int64_t words,
                                                       bool first, float* sums, const T* next, int64_t in) {
  constexpr int kRows = (TILE + kChains - 1) / kChains;  // requested during one chain
  for (int chain = 0; chain < kChains; ++chain, next += kRows * in) {
    // 1. Sum the chain from zero
    Vec acc[TILE][NV];
#pragma GCC unroll 32
    for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[i][v] = Vec{};
    const Word<T>* weights = copied + 4 * chain;
    const float* rows = reinterpret_cast<const float*>(packed) + 4 * chain * NV * kWidth;
    const T* line = next;
    for (int64_t k = 0; k < words; k += kGroup) {
#pragma GCC unroll 8
      for (int i = 0; i < kRows; ++i) __builtin_prefetch(line + i * in, 0, 2);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        Vec x[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) x[v] = load(rows + (j * NV + v) * kWidth);
#pragma GCC unroll 32
        for (int i = 0; i < TILE; ++i) {
          const Vec w = spread(weights[i * kSegmentStride + j]);
#pragma GCC unroll 4
          for (int v = 0; v < NV; ++v) acc[i][v] = add_products(w, x[v], acc[i][v], Word<T>{});
        }
      }
      weights += kGroup, rows += kGroup * NV * kWidth, line += kGroup * kEach<T>;
    }
    // 2. Add it to the total
    const bool add = !first || chain > 0;
#pragma GCC unroll 32
    for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        float* at = sums + (i * NV + v) * kWidth;
        store(at, add ? load(at) + acc[i][v] : acc[i][v]);
      }
  }
}

// sums [kTile, NV vectors of rows] of `live` features
template <typename T, int NV>
static void multiply_in_lanes(const Word<T>* packed, int64_t in, const T* weight, int64_t live, float* sums) {
  alignas(64) Word<T> copied[kTile * kSegmentStride];
  const int64_t words = words_of<T>(in);
  for (int64_t k = 0; k < words; k += kSegment) {
    const int64_t n = least(kSegment, words - k);
    copy_segment<T>(weight, in, live, k, n, copied);
    const T* next = weight + element_ahead(in, (k + 2 * kSegment) * kEach<T>, kTile);
    for (int i = 0; i < kTile; i += kAtOnce<NV>)
      multiply_segment<T, NV, kAtOnce<NV>>(copied + i * kSegmentStride, packed + k * NV * kWidth, n, k == 0,
                                           sums + i * NV * kWidth, next + i * in, in);
  }
}

// What becomes of the sums of a tile's features.
struct Finish {
  alignas(64) float bias[2 * kTile];  // as many as store_features loads
  bool biased;

  template <typename T>
  Finish(const T* add, int64_t live) : biased(add) {
    if (biased)
      for (int64_t i = 0; i < live; ++i) bias[i] = to_float(add[i]);
  }

  // The finished sums of feature i.
  Vec operator()(Vec sum, int i) const {
    if (biased) sum += bias[i];
    return sum;
  }
};

#if defined(__AVX512F__)
// Four words of four rows into the order that a chain takes them: out[c] quarter q = in[.] word 4q + c.
static inline void transpose_quarters(const Vec (&in)[4], Vec (&out)[4]) {
  const __m512 a = _mm512_unpacklo_ps((__m512)in[0], (__m512)in[1]),
               b = _mm512_unpackhi_ps((__m512)in[0], (__m512)in[1]),
               c = _mm512_unpacklo_ps((__m512)in[2], (__m512)in[3]),
               d = _mm512_unpackhi_ps((__m512)in[2], (__m512)in[3]);
  out[0] = (Vec)_mm512_unpacklo_pd((__m512d)a, (__m512d)c);
  out[1] = (Vec)_mm512_unpackhi_pd((__m512d)a, (__m512d)c);
  out[2] = (Vec)_mm512_unpacklo_pd((__m512d)b, (__m512d)d);
  out[3] = (Vec)_mm512_unpackhi_pd((__m512d)b, (__m512d)d);
}

static_assert(kTile == 8, "rows of a tile are 32 bytes in float and 16 in bf16");

// rows [16, 8] = tile [8] of 16 lanes, transposed
static inline void transpose_tile(const Vec (&tile)[kTile], float* rows) {
  Vec first[4], last[4];  // row 4q + c is quarter q of first[c] and of last[c]
  transpose_quarters({tile[0], tile[1], tile[2], tile[3]}, first);
  transpose_quarters({tile[4], tile[5], tile[6], tile[7]}, last);
  const __m512i low = _mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), high = _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const int c = i % 4;
    const __m512 two = (__m512)_mm512_permutex2var_pd((__m512d)first[c], i < 4 ? low : high, (__m512d)last[c]);
    float* to = rows + (i < 4 ? c : c + 8) * kTile;
    _mm256_store_ps(to, _mm512_castps512_ps256(two));
    _mm256_store_ps(to + 4 * kTile, _mm512_extractf32x8_ps(two, 1));
  }
}

// The same, rounded.
static inline void transpose_tile(const Vec (&tile)[kTile], bf16* rows) {
  Vec pairs[4], quarters[4];  // row 4q + c is quarter q of quarters[c]
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    pairs[i] = (Vec)((rounded_bits(tile[2 * i]) >> 16) | (rounded_bits(tile[2 * i + 1]) & 0xffff0000u));
  transpose_quarters(pairs, quarters);
#pragma GCC unroll 4
  for (int c = 0; c < 4; ++c) {
    const __m512i of = (__m512i)quarters[c];
    const auto to = [&](int q) { return reinterpret_cast<__m128i*>(rows + (4 * q + c) * kTile); };
    _mm_store_si128(to(0), _mm512_castsi512_si128(of));
    _mm_store_si128(to(1), _mm512_extracti32x4_epi32(of, 1));
    _mm_store_si128(to(2), _mm512_extracti32x4_epi32(of, 2));
    _mm_store_si128(to(3), _mm512_extracti32x4_epi32(of, 3));
  }
}
#else
// rows [kWidth, kTile] = tile [kTile] of kWidth lanes, transposed and rounded
template <typename Out>
static inline void transpose_tile(const Vec (&tile)[kTile], Out* rows) {
  for (int i = 0; i < kTile; ++i) {
    Out rounded[kWidth];
    store(rounded, tile[i]);
    for (int r = 0; r < kWidth; ++r) rows[r * kTile + i] = rounded[r];
  }
}
#endif

// to [live] = from [kTile]; the usual count is a constant for the compiler
template <typename Out>
static inline void copy_features(const Out* from, int64_t live, Out* to) {
  if (live == kTile)
    std::memcpy(to, from, kTile * sizeof(Out));
  else
    std::memcpy(to, from, live * sizeof(Out));
}

// out [rows - first, live] = sums [kTile, lanes]^T, finished
template <typename Out>
static inline void store_tile(const float* sums, int64_t lanes, int64_t first, int64_t rows, int64_t live,
                              const Finish& finish, Out* out, int64_t out_stride) {
  for (int64_t lane = first / kWidth * kWidth; lane < rows; lane += kWidth) {
    Vec tile[kTile];
#pragma GCC unroll 8
    for (int i = 0; i < kTile; ++i) tile[i] = finish(load(sums + i * lanes + lane), i);
    alignas(64) Out rounded[kWidth * kTile];
    transpose_tile(tile, rounded);
    // One row after another: they are often a power of two apart, and out of order they would push each other out of
    // the cache.
    for (int64_t r = lane < first ? first : lane; r < least(rows, lane + kWidth); ++r)
      copy_features(rounded + (r - lane) * kTile, live, out + (r - first) * out_stride);
  }
}

#if defined(__AVX2__)
// ---- the few rows that would leave lanes idle: lanes hold weights as they lie in memory

constexpr int kFours = kTile / 4;  // features of a tile
// Elements that weights are requested ahead, for the L2 cache: the L1 cache waits for few lines at once, and requests
// for it took 1.6 times as long on Zen 4 with one row of 576 bf16.
template <typename T>
constexpr int64_t kFewAhead = 8192 / sizeof(T);

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
#if defined(__AVX512F__)
  // As many bytes as store_totals wrote at once: a longer load would wait until they are in the cache.
  Vec sum = (Vec)_mm512_zextps256_ps512(_mm256_loadu_ps(from));
#else
  Vec sum = load(from);
#endif
  if (finish.biased) sum += load(finish.bias);
  Out rounded[kWidth];
  store(rounded, sum);
  copy_features(rounded, live, to);
}

#if defined(__AVX512F__)
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
      __builtin_prefetch(rows.at[i] + next, 0, 2);
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

// sums [ROWS, kTile] of ROWS rows of words `stride` apart and `live` features: vectors are words of a
// weight row, as they lie in memory
template <typename T, int ROWS>
static void multiply_few(const Word<T>* x, int64_t stride, int64_t in, const T* weight, int64_t live, float* sums) {
  constexpr int64_t kElements = kGroup * kEach<T>;
  const RowStarts<T> tile(weight, in, live);
  Vec acc[ROWS][kFours];
  __m128 totals[ROWS][kFours];
  // 1. A group of words of all features, with all rows
  const auto group = [&](int64_t k, const auto& load) {
    const int64_t element = k * kEach<T>;
    Vec weights[kFours][4], each[4];
    load_quarters(tile, element, element_ahead(in, element + kFewAhead<T>, kTile), load, weights);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      spread_quarters(load_words(x + r * stride + k), each);
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
    for (; k < least(first + kSegment, whole); k += kGroup) group(k, [](const auto* from) { return load_words(from); });
    if (k < least(first + kSegment, words))
      group(k, [&](const auto* from) { return load_some<T>(from, in - k * kEach<T>); });
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int f = 0; f < kFours; ++f) totals[r][f] = add_chains(acc[r][f], first == 0, totals[r][f]);
  }
  store_totals(totals, sums);
}
#else
// Four words of four rows into the order that a chain takes them: out[c] half q = in[.] word 4q + c.
static inline void transpose_halves(const Vec (&in)[4], Vec (&out)[4]) {
  const __m256 a = _mm256_unpacklo_ps((__m256)in[0], (__m256)in[1]),
               b = _mm256_unpackhi_ps((__m256)in[0], (__m256)in[1]),
               c = _mm256_unpacklo_ps((__m256)in[2], (__m256)in[3]),
               d = _mm256_unpackhi_ps((__m256)in[2], (__m256)in[3]);
  out[0] = (Vec)_mm256_unpacklo_pd((__m256d)a, (__m256d)c);
  out[1] = (Vec)_mm256_unpackhi_pd((__m256d)a, (__m256d)c);
  out[2] = (Vec)_mm256_unpacklo_pd((__m256d)b, (__m256d)d);
  out[3] = (Vec)_mm256_unpackhi_pd((__m256d)b, (__m256d)d);
}

// sums += the products with word c of each half of x, in all of the half
template <typename Word>
static inline void add_halves(const Vec (&weights)[4], Vec x, Vec& sums) {
  sums = add_products(weights[0], (Vec)_mm256_permute_ps((__m256)x, 0x00), sums, Word{});
  sums = add_products(weights[1], (Vec)_mm256_permute_ps((__m256)x, 0x55), sums, Word{});
  sums = add_products(weights[2], (Vec)_mm256_permute_ps((__m256)x, 0xaa), sums, Word{});
  sums = add_products(weights[3], (Vec)_mm256_permute_ps((__m256)x, 0xff), sums, Word{});
}

// total (+)= the four chains, one after another
static inline __m128 add_chains(const Vec (&chains)[2], bool first, __m128 total) {
  const __m256 low = (__m256)chains[0], high = (__m256)chains[1];
  total = first ? _mm256_castps256_ps128(low) : _mm_add_ps(total, _mm256_castps256_ps128(low));
  total = _mm_add_ps(total, _mm256_extractf128_ps(low, 1));
  total = _mm_add_ps(total, _mm256_castps256_ps128(high));
  return _mm_add_ps(total, _mm256_extractf128_ps(high, 1));
}

// sums [ROWS, kTile] of ROWS rows of words `stride` apart and `live` features: vectors are words of a
// weight row, as they lie in memory
template <typename T, int ROWS>
static void multiply_few(const Word<T>* x, int64_t stride, int64_t in, const T* weight, int64_t live, float* sums) {
  constexpr int kFoursAtOnce = ROWS <= 2 ? kFours : 1;  // there are registers for
  constexpr int64_t kElements = kGroup * kEach<T>;
  const RowStarts<T> tile(weight, in, live);
  const int64_t words = words_of<T>(in), whole = in / kElements * kGroup;
  __m128 totals[ROWS][kFours];
  for (int four = 0; four < kFours; four += kFoursAtOnce) {
    Vec acc[ROWS][kFoursAtOnce][2];
    // 1. A group of words of some features, with all rows
    const auto group = [&](int64_t k, const auto& words_at) {
      const int64_t next = element_ahead(in, k * kEach<T> + kFewAhead<T>, kTile);
#pragma GCC unroll 2
      for (int f = 0; f < kFoursAtOnce; ++f)
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
          Vec lines[4], weights[4];
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            const T* from = tile.at[4 * (four + f) + i];
            const int64_t element = (k + half * kWidth) * kEach<T>;
            lines[i] = words_at(from + element, element);
            if (half == 0) __builtin_prefetch(from + next, 0, 2);
          }
          transpose_halves(lines, weights);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r)
            add_halves<Word<T>>(weights, load_words(x + r * stride + k + half * kWidth), acc[r][f][half]);
        }
    };
    // 2. Segments, each summed from zero
    for (int64_t first = 0; first < words; first += kSegment) {
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int f = 0; f < kFoursAtOnce; ++f) acc[r][f][0] = acc[r][f][1] = Vec{};
      int64_t k = first;
      for (; k < least(first + kSegment, whole); k += kGroup)
        group(k, [](const T* from, int64_t) { return load_words(from); });
      if (k < least(first + kSegment, words))
        group(k, [&](const T* from, int64_t at) { return load_some<T>(from, in - at); });
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 2
        for (int f = 0; f < kFoursAtOnce; ++f)
          totals[r][four + f] = add_chains(acc[r][f], first == 0, totals[r][four + f]);
    }
  }
  store_totals(totals, sums);
}
#endif
#endif

DFLASH_NAMESPACE_END
