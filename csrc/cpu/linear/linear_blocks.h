// Weights in the blocks of files, 4 to 8 bits, on CPUs: rows of x in 8 bits, so that the sums are of integers.
//
// Of a row, kBlockGroup adjacent elements share a scale, the 127th part of their largest magnitude. Per group, in this
// order, whatever the instruction set and the number of rows:
//   sum = the products of codes and rounded elements, less the codes' offset or zero point (blocks.h): exact
//   total = fma(sum, scale of the weight * scale of the row, rounded, total)
//   total = fma(minimum, scale of the row * the sum of its integers, rounded, total), if the format has minima
// In kQ6_K sums are of 16 columns. A scale of the weight is the file's number; in the formats of 256 columns that times
// an integer of at most 8 bits, an exact product in float. A minimum is such a number negated.
#pragma once
#include "cpu/linear/blocks.h"
#include "cpu/linear/linear_int8.h"

DFLASH_NAMESPACE_BEGIN

constexpr int kSegmentColumns = 512;  // of a tile: all rows are multiplied with one before the next

// ---- rows in 8 bits

// Rows that are multiplied at once: as many as there are vector registers for the sums and the totals of. AMX tiles are
// not used: sums leave them after 32 columns, and what scales and adds these takes as long as VNNI's products.
constexpr int kBlockRows = kWidth == 16 || kOnArm ? 8 : kWidth == 8 ? 4 : 2;
constexpr int64_t padded_rows(int64_t rows) { return rows == 1 ? 1 : (rows + 1) / 2 * 2; }

// What formats take off a sum: offset * the sum of the row's integers, negated. By 1 zero points are multiplied.
constexpr int kOffsets[] = {1, 8, 16, 128};

// Rows in 8 bits, padded with zeros to whole chunks. Blocks of rows that are multiplied at once, the last padded with
// rows of zeros to a number of rows that the kernels have.
struct BlockRows {
  static constexpr int kWords = kBlockGroupWords + 8;  // of a row's group

  struct Block {
    int64_t rows, groups;
    uint32_t* words;  // [groups, rows, kBlockGroupWords], with smmla in pairs of rows, see join_pair

    float* scales() const { return reinterpret_cast<float*>(words + rows * groups * kBlockGroupWords); }
    float* wide() const { return scales() + rows * groups; }  // scales * sums
    int32_t* starts(int i) const { return reinterpret_cast<int32_t*>(wide()) + (i + 1) * rows * groups; }
    int32_t* halves() const { return starts(4); }  // [groups, rows, 2]: of 16 elements, for the offset 32

    template <Format F>
    const int32_t* starts_of() const {
      constexpr int kOffset = blocks_of(F).offset;
      constexpr int kAt = kOffset == 128 ? 3 : kOffset == 16 ? 2 : kOffset == 8 ? 1 : 0;
      static_assert(kOffset == 0 || kOffset == 32 || kOffset == kOffsets[kAt], "kOffsets");
      return kOffset == 32 ? halves() : starts(kAt);
    }
  };

  int64_t rows, groups;
  uint32_t* words;

  BlockRows(int64_t rows, int64_t in) : rows(rows), groups(ceil_div(in, 256) * 8) {}

  // The words of memory that it takes.
  int64_t size() const {
    const int64_t whole = rows / kBlockRows * kBlockRows, last = rows - whole;
    return (whole + (last ? padded_rows(last) : 0)) * groups * kWords;
  }

  void place(uint32_t* memory) { words = memory; }

  // The words of a row's group and the next row's: two of the one, then two of the other.
  static void join_pair(uint32_t* words) {
    uint32_t apart[2][kBlockGroupWords];
    std::memcpy(apart, words, sizeof(apart));
    for (int w = 0; w < kBlockGroupWords; w += 2, words += 4) {
      std::memcpy(words, apart[0] + w, 8);
      std::memcpy(words + 2, apart[1] + w, 8);
    }
  }

  // That of this row, which is its first.
  Block block(int64_t row) const {
    return {padded_rows(least(kBlockRows, rows - row)), groups, words + row * groups * kWords};
  }

