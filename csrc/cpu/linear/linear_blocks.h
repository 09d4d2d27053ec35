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

// How often a row's number is stored, so that a vector of the sums that it belongs to takes it in one load.
constexpr int kScaleLanes = kInPairs ? 2 : 1, kStartLanes = kOnArm ? 4 : 1;

static inline Vec broadcast(float x) { return splat(x); }
static inline IVec broadcast(int32_t x) { return IVec{} + x; }

// The sums of ROWS rows with a vector of features: a vector per row. With smmla two for a pair of rows, the first two
// features and the last two: [2 features, 2 rows].
template <int ROWS>
struct Lanes {
  static constexpr bool kPairs = kInPairs && ROWS > 1;

  // What belongs to sum I of a vector with a number per feature.
  template <int I, typename V>
  static inline V of_features(V x) {
#if DFLASH_MATMUL
    if (kPairs)
      return I % 2 ? (V)vzip2q_f32((float32x4_t)x, (float32x4_t)x) : (V)vzip1q_f32((float32x4_t)x, (float32x4_t)x);
#endif
    return x;
  }

  // What belongs to sum I of numbers of the rows, LANES times each.
  template <int I, int LANES, typename T>
  static inline auto of_rows(const T* x) {
    typedef T V __attribute__((vector_size(4 * kWidth), aligned(4), may_alias));
    if constexpr (LANES == kWidth)
      return *reinterpret_cast<const V*>(x + I * kWidth);
    else if constexpr (kPairs)
      return *reinterpret_cast<const V*>(x + I / 2 * kWidth);
#if defined(__aarch64__)
    else if constexpr (ROWS > 1)
      return (V)vdupq_laneq_f32(vld1q_f32((const float*)x + I / 4 * 4), I % 4);
#endif
    else
      return broadcast(x[I * LANES]);
  }

  // Between a vector per row and such sums.
  static inline void join([[maybe_unused]] Vec (&x)[ROWS]) {
#if DFLASH_MATMUL
    for (int i = 0; kPairs && i < ROWS; i += 2) {
      const float32x4_t first = (float32x4_t)x[i], second = (float32x4_t)x[i + 1];
      x[i] = (Vec)vzip1q_f32(first, second), x[i + 1] = (Vec)vzip2q_f32(first, second);
    }
#endif
  }
  static inline void part([[maybe_unused]] Vec (&x)[ROWS]) {
#if DFLASH_MATMUL
    for (int i = 0; kPairs && i < ROWS; i += 2) {
      const float32x4_t low = (float32x4_t)x[i], high = (float32x4_t)x[i + 1];
      x[i] = (Vec)vuzp1q_f32(low, high), x[i + 1] = (Vec)vuzp2q_f32(low, high);
    }
#endif
  }

  // Where the `time`-th copy of a row's number is stored.
  static int64_t place(int64_t r, int time, int lanes) {
    return kPairs ? r / 2 * 2 * lanes + r % 2 + 2 * time : r * lanes + time;
  }
};

// Rows in 8 bits, padded with zeros to whole chunks. Blocks of rows that are multiplied at once, the last padded with
// rows of zeros to a number of rows that the kernels have.
struct BlockRows {
  static constexpr int kWords = kBlockGroupWords + 2 * kScaleLanes + 6 * kStartLanes;  // of a row's group

  struct Block {
    int64_t rows, groups;
    uint32_t* words;  // [groups, rows, kBlockGroupWords], with smmla in pairs of rows, see join_pair

    float* scales() const { return reinterpret_cast<float*>(words + rows * groups * kBlockGroupWords); }
    float* wide() const { return scales() + rows * groups * kScaleLanes; }  // scales * sums
    int32_t* starts(int i) const {
      return reinterpret_cast<int32_t*>(wide()) + (kScaleLanes + i * kStartLanes) * rows * groups;
    }
    int32_t* halves() const { return starts(4); }  // [groups, 2, rows]: of 16 elements, for the offset 32

    // A number of a row's group, as often as it is stored. `at`: numbers of all rows before it.
    template <int LANES, typename T>
    void set(T* numbers, int64_t at, int64_t r, T x) const {
      for (int time = 0; time < LANES; ++time)
        numbers[at * LANES + (rows == 1 ? time : Lanes<2>::place(r, time, LANES))] = x;
    }

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
          const int64_t at = g * to.rows;
          int32_t sums[2];
          uint32_t* words = to.words + (at + r) * kBlockGroupWords;
          float scale;
          round_to_bytes<kBlockGroup>(from, reinterpret_cast<int8_t*>(words), scale, sums);
          if (kInPairs && r % 2) join_pair(words - kBlockGroupWords);
          const int32_t sum = sums[0] + sums[1];
          to.set<kScaleLanes>(to.scales(), at, r, scale);
          to.set<kScaleLanes>(to.wide(), at, r, scale * float(sum));
          for (int i = 0; i < 4; ++i) to.set<kStartLanes>(to.starts(i), at, r, -kOffsets[i] * sum);
          for (int i = 0; i < 2; ++i) to.set<kStartLanes>(to.halves(), 2 * at + i * to.rows, r, -32 * sums[i]);
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

// Two bytes of each feature.
static inline UVec load_pairs(const uint8_t* from) {
#if defined(__aarch64__)
  return (UVec)vmovl_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from)));  // GCC 12 would load one by one
