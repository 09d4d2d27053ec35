// The format kW8A8 of linear.cpp, int8 weights on CPUs: rows of x in 8 bits too, so that the sums are of integers.
//
// Of a row, kQuantGroup elements at a time share a scale, the 127th part of their largest magnitude, and are rounded to
// whole multiples of it. The sum of such a group is exact, whatever the instructions and their order; it is multiplied
// by the scale, rounded, and added to those of the groups before it. So the bits of a result are the same with every
// instruction set, and depend on the row and the weights alone.
//
// Weights are copies of our own (PackedWeight), in one order for all instruction sets: of a tile of 16 features the
// words of four elements alternate, and 128 is added to each. So vectors hold features, one word of a row is broadcast
// to all, and a tile is read from its first byte to its last. vpdpbusd, usdot and AMX multiply a word at once, its
// weights without a sign, and sdot one with a sign, so that 128 is taken off again; elsewhere its even and its odd
// elements are pairs of 16-bit integers. Sums start at what 128 adds.
#pragma once
#include "cpu/linear/blocks.h"
#include "cpu/linear/linear_amx.h"

DFLASH_NAMESPACE_BEGIN

constexpr int kInt8Vecs = kQuantTile / kWidth;            // its vectors
constexpr int kInt8Words = kQuantGroup / 4;               // of a group
constexpr int64_t kInt8Group = kQuantGroup * kQuantTile;  // bytes of a tile's group
constexpr int64_t kInt8Ahead = 8192, kInt8Soon = 1024;    // bytes: weights are in the L2 and L1 cache so early
constexpr int kShift = 128;
static_assert(row_size(Format::kW8A8, 1) == kQuantGroup, "rows of weights are whole groups");
#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define DFLASH_DOTS 1
#endif
#if DFLASH_TILES || DFLASH_DOTS
constexpr int kWordParts = 1;
#else
constexpr int kWordParts = 2;  // a group has its words' even elements in 16 bits, then the odd ones
#endif
// Rows that a tile is multiplied with at once: a tile register, or as many as there are vector registers for the
// integers and the totals of. Of two tiles with half as many rows, Zen 4 multiplies a fifth less in the same time.
constexpr int kInt8Rows = kHasTiles ? 16 : kWidth == 16 ? 8 : kWidth == 8 ? 4 : kOnArm ? 4 : 2;
typedef int8_t ByteVec __attribute__((vector_size(kWidth), aligned(1), may_alias));
typedef int16_t PairVec __attribute__((vector_size(4 * kWidth), aligned(1), may_alias));

static inline IVec load_ints(const void* from) { return *static_cast<const IVec*>(from); }

// What is taken off codes of 8 bits before they are multiplied: sdot has no bytes without a sign.
#if defined(__ARM_FEATURE_DOTPROD) && !defined(__ARM_FEATURE_MATMUL_INT8)
constexpr int kTakenOff = kShift;
#else
constexpr int kTakenOff = 0;
#endif

#if DFLASH_DOTS
// sum + the products of words of four bytes. Those of `codes` have no sign; if they may have 8 bits, less kTakenOff.
template <bool MAY_BE_LARGE = true>
static inline IVec add_bytes(IVec sum, IVec codes, IVec row) {
#if defined(__AVX512VNNI__)
  return (IVec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)codes, (__m512i)row);
#elif defined(__AVXVNNI__)
  return (IVec)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)codes, (__m256i)row);
#elif defined(__ARM_FEATURE_MATMUL_INT8)
  return (IVec)vusdotq_s32((int32x4_t)sum, (uint8x16_t)codes, (int8x16_t)row);
#else
  const IVec signed_codes = MAY_BE_LARGE ? codes ^ int32_t(0x80808080) : codes;
  return (IVec)vdotq_s32((int32x4_t)sum, (int8x16_t)signed_codes, (int8x16_t)row);
#endif
}