  template <typename T>
  void round(const T* x, int64_t in) {
    for (int64_t first = 0; first < rows; first += kBlockRows) {
      const Block to = block(first);
      for (int64_t r = 0; r < to.rows; ++r)
        for (int64_t g = 0; g < groups; ++g) {
          const int64_t k = g * kBlockGroup, left = first + r < rows ? in - k : 0;
          const T* from = x + (first + r) * in + k;
          T some[kBlockGroup];
          if (left < kBlockGroup) {
            std::memset(some, 0, sizeof(some));
            if (left > 0) std::memcpy(some, from, left * sizeof(T));
            from = some;
          }
          const int64_t at = g * to.rows + r;
          int32_t sums[2];
          uint32_t* words = to.words + at * kBlockGroupWords;
          round_to_bytes<kBlockGroup>(from, reinterpret_cast<int8_t*>(words), to.scales()[at], sums);
          if (kInPairs && r % 2) join_pair(words - kBlockGroupWords);
          const int32_t sum = sums[0] + sums[1];
          to.wide()[at] = to.scales()[at] * float(sum);
          for (int i = 0; i < 4; ++i) to.starts(i)[at] = -kOffsets[i] * sum;
          for (int i = 0; i < 2; ++i) to.halves()[2 * at + i] = -32 * sums[i];
        }
    }
  }
};

typedef uint8_t ByteLine __attribute__((vector_size(4 * kWidth), aligned(1), may_alias));

// ---- codes, scales and minima of a vector of features: the v-th of a tile

static inline Vec load_halves(const void* from) {
#if defined(__AVX512F__)
  return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
#elif defined(__F16C__)
  return (Vec)_mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
#elif defined(__aarch64__)
  return (Vec)vcvt_f32_f16(vld1_f16(static_cast<const __fp16*>(from)));
#else
  const UVec half = __builtin_convertvector(*static_cast<const HVec*>(from), UVec);
  const UVec magnitude = (half & 0x7fff) << 13, exponent = half & 0x7c00, bias = UVec{} + (112u << 23);
  const UVec is_zero = (UVec)(exponent == 0), is_top = (UVec)(exponent == 0x7c00);
  const Vec small = (Vec)(magnitude + bias + (1u << 23)) - (Vec)(bias + (1u << 23));  // subnormal: exact
  const UVec large = magnitude + bias + (is_top & bias);
  return (Vec)(((UVec)small & is_zero) | (large & ~is_zero) | ((half & 0x8000) << 16));
#endif
}

// Byte i of each feature's word.
static inline IVec load_bytes(const uint8_t* line, int i, int v) {
  return load_ints(line + v * 4 * kWidth) >> 8 * i & 0xff;
}

// What codes of 4 bits stand for.
static inline UVec look_up(const uint8_t* table, UVec codes) {
#if defined(__AVX512BW__)
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (UVec)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(values), (__m512i)codes);
#elif defined(__AVX2__)
  const __m128i values = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  return (UVec)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(values), (__m256i)codes);
#elif defined(__aarch64__)
  return (UVec)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)codes);
#else
  ByteLine bytes = (ByteLine)codes;
  for (int i = 0; i < 4 * kWidth; ++i) bytes[i] = table[bytes[i]];
  return (UVec)bytes;
#endif
}

// The codes of word W of a group, a byte each.
template <Format F, int W>
static inline IVec load_codes(const uint8_t* group, int v) {
  constexpr int BITS = blocks_of(F).bits;
  const uint8_t* at = group + v * 4 * kWidth;
  if constexpr (BITS == 8) return load_ints(at + W * kLine);
  const UVec line = (UVec)load_ints(at + W % 4 * kLine);
  UVec codes = W < 4 ? line & 0x0f0f0f0f : kOnArm ? (UVec)((ByteLine)line >> 4) : line >> 4 & 0x0f0f0f0f;
  if constexpr (BITS == 5) {
    const UVec high = (UVec)load_ints(at + 4 * kLine);
    codes |= (W < 4 ? high << (W < 4 ? 4 - W : 0) : high >> (W < 4 ? 0 : W - 4)) & 0x10101010;
  } else if constexpr (BITS == 6) {
    const UVec high = (UVec)load_ints(at + (4 + W / 4) * kLine);
    constexpr int kLeft = 4 - 2 * (W % 4);
    codes |= (kLeft >= 0 ? high << (kLeft >= 0 ? kLeft : 0) : high >> (kLeft >= 0 ? 0 : -kLeft)) & 0x30303030;
  }
  if constexpr (blocks_of(F).table != nullptr) codes = look_up(blocks_of(F).table, codes);
  return (IVec)codes;
}