#else
  return __builtin_convertvector(*reinterpret_cast<const HVec*>(from), UVec);
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

// The low bits of codes of word W, of lines of words.
template <Format F, int W>
static inline UVec low_bits(UVec lines) {
  const UVec codes = W < 4 ? lines & 0x0f0f0f0f : kOnArm ? (UVec)((ByteLine)lines >> 4) : lines >> 4 & 0x0f0f0f0f;
  if constexpr (blocks_of(F).table != nullptr) return look_up(blocks_of(F).table, codes);
  return codes;
}

// x, and those bits of others that the mask has.
static inline UVec insert_bits(UVec x, UVec others, uint32_t mask) {
#if defined(__aarch64__)
  return (UVec)vbslq_u32((uint32x4_t)(UVec{} + mask), (uint32x4_t)others, (uint32x4_t)x);
#else
  return x | (others & mask);
#endif
}

// The codes of word W of a group, a byte each.
template <Format F, int W>
static inline IVec load_codes(const uint8_t* group, int v) {
  constexpr int BITS = blocks_of(F).bits;
  const uint8_t* at = group + v * 4 * kWidth;
  if constexpr (BITS == 8) return load_ints(at + W * kLine);
  const UVec codes = low_bits<F, W>((UVec)load_ints(at + W % 4 * kLine));
  if constexpr (BITS == 5) {
    const UVec high = (UVec)load_ints(at + 4 * kLine);
    return (IVec)insert_bits(codes, W < 4 ? high << (W < 4 ? 4 - W : 0) : high >> (W < 4 ? 0 : W - 4), 0x10101010);
  } else if constexpr (BITS == 6) {
    const UVec high = (UVec)load_ints(at + (4 + W / 4) * kLine);
    constexpr int kLeft = 4 - 2 * (W % 4);
    return (IVec)insert_bits(codes, kLeft >= 0 ? high << (kLeft >= 0 ? kLeft : 0) : high >> (kLeft >= 0 ? 0 : -kLeft),
                             0x30303030);
  }
  return (IVec)codes;
}

#if DFLASH_MATMUL
// Those of words W and W + 1.
template <Format F, int W>
static inline TwoWords load_two(const uint8_t* group, int v) {
  if constexpr (blocks_of(F).bits != 4) return TwoWords(load_codes<F, W>(group, v), load_codes<F, W + 1>(group, v));
  const uint8_t* at = group + v * 4 * kWidth + W % 4 * kLine;
  TwoWords lines(load_ints(at), load_ints(at + kLine));  // words W + 4 and W + 5 too
  lines.low = (uint8x16_t)low_bits<F, W>((UVec)lines.low);
  lines.high = (uint8x16_t)low_bits<F, W>((UVec)lines.high);
  return lines;
}
#endif

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
  const UVec pair = load_pairs(chunk + L::kScales + index / 2 * kHalves + at);
  const UVec top = pair << (index % 2 ? 16 : 24);  // the byte is the upper one
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
  const UVec pair = load_pairs(chunk + L::kMinima + g / 2 * kHalves + at);
  const IVec whole = (IVec)(pair >> (g % 2 ? 8 : 0) & 0xff);
  return -load_halves(chunk + kHalves + at) * __builtin_convertvector(whole, Vec);
}

// The zero points of group g of a chunk, or nothing.
template <Format F>
static inline IVec zeros_of(const uint8_t* chunk, int g, int v) {
  return Layout<F>::kHasZeros ? load_bytes(chunk + Layout<F>::kZeros, g, v) : IVec{};
}

// ---- products

// zeros * starts, the negated sums of rows' groups: both fit in 16 bits.
static inline IVec times_zeros(IVec zeros, IVec starts) {
#if defined(__AVX512VNNI__)
  return (IVec)_mm512_dpwssd_epi32(__m512i{}, (__m512i)zeros, (__m512i)starts);
#elif defined(__AVXVNNI__)
  return (IVec)_mm256_dpwssd_avx_epi32(__m256i{}, (__m256i)zeros, (__m256i)starts);
#elif defined(__AVX512F__)
  return (IVec)_mm512_madd_epi16((__m512i)zeros, (__m512i)starts);
#elif defined(__AVX2__)
  return (IVec)_mm256_madd_epi16((__m256i)zeros, (__m256i)starts);
#else
  return zeros * starts;
#endif
}