// The same with word W of a row's group.
template <bool MAY_BE_LARGE, int W>
static inline IVec add_word(IVec sum, IVec codes, const uint32_t* row) {
#if defined(__aarch64__)
  const int8x16_t four = (int8x16_t)vld1q_u32(row + W / 4 * 4);  // one load for four words
#if defined(__ARM_FEATURE_MATMUL_INT8)
  return (IVec)vusdotq_laneq_s32((int32x4_t)sum, (uint8x16_t)codes, four, W % 4);
#else
  const IVec signed_codes = MAY_BE_LARGE ? codes ^ int32_t(0x80808080) : codes;
  return (IVec)vdotq_laneq_s32((int32x4_t)sum, (int8x16_t)signed_codes, four, W % 4);
#endif
#else
  return add_bytes<MAY_BE_LARGE>(sum, codes, IVec{} + int32_t(row[W]));
#endif
}
#endif

// smmla: two rows at once
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define DFLASH_MATMUL 1
constexpr bool kInPairs = true;

// Two adjacent words of four features, in the order of two operands: two features each, eight bytes of one together.
struct TwoWords {
  uint8x16_t low, high;

  TwoWords(IVec first, IVec second)
      : low((uint8x16_t)vzip1q_s32((int32x4_t)first, (int32x4_t)second)),
        high((uint8x16_t)vzip2q_s32((int32x4_t)first, (int32x4_t)second)) {}
};

// sum [two features, two rows] + products. `words`: two of the one row, then of the other.
static inline IVec add_pair(IVec sum, uint8x16_t codes, uint32x4_t words) {
  return (IVec)vusmmlaq_s32((int32x4_t)sum, codes, (int8x16_t)words);
}

// The sums of products of two rows with four features.
struct PairDots {
  IVec low{}, high{};

  void add(const TwoWords& codes, uint32x4_t words) {
    low = add_pair(low, codes.low, words);
    high = add_pair(high, codes.high, words);
  }
  IVec first() const { return (IVec)vuzp1q_s32((int32x4_t)low, (int32x4_t)high); }
  IVec second() const { return (IVec)vuzp2q_s32((int32x4_t)low, (int32x4_t)high); }
};
#else
constexpr bool kInPairs = false;
#endif