// The scale of a part of group g of a chunk.
template <Format F>
static inline Vec scale_of(const uint8_t* chunk, int g, int part, int v) {
  using L = Layout<F>;
  const int at = v * 2 * kWidth;
  if constexpr (L::kIsFloat) return load(reinterpret_cast<const float*>(chunk + L::float_line(g)) + v * kWidth);
  if constexpr (L::kCode.scales == Scales::kExponent) {
    const UVec byte = (UVec)load_bytes(chunk, g, v), is_small = (UVec)(byte < 2);
    return (Vec)(((byte + 1) << 21 & is_small) | ((byte - 1) << 23 & ~is_small));  // exponent_to_float
  }
  if constexpr (!L::kIsSuper) return load_halves(chunk + g * kHalves + at);
  const int index = g * L::kParts + part;
  const UVec pair =
      __builtin_convertvector(*reinterpret_cast<const HVec*>(chunk + L::kScales + index / 2 * kHalves + at), UVec);
  const UVec top = index % 2 ? pair << 16 : pair << 24;  // the byte is the upper one
  const IVec whole = L::kCode.has_minima ? (IVec)(top >> 24) : (IVec)top >> 24;
  return load_halves(chunk + at) * __builtin_convertvector(whole, Vec);
}

template <Format F>
static inline Vec minimum_of(const uint8_t* chunk, int g, int v) {
  using L = Layout<F>;
  const int at = v * 2 * kWidth;
  if constexpr (L::kIsFloat)
    return load(reinterpret_cast<const float*>(chunk + L::kMinima + L::float_line(g)) + v * kWidth);
  if constexpr (!L::kIsSuper) return load_halves(chunk + L::kMinima + g * kHalves + at);
  const UVec pair =
      __builtin_convertvector(*reinterpret_cast<const HVec*>(chunk + L::kMinima + g / 2 * kHalves + at), UVec);
  const IVec whole = (IVec)(g % 2 ? pair >> 8 : pair & 0xff);
  return -load_halves(chunk + kHalves + at) * __builtin_convertvector(whole, Vec);
}

// The zero points of group g of a chunk, or nothing.
template <Format F>
static inline IVec zeros_of(const uint8_t* chunk, int g, int v) {
  return Layout<F>::kHasZeros ? load_bytes(chunk + Layout<F>::kZeros, g, v) : IVec{};
}

// ---- products

// sum + zeros * start, the negated sum of a row's group: both fit in 16 bits.
static inline IVec add_zeros(IVec sum, IVec zeros, int32_t start) {
#if defined(__AVX512VNNI__)
  return (IVec)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)zeros, _mm512_set1_epi32(start));
#elif defined(__AVXVNNI__)
  return (IVec)_mm256_dpwssd_avx_epi32((__m256i)sum, (__m256i)zeros, _mm256_set1_epi32(start));
#elif defined(__AVX512F__)
  return sum + (IVec)_mm512_madd_epi16((__m512i)zeros, _mm512_set1_epi32(start));
#elif defined(__AVX2__)
  return sum + (IVec)_mm256_madd_epi16((__m256i)zeros, _mm256_set1_epi32(start));
#else
  return sum + zeros * start;
#endif
}

