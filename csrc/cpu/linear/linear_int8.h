// The products of linear.cpp with int8 weights: rows of x in 8 bits too, so that the sums are of integers.
//
// Of a row, 256 elements at a time share a scale, the 127th part of their largest magnitude, and are rounded to whole
// multiples of it. The sum of such a group is exact, whatever the instructions and their order; it is multiplied by the
// scale, rounded, and added to those of the groups before it. So the bits of a result are the same with every
// instruction set, and depend on the row and the weights alone.
//
// What is multiplied at once is a word of four bytes (vpdpbusd, AMX), elsewhere a pair of 16-bit integers. vpdpbusd
// takes one operand without a sign: weights are shifted by 128, and sums start at what that adds.
#pragma once
#include "cpu/linear/linear_amx.h"

DFLASH_NAMESPACE_BEGIN

#if DFLASH_TILES || defined(__AVX512VNNI__)
typedef int8_t Quantized;
#else
typedef int16_t Quantized;
#endif
constexpr int64_t kInt8Each = sizeof(uint32_t) / sizeof(Quantized);  // elements in a word
constexpr int64_t kInt8Words = kQuantGroup / kInt8Each;              // of a group
constexpr int64_t kInt8Stride = kInt8Words + kGroup;                 // as kSegmentStride
constexpr int64_t kInt8Ahead = 2 * kQuantGroup;                      // elements: weights are requested that long before
typedef Quantized QuantizedVec __attribute__((vector_size(sizeof(Quantized) * kWidth), aligned(1), may_alias));
typedef int8_t ByteVec __attribute__((vector_size(kInt8Each * kWidth), aligned(1), may_alias));
typedef Quantized WordVec __attribute__((vector_size(4 * kWidth), aligned(1), may_alias));

#if defined(__AVX512VNNI__) && !DFLASH_TILES
constexpr int32_t kShift = 128;
#else
constexpr int32_t kShift = 0;
#endif

static inline IVec load_ints(const void* from) { return *static_cast<const IVec*>(from); }

// The words of kWidth * kInt8Each weights.
static inline IVec load_weights(const int8_t* from) {
  const WordVec words = __builtin_convertvector(*reinterpret_cast<const ByteVec*>(from), WordVec);
  return (IVec)words ^ (kShift ? int32_t(0x80808080) : 0);
}

static inline IVec add_dots(IVec weights, IVec rows, IVec sums) {
#if defined(__AVX512VNNI__)
  return (IVec)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)rows);
#elif defined(__AVX512F__)
  return sums + (IVec)_mm512_madd_epi16((__m512i)weights, (__m512i)rows);
#elif defined(__AVX2__)
  return sums + (IVec)_mm256_madd_epi16((__m256i)weights, (__m256i)rows);
#else
  return sums + ((weights << 16) >> 16) * ((rows << 16) >> 16) + (weights >> 16) * (rows >> 16);
#endif
}

// Rounds a group of a row, `live` elements and zeros, to multiples of its scale. Returns the scale: NaN if not all
// elements are finite, and zero if all are too small to divide by.
template <typename T>
static float quantize_group(const T* from, int64_t live, Quantized* to) {
  alignas(64) T group[kQuantGroup] = {};
  std::memcpy(group, from, least(live, kQuantGroup) * sizeof(T));
  IVec most{};  // as integers, which orders magnitudes, NaN last
  for (int64_t k = 0; k < kQuantGroup; k += kWidth) {
    const Vec x = load(group + k);
    const IVec magnitude = (IVec)x & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  int32_t bits = 0;
  for (int i = 0; i < kWidth; ++i) bits = most[i] > bits ? most[i] : bits;
  float top;
  std::memcpy(&top, &bits, sizeof(top));
  const bool is_finite = bits < 0x7f800000;
  const float inverse = is_finite && top > 1e-30f ? 127.0f / top : 0.0f;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t k = 0; k < kQuantGroup; k += kWidth) {
    const Vec scaled = is_finite ? load(group + k) * inverse + magic : magic;
    const IVec whole = (IVec)scaled - (IVec)magic;
    *reinterpret_cast<QuantizedVec*>(to + k) = __builtin_convertvector(whole, QuantizedVec);
  }
  return is_finite ? (inverse > 0 ? top / 127.0f : 0.0f) : __builtin_nanf("");
}

static inline int32_t sum_group(const Quantized* group) {
  int32_t sum = 0;
  for (int64_t k = 0; k < kQuantGroup; ++k) sum += group[k];
  return sum;
}

