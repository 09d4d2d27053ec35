// How weights in the blocks of files lie in memory.
//
// Tiles hold the file's own integers and scales, in an order in which a vector has one word (four adjacent columns) of
// each of 16 features. A chunk of a tile is its scales, then its minima or zero points, then its groups. A group of
// codes is lines of 64 bytes: line j has word j in the low four bits and word j + 4 in the high ones (8 bits: line j is
// word j); the fifth bits of word j are bit j of one more line; the fifth and sixth bits of words 0 to 3 and of words 4
// to 7 are bits 2 (j % 4) and the next of two more. Half-precision numbers and the integers next to them are in lines
// of two bytes of each feature, floats in lines of four. Exponents and zero points are such a line per 128 columns: a
// byte for each group.
#pragma once
#include "cpu/base/vec.h"

DFLASH_NAMESPACE_BEGIN

constexpr int kQuantTile = 16;  // features of a tile
constexpr int kBlockGroup = 32, kBlockGroupWords = kBlockGroup / 4;
constexpr int kLine = 4 * kQuantTile;    // bytes: a word of each feature of a tile
constexpr int kHalves = 2 * kQuantTile;  // bytes: a half-precision number, or two bytes, of each feature

// Where the parts of a tile's chunk begin, in bytes.
template <Format F>
struct Layout {
  static constexpr BlockFormat kCode = blocks_of(F);
  static constexpr bool kIsSuper = kCode.scales == Scales::kSuper, kIsFloat = kCode.scales == Scales::kFloat;
  static constexpr bool kHasZeros = kIsFloat && !kCode.has_minima;
  static constexpr int kGroups = kCode.columns / kBlockGroup, kBytes = kCode.bytes * kQuantTile;
  static constexpr int kParts = most(1, kBlockGroup / kCode.scale_columns);  // of a group, each with a scale
  static constexpr int kScales = kIsSuper ? 2 * kHalves : 0;                 // after those of 256 columns
  static constexpr int kScaleBytes = kIsSuper                            ? kGroups / 2 * kParts * kHalves
                                     : kIsFloat                          ? kCode.columns / kCode.scale_columns * kLine
                                     : kCode.scales == Scales::kExponent ? kGroups / 4 * kLine
                                                                         : kGroups * kHalves;
  static constexpr int kMinima = kScales + kScaleBytes, kZeros = kMinima;
  static constexpr int kCodes = kMinima + (kHasZeros ? kGroups / 4 * kLine : kCode.has_minima ? kScaleBytes : 0);
  static constexpr int kShorts = kIsSuper || kCode.scales == Scales::kHalf ? kCodes : 0;  // bytes of lines of two
  static constexpr int kGroupBytes = kLine * kCode.bits;
  // Where the float of group g lies among scales or minima.
  static constexpr int float_line(int g) { return g * kBlockGroup / kCode.scale_columns * kLine; }
  // Of a code as it is multiplied: 4 bits may stand for more.
  static constexpr int kCodeBits = !kCode.table ? kCode.bits : kCode.offset == 16 ? 5 : 8;
  static_assert(kCodes + kGroups * kGroupBytes == kBytes && kBytes % kLine == 0);
};

// A format as a type.
template <Format F>
struct FormatConstant {
  static constexpr Format value = F;
};

// Calls fn(FormatConstant<format>) for a format with blocks.
template <int FIRST = kFirstBlocks, typename Fn>
static inline void with_format(Format format, const Fn& fn) {
  if constexpr (FIRST + 1 < kFirstGroups)
    if (int(format) != FIRST) return with_format<FIRST + 1>(format, fn);
  fn(FormatConstant<Format(FIRST)>{});
}

// Subnormal numbers too: their integer is exact in float.
static inline float half_to_float(uint16_t half) {
  const uint32_t magnitude = half & 0x7fff, exponent = half & 0x7c00;
  uint32_t bits = (magnitude << 13) + (112u << 23) + (exponent == 0x7c00 ? 112u << 23 : 0);
  float out = float(magnitude) * 0x1p-24f;
  if (exponent != 0) std::memcpy(&out, &bits, 4);
  return half & 0x8000 ? -out : out;
}

// 2^(byte - 128); the first two are subnormal.
static inline float exponent_to_float(uint32_t byte) {
  const uint32_t bits = byte < 2 ? 0x00200000u << byte : (byte - 1) << 23;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

// One feature of a tile. The last tile of a weight may have fewer features: its lines are shorter.
struct TileFeature {
  int64_t live, index;  // features of the tile, and which it is

  // The bytes of this feature in the line that begins at byte `at` of a whole tile of format F.
  template <Format F>
  int64_t offset(int64_t at) const {
    const int64_t chunk = at / Layout<F>::kBytes * Layout<F>::kBytes;
    return at / kQuantTile * live + index * (at - chunk < Layout<F>::kShorts ? 2 : 4);
  }
};

DFLASH_NAMESPACE_END