// The sum of a row's products with the words of a group, or of a part of it.
template <int BITS>
struct Dots {
  IVec whole;

#if DFLASH_DOTS
  template <int W>
  void add(IVec codes, const uint32_t* row) {
    whole = add_word<BITS == 8, W>(whole, codes, row);
  }
#elif defined(__AVX2__)
  // Products of bytes are added in pairs, and as many words as fit in 16 bits. Those of 8 bits are two codes of 4.
  static constexpr int kPieces = BITS == 8 ? 2 : 1, kWordsAtOnce = BITS == 5 ? 4 : BITS == 6 ? 2 : 8;
  PairVec pairs[kPieces] = {};

#if defined(__AVX512F__)
  static PairVec multiply(IVec codes, uint32_t row) {
    return (PairVec)_mm512_maddubs_epi16((__m512i)codes, _mm512_set1_epi32(int(row)));
  }
  static IVec widen(PairVec x, int16_t times) { return (IVec)_mm512_madd_epi16((__m512i)x, _mm512_set1_epi16(times)); }
#else
  static PairVec multiply(IVec codes, uint32_t row) {
    return (PairVec)_mm256_maddubs_epi16((__m256i)codes, _mm256_set1_epi32(int(row)));
  }
  static IVec widen(PairVec x, int16_t times) { return (IVec)_mm256_madd_epi16((__m256i)x, _mm256_set1_epi16(times)); }
#endif

  template <int W>
  void add(IVec codes, const uint32_t* row) {
#pragma GCC unroll 2
    for (int p = 0; p < kPieces; ++p) {
      const IVec piece = BITS < 8 ? codes : (p ? codes >> 4 : codes) & 0x0f0f0f0f;
      pairs[p] += multiply(piece, row[W]);
      if ((W + 1) % kWordsAtOnce == 0) whole += widen(pairs[p], p ? 16 : 1), pairs[p] = PairVec{};
    }
  }
#else
  template <int W>
  void add(IVec codes, const uint32_t* row) {
    const PairVec both = (PairVec)(IVec{} + int32_t(row[W])), even = (both << 8) >> 8, odd = both >> 8;
    const IVec rows[2] = {(IVec)even, (IVec)odd};
    whole = add_words(codes, rows, whole);
  }
#endif
};

// Adds to sums [ROWS, kQuantTile] the products of a block of so many rows with columns of a tile, from group `first` of
// the rows on. Of the chunks `ahead` bytes further on, every `passes`-th group is requested, `pass` being the first.
template <Format F, int ROWS>
__attribute__((noinline)) static void multiply_blocks(const BlockRows::Block& rows, int64_t first, int64_t chunks,
                                                      const uint8_t* tile, int64_t ahead, int pass, int passes,
                                                      float* sums) {
  using L = Layout<F>;
  constexpr int kPartWords = kBlockGroupWords / L::kParts, kTaken = L::kCodeBits == 8 ? kTakenOff : 0;
  for (int v = 0; v < kInt8Vecs; ++v) {
    const uint8_t* chunk = tile;
    const uint32_t* words = rows.words + first * ROWS * kBlockGroupWords;
    const float *scales = rows.scales() + first * ROWS, *wide = rows.wide() + first * ROWS;
    const int32_t* starts = rows.starts_of<F>() + first * ROWS * L::kParts;
    int turn = v == 0 ? pass : -1;
    Vec total[ROWS];
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) total[r] = load(sums + r * kQuantTile + v * kWidth);
    for (int64_t c = 0; c < chunks; ++c, chunk += L::kBytes) {
#pragma GCC unroll 1
      for (int g = 0; g < L::kGroups; ++g) {
        const uint8_t* codes = chunk + L::kCodes + g * L::kGroupBytes;
        if (turn-- == 0) {
          turn = passes - 1;
          for (int line = 0; line < L::kGroupBytes; line += kLine) __builtin_prefetch(codes + ahead + line);
          if (g * kLine < L::kCodes) __builtin_prefetch(chunk + ahead + g * kLine);
        }
        const IVec zeros = zeros_of<F>(chunk, g, v) - kTaken;
        unroll<L::kParts>([&](auto part) {
          Dots<L::kCodeBits> sum[ROWS];
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) {
            constexpr int kTimes = L::kCode.offset == kTaken ? 0 : L::kCode.offset ? 1 : -kTaken;
            const int32_t start = kTimes ? kTimes * starts[r * L::kParts + part] : 0;
            sum[r].whole = L::kHasZeros ? add_zeros(IVec{}, zeros, start) : IVec{} + start;
          }
          if constexpr (ROWS == 1 || !kInPairs)
            unroll<kPartWords>([&](auto word) {
              constexpr int kWord = part * kPartWords + word;
              const IVec some = load_codes<F, kWord>(codes, v);
#pragma GCC unroll 8
              for (int r = 0; r < ROWS; ++r) sum[r].template add<kWord>(some, words + r * kBlockGroupWords);
            });
#if DFLASH_MATMUL
          else {
            PairDots both[ROWS / 2];
            unroll<kPartWords / 2>([&](auto two) {
              constexpr int kWord = part * kPartWords + 2 * two;
              const TwoWords some(load_codes<F, kWord>(codes, v), load_codes<F, kWord + 1>(codes, v));
#pragma GCC unroll 4
              for (int r = 0; r < ROWS; r += 2)
                both[r / 2].add(some, vld1q_u32(words + r * kBlockGroupWords + 2 * kWord));
            });
#pragma GCC unroll 4
            for (int r = 0; r < ROWS; r += 2) {
              sum[r].whole += both[r / 2].first();
              sum[r + 1].whole += both[r / 2].second();
            }
          }
#endif
          const Vec scale = scale_of<F>(chunk, g, part, v);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r)
            total[r] = fma_vec(__builtin_convertvector(sum[r].whole, Vec), scale * scales[r], total[r]);
        });
        if constexpr (L::kCode.has_minima) {
          const Vec minimum = minimum_of<F>(chunk, g, v);
#pragma GCC unroll 8
          for (int r = 0; r < ROWS; ++r) total[r] = fma_vec(minimum, splat(wide[r]), total[r]);
        }
        words += ROWS * kBlockGroupWords, scales += ROWS, wide += ROWS, starts += ROWS * L::kParts;
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) store(sums + r * kQuantTile + v * kWidth, total[r]);
  }
}

