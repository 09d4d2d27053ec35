// Weights in 4 or 8 bits on GPUs with a scale per group of columns, as the second factor of mma.sync. A value is
// (code - zero) * scale, or code * scale + minimum in float, rounded to the storage type: products have the bits of
// those of the dense weight.
//
// Memory holds tiles of eight features. A tile is its codes, 64 columns at a time, then what scales them. Of 64 columns
// a lane has what it needs of the factor, in words for two or one steps of 16 columns (t = lane % 4):
//   4 bits: nibble 2 s + h of both halves is columns 2t and 2t + 1 of step s, those eight further on if h = 1
//   8 bits: bytes 0 and 2 are columns 2t and 2t + 1, and 1 and 3 those eight further on. The top bit is a sign, but for
//           m and k: they have no sign, and 128 is added in groups of 16
// Codes are scaled by a word per group and feature,
//   4 bits: two bfloat16, whose sum is the scale; the five lowest bits of the lower one are the zero point instead
//   8 bits: the scale in float; there is no zero point
//   m:      the scale and the minimum in half
// or (k) by two bytes per 32 columns and feature, and then a word of two half numbers per 256,
//   groups of 32: the products of the first two are the scale, those of the second two the minimum, which is below zero
//   groups of 16: both bytes have a sign, and are scales when multiplied by the first number; there are no minima
// The sum of two bfloat16 holds the scales of files, in bfloat16 or half. In half kernels take it as half holds it.
#pragma once
#include "cuda/linear/int8.cuh"

namespace dflash {

template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// f(a, b) of two pairs in words.
template <typename T, typename F>
static __device__ __forceinline__ uint32_t on_pairs(uint32_t a, uint32_t b, const F& f) {
  Pair<T> x, y;
  memcpy(static_cast<void*>(&x), &a, 4), memcpy(static_cast<void*>(&y), &b, 4);
  x = f(x, y);
  memcpy(&a, static_cast<const void*>(&x), 4);
  return a;
}
template <typename T>
static __device__ __forceinline__ uint32_t sub_pair(uint32_t a, uint32_t b) {
  return on_pairs<T>(a, b, [](auto x, auto y) { return __hsub2_rn(x, y); });
}
template <typename T>
static __device__ __forceinline__ uint32_t mul_pair(uint32_t a, uint32_t b) {
  return on_pairs<T>(a, b, [](auto x, auto y) { return __hmul2_rn(x, y); });
}

// What codes of 4 bits become values by, from a group's word.
template <typename T>
struct NibbleScale {
  static constexpr bool kIsHalf = std::is_same_v<T, __half>;
  static constexpr uint32_t kBase = kIsHalf ? 0x64006400u : 0x43004300u;  // 1024, 128

  uint32_t zero, scale, rest;  // pairs of two equal numbers; in bfloat16 the scale is a sum

  __device__ __forceinline__ void set(uint32_t word) {
    const uint32_t low = lower_twice(word);
    zero = and_or(low, 0x001f001fu, kBase);
    if constexpr (kIsHalf) {
      const float sum = __uint_as_float(word & 0xffff0000u) + __uint_as_float(word << 16 & 0xffe00000u);
      scale = pack_pair<T>(sum, sum), rest = 0;
    } else {
      scale = upper_twice(word), rest = low & 0xffe0ffe0u;
    }
  }
  // Of the lowest nibble of each half. Eleven bits of the scale are eight and three: four bits of a code times three
  // are exact, so that the sum is rounded once.
  __device__ __forceinline__ uint32_t operator()(uint32_t nibbles) const {
    const uint32_t codes = sub_pair<T>(and_or(nibbles, 0x000f000fu, kBase), zero);
    if constexpr (kIsHalf) return mul_pair<T>(codes, scale);
    return fma_pair(codes, scale, mul_pair<T>(codes, rest));
  }
};

// The same with 8 bits.
template <typename T>
struct ByteScale {
  float scale;

  __device__ __forceinline__ void set(uint32_t word) { scale = __uint_as_float(word); }
  // Of the lower byte of each half. In bfloat16 eight bits times eleven are exact in float only.
  __device__ __forceinline__ uint32_t operator()(uint32_t bytes) const {
    const uint32_t codes = int8_pair<T>(bytes);
    if constexpr (std::is_same_v<T, __half>) return mul_pair<T>(codes, pack_pair<T>(scale, scale));
    return pack_pair<T>(__uint_as_float(codes << 16) * scale, __uint_as_float(codes & 0xffff0000u) * scale);
  }
};

// The same in float, with a minimum. The product of a file's code and scale is exact, so that the sum is rounded once.
template <typename T>
struct FloatScale {
  float scale, minimum;