#if defined(__AVX512F__)
static inline int32_t largest_of(IVec x) { return _mm512_reduce_max_epi32((__m512i)x); }
static inline int32_t sum_of(IVec x) { return _mm512_reduce_add_epi32((__m512i)x); }
#elif defined(__aarch64__)
static inline int32_t largest_of(IVec x) { return vmaxvq_s32((int32x4_t)x); }
static inline int32_t sum_of(IVec x) { return vaddvq_s32((int32x4_t)x); }
#else
static inline int32_t largest_of(IVec x) {
  int32_t largest = x[0];
  for (int i = 1; i < kWidth; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}
static inline int32_t sum_of(IVec x) {
  int32_t sum = 0;
  for (int i = 0; i < kWidth; ++i) sum += x[i];
  return sum;
}
#endif

// bytes [SIZE] = elements as multiples of `scale`, a 127th of their largest magnitude, and the sums of 16 each. The
// scale is zero if all are too small to divide by, NaN if not all are finite.
template <int SIZE, typename T>
static inline void round_to_bytes(const T* from, int8_t* bytes, float& scale, int32_t (&sums)[SIZE / 16]) {
  IVec most{};  // as integers, which orders magnitudes, NaN last
  for (int k = 0; k < SIZE; k += kWidth) {
    const IVec magnitude = (IVec)load(from + k) & 0x7fffffff;
    most = magnitude > most ? magnitude : most;
  }
  const int32_t bits = largest_of(most);
  float top;
  std::memcpy(&top, &bits, sizeof(top));
  const bool is_finite = bits < 0x7f800000;
  const float inverse = is_finite && top > 1e-30f ? 127.0f / top : 0.0f;
  const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  for (int i = 0; i < SIZE / 16; ++i) {
    IVec sum{};
    for (int k = 16 * i; k < 16 * (i + 1); k += kWidth) {
      const Vec scaled = is_finite ? load(from + k) * inverse + magic : magic;
      const IVec whole = (IVec)scaled - (IVec)magic;
      sum += whole;
      *reinterpret_cast<ByteVec*>(bytes + k) = __builtin_convertvector(whole, ByteVec);
    }
    sums[i] = sum_of(sum);
  }
  scale = is_finite ? (inverse > 0 ? top / 127.0f : 0.0f) : __builtin_nanf("");
}

// Rows in 8 bits, padded with zeros to whole groups. Those that are multiplied at once make up a block: the first group
// of each row, then the second of each.
struct QuantizedRows {
  // A block of rows. With AMX all blocks have kInt8Rows, some of them undefined.
  struct Block {
    int64_t rows;
    uint32_t* words;  // [groups, rows, kInt8Words * kWordParts]
    float* scales;    // [groups, rows]: NaN where not all elements are finite
    int32_t* starts;  // [groups, rows]: minus what the shift of the weights adds to the sum
  };

  int64_t rows, padded, groups;
  uint32_t* words;
  float* scales;
  int32_t* starts;

  QuantizedRows(int64_t rows, int64_t in) : rows(rows), groups(ceil_div(in, kQuantGroup)) {
    padded = kHasTiles ? ceil_div(rows, kInt8Rows) * kInt8Rows : rows;
  }

  // The words of memory that it takes.
  int64_t size() const { return padded * groups * (kInt8Words * kWordParts + 2); }

  void place(uint32_t* memory) {
    words = memory;
    scales = reinterpret_cast<float*>(words + padded * groups * kInt8Words * kWordParts);
    starts = reinterpret_cast<int32_t*>(scales + padded * groups);
  }

  // That of this row, which is its first.
  Block block(int64_t row) const {
    const int64_t at = row * groups;
    return {least(kInt8Rows, padded - row), words + at * kInt8Words * kWordParts, scales + at, starts + at};
  }

  template <typename T>
  void round(const T* x, int64_t in) {
    for (int64_t r = 0; r < rows; ++r) {
      const Block to = block(r / kInt8Rows * kInt8Rows);
      for (int64_t g = 0, k = 0, at = r % kInt8Rows; g < groups; ++g, k += kQuantGroup, at += to.rows) {
        const T* from = x + r * in + k;
        T some[kQuantGroup];
        if (in - k < kQuantGroup) {
          std::memset(some, 0, sizeof(some));
          from = static_cast<const T*>(std::memcpy(some, from, (in - k) * sizeof(T)));
        }
        round_group(from, to.words + at * kInt8Words * kWordParts, to.scales[at], to.starts[at]);
      }
    }
  }

 private:
  template <typename T>
  static void round_group(const T* from, uint32_t* to, float& scale, int32_t& start) {
    alignas(64) int8_t own[kQuantGroup];
    int8_t* bytes = kWordParts == 1 ? reinterpret_cast<int8_t*>(to) : own;
    int32_t sums[kQuantGroup / 16];
    round_to_bytes<kQuantGroup>(from, bytes, scale, sums);
    for (int k = 0; kWordParts == 2 && k < kInt8Words; k += kWidth) {
      const PairVec pairs = *reinterpret_cast<const PairVec*>(bytes + 4 * k);
      *reinterpret_cast<PairVec*>(to + k) = (pairs << 8) >> 8;
      *reinterpret_cast<PairVec*>(to + kInt8Words + k) = pairs >> 8;
    }
    start = (kTakenOff - kShift) * (sums[0] + sums[1] + sums[2] + sums[3]);
  }
};

// to [groups of kInt8Group] = a tile of `live` features, padded with others of zeros
static inline void copy_int8_tile(const uint8_t* tile, int64_t groups, int64_t live, uint8_t* to) {
  std::memset(to, 0, groups * kInt8Group);
  for (int64_t word = 0; word < groups * kInt8Words; ++word, tile += 4 * live, to += 4 * kQuantTile)
    std::memcpy(to, tile, 4 * live);
}

static inline Vec add_group(Vec total, IVec sum, float scale) {
  return total + __builtin_convertvector(sum, Vec) * scale;
}

#if DFLASH_TILES
// sums [kInt8Rows, kQuantTile] of a block and a whole tile. On AMX tiles a group of the rows is one operand and a group
// of weights the other, and its sums leave the registers after each group, for the scales.
static void multiply_int8(const QuantizedRows::Block& rows, int64_t groups, const uint8_t* tile, float* sums) {
  constexpr int kAtOnce = 4;  // groups
  static_assert(kInt8Words == kTileWords && kQuantTile == kTileRows && kInt8Rows == kTileRows);
  alignas(64) int32_t whole[kAtOnce][kInt8Rows * kQuantTile];
  std::memset(sums, 0, kInt8Rows * kQuantTile * sizeof(float));
  for (int64_t g = 0; g < groups; g += kAtOnce) {
    const int64_t count = least(kAtOnce, groups - g);
    unroll<kAtOnce>([&](auto i) {
      constexpr int kRows = 4 + i % 2, kWeights = 6 + i % 2;
      if (i >= count) return;
      const uint8_t* weights = tile + (g + i) * kInt8Group;
      for (int line = 0; line < kTileRows; ++line) __builtin_prefetch(weights + kInt8Soon + line * kTileBytes);
      tile_zero<i>();
      tile_load<kRows>(rows.words + (g + i) * kInt8Rows * kInt8Words, kTileBytes);
      tile_stream<kWeights>(weights, kTileBytes);
      tile_multiply_int8<i, kRows, kWeights>();
      tile_store<i>(whole[i], kTileBytes);
    });
    for (int64_t i = 0; i < count; ++i)
      for (int64_t r = 0, at = (g + i) * kInt8Rows; r < kInt8Rows; ++r, ++at) {
        float* sum = sums + r * kQuantTile;
        store(sum, add_group(load(sum), load_ints(whole[i] + r * kQuantTile) + rows.starts[at], rows.scales[at]));
      }
  }
}
#else
// sum + the products of a word of kWidth features with a row's, which is in kWordParts vectors
static inline IVec add_words(IVec weights, const IVec (&row)[kWordParts], IVec sum) {
#if DFLASH_DOTS
  return add_bytes(sum, weights, row[0]);
#else
  const IVec even = weights & 0x00ff00ff, odd = (weights >> 8) & 0x00ff00ff;
#if defined(__AVX512F__)
  return sum + ((IVec)_mm512_madd_epi16((__m512i)even, (__m512i)row[0]) +
                (IVec)_mm512_madd_epi16((__m512i)odd, (__m512i)row[1]));
#elif defined(__AVX2__)
  return sum + ((IVec)_mm256_madd_epi16((__m256i)even, (__m256i)row[0]) +
                (IVec)_mm256_madd_epi16((__m256i)odd, (__m256i)row[1]));
#elif defined(__SSE2__)
  return sum +
         ((IVec)_mm_madd_epi16((__m128i)even, (__m128i)row[0]) + (IVec)_mm_madd_epi16((__m128i)odd, (__m128i)row[1]));
#else
  const auto dots = [](IVec a, IVec b) { return (a & 0xffff) * ((b << 16) >> 16) + (a >> 16) * (b >> 16); };
  return sum + dots(even, row[0]) + dots(odd, row[1]);
#endif
#endif
}

// sums [ROWS, kQuantTile] of a block of so many rows and a whole tile
template <int ROWS>
__attribute__((noinline)) static void multiply_int8_rows(const QuantizedRows::Block& rows, int64_t groups,
                                                         const uint8_t* tile, float* sums) {
  constexpr int kRow = kInt8Words * kWordParts;  // words of a row's group
  const uint32_t* words = rows.words;
  Vec total[ROWS][kInt8Vecs] = {};
  for (int64_t g = 0; g < groups; ++g, words += ROWS * kRow - kInt8Words) {
    const float* scales = rows.scales + g * ROWS;
    const int32_t* starts = rows.starts + g * ROWS;
    IVec sum[ROWS][kInt8Vecs];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kInt8Vecs; ++v) sum[r][v] = IVec{} + starts[r];
#if DFLASH_MATMUL
    if constexpr (ROWS % 2 == 0) {
      PairDots both[ROWS / 2][kInt8Vecs];
#pragma GCC unroll 2
      for (int k = 0; k < kInt8Words; k += 2, words += 2, tile += 8 * kQuantTile) {
        __builtin_prefetch(tile + kInt8Ahead, 0, 2);
        __builtin_prefetch(tile + kInt8Soon);
#pragma GCC unroll 4
        for (int v = 0; v < kInt8Vecs; ++v) {
          const TwoWords some(load_ints(tile + v * 4 * kWidth), load_ints(tile + 4 * kQuantTile + v * 4 * kWidth));
#pragma GCC unroll 4
          for (int r = 0; r < ROWS; r += 2) {
            const uint32x4_t two = vcombine_u32(vld1_u32(words + r * kRow), vld1_u32(words + (r + 1) * kRow));
            both[r / 2][v].add(some, two);
          }
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; r += 2)
#pragma GCC unroll 4
        for (int v = 0; v < kInt8Vecs; ++v) {
          sum[r][v] += both[r / 2][v].first();
          sum[r + 1][v] += both[r / 2][v].second();
        }
    } else
#endif
#pragma GCC unroll 4
      for (int k = 0; k < kInt8Words; ++k, ++words, tile += 4 * kQuantTile) {
        __builtin_prefetch(tile + kInt8Ahead, 0, 2);
        __builtin_prefetch(tile + kInt8Soon);
        IVec weights[kInt8Vecs];
#pragma GCC unroll 4
        for (int v = 0; v < kInt8Vecs; ++v) weights[v] = load_ints(tile + v * 4 * kWidth);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
          IVec row[kWordParts];
#pragma GCC unroll 2
          for (int p = 0; p < kWordParts; ++p) row[p] = IVec{} + int32_t(words[r * kRow + p * kInt8Words]);
#pragma GCC unroll 4
          for (int v = 0; v < kInt8Vecs; ++v) sum[r][v] = add_words(weights[v], row, sum[r][v]);
        }
      }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < kInt8Vecs; ++v) total[r][v] = add_group(total[r][v], sum[r][v], scales[r]);
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kInt8Vecs; ++v) store(sums + r * kQuantTile + v * kWidth, total[r][v]);
}

template <int ROWS = kInt8Rows>
static void multiply_int8(const QuantizedRows::Block& rows, int64_t groups, const uint8_t* tile, float* sums) {
  if constexpr (ROWS > 1)
    if (rows.rows < ROWS) return multiply_int8<ROWS - 1>(rows, groups, tile, sums);
  multiply_int8_rows<ROWS>(rows, groups, tile, sums);
}
#endif

// out [live] = the sums of a row and a tile, times the features' scales, plus their bias, each if there are any
template <typename Out>
static inline void finish_int8(const float* sums, const float* scales, const float* bias, int64_t live, Out* out) {
  Out rounded[kQuantTile];
  for (int i = 0; i < kQuantTile; i += kWidth) {
    const Vec sum = load(sums + i), scaled = scales ? sum * load(scales + i) : sum;
    store(rounded + i, bias ? scaled + load(bias + i) : scaled);
  }
  if (live == kQuantTile)
    std::memcpy(out, rounded, sizeof(rounded));
  else
    std::memcpy(out, rounded, live * sizeof(Out));
}

DFLASH_NAMESPACE_END