// Rows in 8 bits. Those in lanes are also transposed, as many at once as are multiplied at once: words [groups *
// kInt8Words, lanes], scales and starts [groups, lanes].
struct QuantizedRows {
  int64_t rows, all_lanes, in, groups;
  int64_t stride;                 // words from a row to the next
  uint32_t *words, *packed;       // [rows, stride], [all_lanes * groups * kInt8Words]
  float *scales, *packed_scales;  // [rows, groups], [all_lanes * groups]
  int32_t *starts, *packed_starts;

  // What is transposed of some rows.
  struct Lanes {
    uint32_t* words;
    float* scales;
    int32_t* starts;
  };

  QuantizedRows(int64_t rows, int64_t all_lanes, int64_t in)
      : rows(rows), all_lanes(all_lanes), in(in), groups(ceil_div(in, kQuantGroup)) {
    stride = groups * kInt8Words + 32;
  }

  // The words of memory that it takes.
  int64_t size() const { return rows * stride + all_lanes * groups * kInt8Words + 2 * groups * (rows + all_lanes); }

  void place(uint32_t* memory) {
    packed = memory;  // whole lines: it is first, where the memory begins with one
    words = packed + all_lanes * groups * kInt8Words;
    packed_scales = reinterpret_cast<float*>(words + rows * stride);
    packed_starts = reinterpret_cast<int32_t*>(packed_scales + groups * all_lanes);
    scales = reinterpret_cast<float*>(packed_starts + groups * all_lanes);
    starts = reinterpret_cast<int32_t*>(scales + groups * rows);
  }

  // Those that begin with the row of this number.
  Lanes lanes_from(int64_t first) const {
    return {packed + first * groups * kInt8Words, packed_scales + first * groups, packed_starts + first * groups};
  }

  // Rounds rows of x.
  template <typename T>
  void round(const T* x) {
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t g = 0; g < groups; ++g) {
        auto* to = reinterpret_cast<Quantized*>(words + r * stride + g * kInt8Words);
        scales[r * groups + g] = quantize_group(x + r * in + g * kQuantGroup, in - g * kQuantGroup, to);
        starts[r * groups + g] = kShift ? -kShift * sum_group(to) : 0;
      }
  }

  // Transposes `count` rows from `first`; lanes after them are zero.
  void transpose(int64_t first, int64_t count, int64_t lanes) {
    const Lanes to = lanes_from(first);
    transpose_rows(count, groups * kInt8Words, lanes, reinterpret_cast<float*>(to.words),
                   [&](int64_t r, int64_t k) { return (Vec)load_ints(words + (first + r) * stride + k); });
    for (int64_t g = 0; g < groups; ++g)
      for (int64_t r = 0; r < lanes; ++r) {
        to.scales[g * lanes + r] = r < count ? scales[(first + r) * groups + g] : 0.0f;
        to.starts[g * lanes + r] = r < count ? starts[(first + r) * groups + g] : 0;
      }
  }
};

// Words of a group of a tile's rows, of which `left` elements exist; past the end of the matrix its last row again,
// whose sums are dropped.
static inline void copy_group(const int8_t* weight, int64_t in, int64_t live, int64_t left, uint32_t* copied) {
  for (int i = 0; i < kTile; ++i) {
    const int8_t* from = weight + least(i, live - 1) * in;
    int8_t some[kQuantGroup] = {};
    if (left < kQuantGroup) from = static_cast<const int8_t*>(std::memcpy(some, from, left));
#pragma GCC unroll 8
    for (int64_t k = 0; k < kInt8Words; k += kWidth)
      *reinterpret_cast<IVec*>(copied + i * kInt8Stride + k) = load_weights(from + k * kInt8Each);
  }
}