  __device__ __forceinline__ uint32_t of(float low, float high) const {
    return pack_pair<T>(__fmaf_rn(low, scale, minimum), __fmaf_rn(high, scale, minimum));
  }
  __device__ __forceinline__ uint32_t of_nibbles(uint32_t word) const {
    constexpr uint32_t kBase = 0x43004300u;  // 128
    const uint32_t codes = sub_pair<__nv_bfloat16>(and_or(word, 0x000f000fu, kBase), kBase);
    return of(__uint_as_float(codes << 16), __uint_as_float(codes & 0xffff0000u));
  }
  // Of the lower byte of each half; `base` is 2^23, and what was added to codes.
  __device__ __forceinline__ uint32_t of_bytes(uint32_t word, float base) const {
    return of(byte_from_2p23<0>(word) - base, byte_from_2p23<2>(word) - base);
  }
};

static __device__ __forceinline__ float2 two_halves(uint32_t word) {
  __half2 pair;
  memcpy(static_cast<void*>(&pair), &word, 4);
  return __half22float2(pair);
}

template <int kBits, int kInner, bool kIsFloat>
struct GroupStage {
  static constexpr int kLanes = kInner * kBits / 16;  // that copy a tile's codes, 16 bytes each
  static constexpr int kCopies = kLanes / 16;         // of a lane, as a warp copies two tiles
  static constexpr int kCodeBytes = kInner * kBits;   // of a tile in a stage
  static constexpr int kTileBytes = kCodeBytes + kInner;
  // Lanes that copy what scales a tile's codes. Of 64 columns two copy the words of 32, and two those of the others; or
  // two the bytes of 32 each, and two the words of 256.
  static constexpr int kWordLanes = kInner / 16;

  const unsigned char* codes[kCopies];
  const unsigned char* words;
  int left[kCopies];            // stages that have columns of the lane's codes
  int words_left, word_column;  // the same of the lane's words or bytes; the column of the first
  int word_shift, word_pitch;   // the logarithm of their columns; bytes from one to the next
  int log2_group;
  bool has_super;

  // The i-th tile of the warp begins with `feature` of a weight [features, row_size], or is its last; stages begin with
  // the column `inner` and end at `end`.
  __device__ __forceinline__ void set(int i, Format format, const void* weight, int64_t feature, int64_t features,
                                      int64_t in, int64_t inner, int64_t end) {
    const auto* tile =
        static_cast<const unsigned char*>(weight) + min(feature, features - 8) * groups_row_size(format, in);
    const int lane = threadIdx.x % 32;
    const auto stages_from = [&](int64_t column) { return int((end - column + kInner - 1) / kInner); };
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
      const int own = c * 32 + lane;
      if (own / kLanes != i) continue;
      const int at = own % kLanes * 16;
      codes[c] = tile + inner * kBits + at;
      left[c] = stages_from(inner + at / (64 * kBits) * 64);
    }
    log2_group = log2_of_group(format), has_super = kIsFloat && has_super_groups(format);
    if (lane / kWordLanes != i) return;
    const int own = lane % kWordLanes;
    word_column = int(inner) + own / 2 * 32, word_shift = log2_group, word_pitch = 32;
    words = tile + 8 * codes_size(format, in) + own % 2 * 16;
    if (has_super) {
      const bool is_word = own % 4 >= 2;
      word_column = int(inner) + own / 4 * 64 + (own % 4 == 1 ? 32 : 0);
      word_shift = is_word ? 8 : 5, word_pitch = is_word ? 32 : 16;
      words = tile + 8 * codes_size(format, in) + (is_word ? (in + 63) / 64 * 32 + own % 2 * 16 : 0);
    }
    words_left = stages_from(word_column);
  }

  // Columns past the end become zero.
  __device__ __forceinline__ void copy(void* stage, int index, uint64_t policy) const {
    const int lane = threadIdx.x % 32;
    unsigned char* to = static_cast<unsigned char*>(stage) + threadIdx.x / 32 * 2 * kTileBytes;
#pragma unroll
    for (int c = 0; c < kCopies; ++c) {
      const int own = c * 32 + lane;
      cp_async16_hint_if(to + own / kLanes * kTileBytes + own % kLanes * 16, codes[c] + int64_t(index) * kCodeBytes,
                         policy, index < left[c]);
    }
    if (lane >= 2 * kWordLanes) return;
    const int group = (word_column + index * kInner) >> word_shift;
    cp_async16_hint_if(to + lane / kWordLanes * kTileBytes + kCodeBytes + lane % kWordLanes * 16,
                       words + (index < words_left ? group * word_pitch : 0), policy, index < words_left);
  }

  // A lane's share of kTiles tiles of a stage.
  template <typename T, int kTiles>
  struct Factor {
    static constexpr int kWords = kInner / 64 * kBits / 2;  // of codes, of a tile
    using Scale =
        std::conditional_t<kIsFloat, FloatScale<T>, std::conditional_t<kBits == 4, NibbleScale<T>, ByteScale<T>>>;