// The sum of a row's products with the words of a group, or of a part of it.
template <int BITS>
struct Dots {
  IVec whole{};

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
  using Sum = Lanes<ROWS>;
  constexpr int kVecs = kOnArm && ROWS == 1 ? kInt8Vecs : 1;  // at once
  constexpr int kPartWords = kBlockGroupWords / L::kParts, kTaken = L::kCodeBits == 8 ? kTakenOff : 0;
  constexpr int kTimes = L::kCode.offset == kTaken ? 0 : L::kCode.offset ? 1 : -kTaken;  // of the starts
  for (int v = 0; v < kInt8Vecs; v += kVecs) {
    const uint8_t* chunk = tile;
    const uint32_t* words = rows.words + first * ROWS * kBlockGroupWords;
    const float *scales = rows.scales() + first * ROWS * kScaleLanes, *wide = rows.wide() + first * ROWS * kScaleLanes;
    const int32_t* starts = rows.starts_of<F>() + first * ROWS * L::kParts * kStartLanes;
    int turn = v == 0 ? pass : -1;
    Vec total[kVecs][ROWS];
    float* to = sums + v * kWidth;
    unroll<kVecs>([&](auto u) {
      unroll<ROWS>([&](auto r) { total[u][r] = load(to + u * kWidth + r * kQuantTile); });
      Sum::join(total[u]);
    });
    for (int64_t c = 0; c < chunks; ++c, chunk += L::kBytes) {
#pragma GCC unroll 1
      for (int g = 0; g < L::kGroups; ++g) {
        const uint8_t* codes = chunk + L::kCodes + g * L::kGroupBytes;
        if (turn-- == 0) {
          turn = passes - 1;
          for (int line = 0; line < L::kGroupBytes; line += kLine) __builtin_prefetch(codes + ahead + line);
          if (g * kLine < L::kCodes) __builtin_prefetch(chunk + ahead + g * kLine);
        }
        unroll<L::kParts>([&](auto part) {
          Dots<L::kCodeBits> sum[kVecs][ROWS];
          if constexpr (L::kHasZeros || kTimes != 0)
            unroll<kVecs>([&](auto u) {
              const IVec zeros = zeros_of<F>(chunk, g, v + u) - kTaken;
              unroll<ROWS>([&](auto i) {
                const IVec start = Sum::template of_rows<i, kStartLanes>(starts + part * ROWS * kStartLanes);
                sum[u][i].whole =
                    L::kHasZeros ? times_zeros(Sum::template of_features<i>(zeros), start) : kTimes * start;
              });
            });
          if constexpr (!Sum::kPairs)
            unroll<kPartWords>([&](auto word) {
              constexpr int kWord = part * kPartWords + word;
              unroll<kVecs>([&](auto u) {
                const IVec some = load_codes<F, kWord>(codes, v + u);
                unroll<ROWS>([&](auto r) { sum[u][r].template add<kWord>(some, words + r * kBlockGroupWords); });
              });
            });
#if DFLASH_MATMUL
          else
            unroll<kPartWords / 4>([&](auto four) {
              constexpr int kWord = part * kPartWords + 4 * four;
              const TwoWords some[2] = {load_two<F, kWord>(codes, v), load_two<F, kWord + 2>(codes, v)};
              unroll<ROWS>([&](auto i) {
                const uint32_t* both = words + i / 2 * 2 * kBlockGroupWords + 2 * kWord;
                for (int j = 0; j < 2; ++j)
                  sum[0][i].whole =
                      add_pair(sum[0][i].whole, i % 2 ? some[j].high : some[j].low, vld1q_u32(both + 4 * j));
              });
            });
#endif
          unroll<kVecs>([&](auto u) {
            const Vec scale = scale_of<F>(chunk, g, part, v + u);
            unroll<ROWS>([&](auto i) {
              const Vec both = Sum::template of_features<i>(scale) * Sum::template of_rows<i, kScaleLanes>(scales);
              total[u][i] = fma_vec(__builtin_convertvector(sum[u][i].whole, Vec), both, total[u][i]);
            });
          });
          // GCC 12 would mix the parts, and run out of registers.
          if (L::kParts > 1 && kOnArm && (Sum::kPairs || ROWS == 1)) asm volatile("" ::: "memory");
        });
        if constexpr (L::kCode.has_minima)
          unroll<kVecs>([&](auto u) {
            const Vec minimum = minimum_of<F>(chunk, g, v + u);
            unroll<ROWS>([&](auto i) {
              const Vec sum = Sum::template of_rows<i, kScaleLanes>(wide);
              total[u][i] = fma_vec(Sum::template of_features<i>(minimum), sum, total[u][i]);
            });
          });
        words += ROWS * kBlockGroupWords, scales += ROWS * kScaleLanes, wide += ROWS * kScaleLanes;
        starts += ROWS * L::kParts * kStartLanes;
      }
    }
    unroll<kVecs>([&](auto u) {
      Sum::part(total[u]);
      unroll<ROWS>([&](auto r) { store(to + u * kWidth + r * kQuantTile, total[u][r]); });
    });
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