// sums [TILE, NV vectors] += copied [TILE, words] packed [words, NV vectors], of one group. Meanwhile one at `next`
// comes from memory.
template <int NV, int TILE>
__attribute__((noinline)) static void multiply_group(const uint32_t* copied, const uint32_t* packed, int64_t words,
                                                     const float* scales, const int32_t* starts, float* sums,
                                                     const int8_t* next, int64_t in) {
  IVec acc[TILE][NV];
#pragma GCC unroll 32
  for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[i][v] = load_ints(starts + v * kWidth);
  for (int64_t k = 0; k < words; k += kGroup) {
#pragma GCC unroll 8
    for (int i = 0; i < TILE; ++i) __builtin_prefetch(next + k * kInt8Each + i * in, 0, 2);
#pragma GCC unroll 4
    for (int64_t j = k; j < k + kGroup; ++j) {
      IVec x[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) x[v] = load_ints(packed + (j * NV + v) * kWidth);
#pragma GCC unroll 32
      for (int i = 0; i < TILE; ++i) {
        const IVec w = IVec{} + int32_t(copied[i * kInt8Stride + j]);
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[i][v] = add_dots(w, x[v], acc[i][v]);
      }
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      float* at = sums + (i * NV + v) * kWidth;
      store(at, load(at) + __builtin_convertvector(acc[i][v], Vec) * load(scales + v * kWidth));
    }
}

// sums [kTile, NV vectors of rows] of `live` features
template <int NV>
static void multiply_int8_in_lanes(const QuantizedRows::Lanes& rows, int64_t in, const int8_t* weight, int64_t live,
                                   float* sums) {
  constexpr int64_t lanes = NV * kWidth;
  alignas(64) uint32_t copied[kTile * kInt8Stride];
  std::memset(sums, 0, kTile * lanes * sizeof(float));
  for (int64_t g = 0; g * kQuantGroup < in; ++g) {
    const int64_t k = g * kQuantGroup, left = least(kQuantGroup, in - k);
    const int64_t words = (left + kGroup * kInt8Each - 1) / (kGroup * kInt8Each) * kGroup;
    copy_group(weight + k, in, live, left, copied);
    const int8_t* next = weight + element_ahead(in, k + kInt8Ahead, kTile);
    for (int i = 0; i < kTile; i += kAtOnce<NV>)
      multiply_group<NV, kAtOnce<NV>>(copied + i * kInt8Stride, rows.words + g * kInt8Words * lanes, words,
                                      rows.scales + g * lanes, rows.starts + g * lanes, sums + i * lanes, next + i * in,
                                      in);
  }
}

#if DFLASH_TILES
// The same on AMX tiles, as linear_amx.h multiplies bf16: a group's sums leave the tiles after each group, for its
// scale.
template <int NV, int TILE>
static void multiply_int8_block(const QuantizedRows::Lanes& rows, int64_t in, const int8_t* weight, int64_t live,
                                float* sums) {
  constexpr int64_t lanes = NV * kWidth;
  alignas(64) int32_t whole[TILE * lanes];
  std::memset(sums, 0, TILE * lanes * sizeof(float));
  for (int64_t g = 0; g * kQuantGroup < in; ++g) {
    zero_sums<NV, TILE>();
    for (int64_t k = g * kQuantGroup; k < least(in, (g + 1) * kQuantGroup); k += kTileBytes) {
      prefetch_weights<TILE>(weight, in, k, kInt8Ahead);
      add_tile_products<int8_t, NV, TILE>(weight + k, in, live, in - k, rows.words + k / kInt8Each * lanes);
    }
    store_sums<NV, TILE>(whole);
    for (int64_t i = 0; i < TILE; ++i)
      for (int64_t at = i * lanes, v = 0; v < NV; ++v, at += kWidth)
        store(sums + at, load(sums + at) + __builtin_convertvector(load_ints(whole + at), Vec) *
                                               load(rows.scales + g * lanes + v * kWidth));
  }
}
#elif defined(__AVX512F__)
// total + scale * (the four chains + start)
static inline __m128 add_group(IVec chains, __m128i start, __m128 scale, __m128 total) {
  const __m512i all = (__m512i)chains;
  const __m128i low = _mm_add_epi32(_mm512_extracti32x4_epi32(all, 0), _mm512_extracti32x4_epi32(all, 1)),
                high = _mm_add_epi32(_mm512_extracti32x4_epi32(all, 2), _mm512_extracti32x4_epi32(all, 3));
  const __m128i sum = _mm_add_epi32(_mm_add_epi32(low, high), start);
  return _mm_add_ps(total, _mm_mul_ps(_mm_cvtepi32_ps(sum), scale));
}

// sums [ROWS, kTile] of `count` rows from `first`, as multiply_few
template <int ROWS>
static void multiply_few_int8(const QuantizedRows& rows, int64_t first, int64_t count, int64_t in, const int8_t* weight,
                              int64_t live, float* sums) {
  constexpr int64_t kElements = kGroup * kInt8Each;
  int64_t row[ROWS];
  for (int r = 0; r < ROWS; ++r) row[r] = first + least(r, count - 1);
  const RowStarts<int8_t> tile(weight, in, live);
  IVec acc[ROWS][kFours];
  __m128 totals[ROWS][kFours] = {};
  // 1. 16 words of all features, with all rows
  const auto block = [&](int64_t k, const auto& load) {
    Vec weights[kFours][4], each[4];
    load_quarters(tile, k, element_ahead(in, k + kInt8Ahead, kTile), load, weights);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      spread_quarters((Vec)load_ints(rows.words + row[r] * rows.stride + k / kInt8Each), each);
#pragma GCC unroll 4
      for (int c = 0; c < 4; ++c)
#pragma GCC unroll 4
        for (int f = 0; f < kFours; ++f) acc[r][f] = add_dots((IVec)weights[f][c], (IVec)each[c], acc[r][f]);
    }
  };
  // 2. Groups, each summed from zero
  for (int64_t g = 0; g < rows.groups; ++g) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int f = 0; f < kFours; ++f) acc[r][f] = IVec{};
    int64_t k = g * kQuantGroup;
    const int64_t end = least(in, k + kQuantGroup);
    for (; k + kElements <= end; k += kElements) block(k, [](const int8_t* from) { return (Vec)load_weights(from); });
    if (k < end)
      block(k, [&](const int8_t* from) {
        int8_t some[kElements] = {};
        std::memcpy(some, from, end - k);
        return (Vec)load_weights(some);
      });
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
      const __m128 scale = _mm_set1_ps(rows.scales[row[r] * rows.groups + g]);
      const __m128i start = _mm_set1_epi32(rows.starts[row[r] * rows.groups + g]);