    const unsigned char* words;  // of the first tile
    int feature, log2_group;
    bool has_super;
    uint32_t codes[kTiles][kWords];
    Scale scales[kTiles];
    float2 super[kTiles];

    __device__ __forceinline__ Factor(const GroupStage& from, const void* first)
        : words(static_cast<const unsigned char*>(first) + kCodeBytes),
          feature(threadIdx.x % 32 / 4),
          log2_group(from.log2_group),
          has_super(from.has_super) {
#pragma unroll
      for (int i = 0; i < kTiles * kWords; i += kBits / 2) {
        const auto* at =
            static_cast<const unsigned char*>(first) + i / kWords * kTileBytes + i % kWords / (kBits / 2) * 64 * kBits;
        uint32_t (&to)[kWords] = codes[i / kWords];
        if constexpr (kBits == 4) {
          const uint2 piece = *reinterpret_cast<const uint2*>(at + threadIdx.x % 32 * 8);
          to[i % kWords] = piece.x, to[i % kWords + 1] = piece.y;
        } else {
          const uint4 piece = load16(at + threadIdx.x % 32 * 16);
          to[0] = piece.x, to[1] = piece.y, to[2] = piece.z, to[3] = piece.w;
        }
      }
    }
    // 16 features, columns from 16 k on, in ascending order of k.
    __device__ __forceinline__ void operator()(uint32_t (&to)[4], int n, int k) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int tile = 2 * n + i;
        set_scale(tile, k);
        const uint32_t word = codes[tile][k * kBits / 8] >> (kBits == 4 ? k % 2 * 8 : 0);
        to[2 * i] = value(scales[tile], word), to[2 * i + 1] = value(scales[tile], word >> kBits);
      }
    }

   private:
    __device__ __forceinline__ uint32_t value(const Scale& scale, uint32_t word) const {
      if constexpr (!kIsFloat)
        return scale(word);
      else if constexpr (kBits == 4)
        return scale.of_nibbles(word);
      else
        return scale.of_bytes(word, log2_group == 4 ? 0x1p23f + 128 : 0x1p23f);
    }
    __device__ __forceinline__ void set_scale(int tile, int k) {
      const unsigned char* at = words + tile * kTileBytes + k / 4 * 64;
      const auto word = [&](int offset) { return *reinterpret_cast<const uint32_t*>(at + offset + feature * 4); };
      Scale& scale = scales[tile];
      if constexpr (!kIsFloat) {
        if (k % 4 == 0 || (k % 2 == 0 && log2_group == 5)) scale.set(word(k % 4 / 2 * 32));
      } else if (!has_super) {
        if (k % 2) return;
        const float2 both = two_halves(word(k % 4 / 2 * 32));
        scale = {both.x, both.y};
      } else {
        if (k % 4 == 0) super[tile] = two_halves(word(32));
        if (k % 2 && log2_group == 5) return;
        const unsigned both = *reinterpret_cast<const uint16_t*>(at + k % 4 / 2 * 16 + feature * 2);
        if (log2_group == 4)
          scale = {super[tile].x * float(int8_t(both >> k % 2 * 8)), 0.0f};
        else
          scale = {super[tile].x * float(both & 255), -(super[tile].y * float(both >> 8))};
      }
    }
  };
};

template <int kInner>
struct PackedStage<Format::kW4A16G32, kInner> : GroupStage<4, kInner, false> {};
template <int kInner>
struct PackedStage<Format::kW8A16G32, kInner> : GroupStage<8, kInner, false> {};
template <int kInner>
struct PackedStage<Format::kW4A16G32M, kInner> : GroupStage<4, kInner, true> {};
template <int kInner>
struct PackedStage<Format::kW8A16G32M, kInner> : GroupStage<8, kInner, true> {};

// Calls f(constant) with the format whose kernels read weights of this one.
template <typename F>
static cudaError_t with_kernels_of(Format format, const F& f) {
  if (format == Format::kDense) return f(std::integral_constant<Format, Format::kDense>());
  if (format == Format::kW8A16) return f(std::integral_constant<Format, Format::kW8A16>());
  if (!has_groups(format)) return cudaErrorInvalidValue;
  if (has_float_groups(format))
    return bits_of_groups(format) == 4 ? f(std::integral_constant<Format, Format::kW4A16G32M>())
                                       : f(std::integral_constant<Format, Format::kW8A16G32M>());
  return bits_of_groups(format) == 4 ? f(std::integral_constant<Format, Format::kW4A16G32>())
                                     : f(std::integral_constant<Format, Format::kW8A16G32>());
}

}  // namespace dflash