// sums [rows of whole blocks, kQuantTile] = the products of rows, from the block of `row` on, with a whole tile.
template <Format F>
static void multiply_tile(const BlockRows& rows, int64_t row, int64_t in, const uint8_t* tile, float* sums) {
  using L = Layout<F>;
  constexpr int64_t kChunks = kSegmentColumns / blocks_of(F).columns;
  const int64_t chunks = ceil_div(in, blocks_of(F).columns), passes = ceil_div(rows.rows - row, kBlockRows);
  std::memset(sums, 0, passes * kBlockRows * kQuantTile * sizeof(float));
  for (int64_t c = 0; c < chunks; c += kChunks, tile += kChunks * L::kBytes) {
    const int64_t count = least(kChunks, chunks - c), group = c * L::kGroups;
    for (int pass = 0; pass < passes; ++pass) {
      const BlockRows::Block block = rows.block(row + pass * kBlockRows);
      float* to = sums + pass * kBlockRows * kQuantTile;
      const auto multiply = block.rows == 1   ? multiply_blocks<F, 1>
                            : block.rows == 2 ? multiply_blocks<F, 2>
                            : block.rows == 4 ? multiply_blocks<F, least(4, kBlockRows)>
                            : block.rows == 6 ? multiply_blocks<F, least(6, kBlockRows)>
                                              : multiply_blocks<F, kBlockRows>;
      multiply(block, group, count, tile, kChunks * L::kBytes, pass, passes, to);
    }
  }
}

// to [chunks] = a tile of `live` features, padded with others of zeros
template <Format F>
static void copy_block_tile(const uint8_t* tile, int64_t chunks, int64_t live, uint8_t* to) {
  using L = Layout<F>;
  std::memset(to, 0, chunks * L::kBytes);
  for (int64_t c = 0; c < chunks; ++c)
    for (int at = 0, size; at < L::kBytes; at += size * kQuantTile, tile += size * live, to += size * kQuantTile) {
      size = at < L::kShorts ? 2 : 4;  // bytes of a feature that lie together
      std::memcpy(to, tile, size * live);
    }
}

DFLASH_NAMESPACE_END