#pragma GCC unroll 4
      for (int f = 0; f < kFours; ++f) totals[r][f] = add_group(acc[r][f], start, scale, totals[r][f]);
    }
  }
  store_totals(totals, sums);
}
#elif defined(__AVX2__)
// The sums of four vectors.
static inline __m128i sums_of(const IVec* four) {
  const __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32((__m256i)four[0], (__m256i)four[1]),
                                          _mm256_hadd_epi32((__m256i)four[2], (__m256i)four[3]));
  return _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

// sums [ROWS, kTile] of `count` rows from `first`, as multiply_few; two rows at once.
template <int ROWS>
static void multiply_few_int8(const QuantizedRows& rows, int64_t first, int64_t count, int64_t in, const int8_t* weight,
                              int64_t live, float* sums) {
  if constexpr (ROWS > 2) {
    multiply_few_int8<2>(rows, first, 2, in, weight, live, sums);
    multiply_few_int8<ROWS - 2>(rows, first + 2, most(1, count - 2), in, weight, live, sums + 2 * kTile);
  } else {
    constexpr int64_t kElements = kWidth * kInt8Each;
    const RowStarts<int8_t> tile(weight, in, live);
    for (int four = 0; four < kTile; four += 4) {
      __m128 totals[ROWS] = {};
      for (int64_t g = 0; g < rows.groups; ++g) {
        // 1. The sums of a group, of four features with all rows
        IVec acc[ROWS][4] = {};
        const auto block = [&](int64_t k, const auto& weights_at) {
          const int64_t next = element_ahead(in, k + kInt8Ahead, kTile);
          IVec x[ROWS];
          for (int r = 0; r < ROWS; ++r)
            x[r] = load_ints(rows.words + (first + least(r, count - 1)) * rows.stride + k / kInt8Each);
#pragma GCC unroll 4
          for (int i = 0; i < 4; ++i) {
            const int8_t* from = tile.at[four + i];
            const IVec w = weights_at(from + k);
            __builtin_prefetch(from + next);
            for (int r = 0; r < ROWS; ++r) acc[r][i] = add_dots(w, x[r], acc[r][i]);
          }
        };
        int64_t k = g * kQuantGroup;
        const int64_t end = least(in, k + kQuantGroup);
        for (; k + kElements <= end; k += kElements) block(k, [](const int8_t* from) { return load_weights(from); });
        if (k < end)
          block(k, [&](const int8_t* from) {
            int8_t some[kElements] = {};
            std::memcpy(some, from, end - k);
            return load_weights(some);
          });
        // 2. Add them to the totals, times the scale
        for (int r = 0; r < ROWS; ++r) {
          const __m128 scale = _mm_set1_ps(rows.scales[(first + least(r, count - 1)) * rows.groups + g]);
          totals[r] = _mm_add_ps(totals[r], _mm_mul_ps(_mm_cvtepi32_ps(sums_of(acc[r])), scale));
        }
      }
      for (int r = 0; r < ROWS; ++r) _mm_storeu_ps(sums + r * kTile + four, totals[r]);
    }
  }
}
#endif

DFLASH_NAMESPACE_END
