// The blocks of a GGUF file, a feature after the other, as tiles (blocks.h). What a block looks like is in
// ggml-common.h of llama.cpp and in the package gguf (quants.py).
#include "cpu/base/parallel.h"
#include "cpu/linear/blocks.h"

DFLASH_NAMESPACE_BEGIN

constexpr uint32_t kLow = 0x0f0f0f0f;

// A word of four bytes of a file.
static inline uint32_t word(const uint8_t* from, int64_t i) {
  uint32_t out;
  std::memcpy(&out, from + 4 * i, 4);
  return out;
}

// Of a block of 32 or 256 columns in the file: scales and minima, and with them its codes.
template <Format F>
constexpr int kHeadBytes = F == Format::kMXFP4    ? 1
                           : F == Format::kIQ4_XS ? 8
                           : !Layout<F>::kIsSuper ? (Layout<F>::kCode.has_minima ? 4 : 2)
                           : F == Format::kQ6_K   ? 18
                                                  : 16;
template <Format F>
constexpr int kBlockBytes = kHeadBytes<F> + (Layout<F>::kIsSuper ? 32 : 4) * Layout<F>::kCode.bits;

// Where a feature's numbers of a chunk go.
template <Format F>
struct Writer {
  using L = Layout<F>;
  uint8_t* tile;
  TileFeature feature;
  int64_t chunk;  // bytes of a whole tile in front of it

  uint8_t* at(int64_t offset) const { return tile + feature.offset<F>(chunk + offset); }
  void half(int64_t offset, const uint8_t* from) const { std::memcpy(at(offset), from, 2); }
  void line(int group, int i, uint32_t value) const {
    std::memcpy(at(L::kCodes + group * L::kGroupBytes + i * kLine), &value, 4);
  }
  // Codes of 4 bits, words [8] of a group, each in the low halves of its bytes.
  void nibbles(int group, const uint32_t (&words)[kBlockGroupWords]) const {
    for (int i = 0; i < 4; ++i) line(group, i, words[i] | words[i + 4] << 4);
  }
};

// A chunk of several blocks of 32, or fewer and zeros.
template <Format F>
static void pack_chunk(const uint8_t* blocks, int64_t count, const Writer<F>& to, Constant<32>) {
  using L = Layout<F>;
  constexpr int kHead = kHeadBytes<F>, kHigh = L::kCode.bits == 5 ? 4 : 0;
  for (int g = 0; g < count; ++g, blocks += kBlockBytes<F>) {
    const uint8_t* codes = blocks + kHead + kHigh;
    if (F == Format::kMXFP4)
      to.at(0)[g] = blocks[0];
    else
      to.half(g * kHalves, blocks);
    if (L::kCode.has_minima) to.half(L::kMinima + g * kHalves, blocks + 2);
    if (L::kCode.bits == 8) {
      for (int i = 0; i < 8; ++i) to.line(g, i, word(codes, i) ^ 0x80808080);
      continue;
    }
    for (int i = 0; i < 4; ++i) to.line(g, i, word(codes, i));  // the two halves of a block share bytes, as words here
    if (L::kCode.bits == 5) {
      const uint32_t bits = word(blocks + kHead, 0);  // of element i: bit i
      uint32_t high = 0;
      for (int i = 0; i < kBlockGroup; ++i) high |= (bits >> i & 1) << (8 * (i % 4) + i / 4);
      to.line(g, 4, high);
    }
  }
}

// The scale and the minimum of a group of Q4_K and Q5_K, of 6 bits each.
static inline void read_scales(const uint8_t* from, int group, uint8_t& scale, uint8_t& minimum) {
  if (group < 4) {
    scale = from[group] & 63, minimum = from[group + 4] & 63;
  } else {
    scale = (from[group + 4] & 15) | (from[group - 4] >> 6 << 4);
    minimum = (from[group + 4] >> 4) | (from[group] >> 6 << 4);
  }
}

template <Format F>
static void pack_chunk(const uint8_t* block, int64_t, const Writer<F>& to, Constant<256>) {
  using L = Layout<F>;
  const auto byte = [&](int64_t part, int i) { return to.at(part + i / 2 * kHalves) + i % 2; };
  uint32_t words[kBlockGroupWords];
  if constexpr (F == Format::kQ6_K) {
    const uint8_t *low = block, *high = block + 128, *scales = block + 192;
    to.half(0, block + 208);
    for (int i = 0; i < 16; ++i) *byte(L::kScales, i) = scales[i];
    for (int g = 0; g < 8; ++g) {
      const int k = g % 4, half = g / 4;
      uint32_t tops[2] = {};
      for (int w = 0; w < kBlockGroupWords; ++w) {
        words[w] = word(low, 16 * half + 8 * (k % 2) + w) >> (k < 2 ? 0 : 4) & kLow;
        tops[w / 4] |= (word(high, 8 * half + w) >> 2 * k & 0x03030303) << 2 * (w % 4);
      }
      to.nibbles(g, words);
      to.line(g, 4, tops[0]), to.line(g, 5, tops[1]);
    }
  } else if constexpr (F == Format::kIQ4_XS) {
    uint16_t high;
    std::memcpy(&high, block + 2, 2);
    to.half(0, block);
    for (int g = 0; g < 8; ++g) {
      const int scale = (block[4 + g / 2] >> 4 * (g % 2) & 15) | (high >> 2 * g & 3) << 4;
      *byte(L::kScales, g) = uint8_t(scale - 32);
      for (int i = 0; i < 4; ++i) to.line(g, i, word(block + 8, 4 * g + i));
    }
  } else {
    const uint8_t *high = block + 16, *codes = high + (L::kCode.bits == 5 ? 32 : 0);
    to.half(0, block), to.half(kHalves, block + 2);
    for (int g = 0; g < 8; ++g) {
      read_scales(block + 4, g, *byte(L::kScales, g), *byte(L::kMinima, g));
      uint32_t top = 0;
      for (int w = 0; w < kBlockGroupWords; ++w) {
        words[w] = word(codes, g / 2 * 8 + w) >> (g % 2 ? 4 : 0) & kLow;
        if (L::kCode.bits == 5) top |= (word(high, w) >> g & 0x01010101) << w;
      }
      to.nibbles(g, words);
      if (L::kCode.bits == 5) to.line(g, 4, top);
    }
  }
}

template <Format F>
static void pack_tile(const PackBlocksParams& p, int64_t first) {
  constexpr int kBlock = Layout<F>::kIsSuper ? 256 : 32;
  constexpr int64_t kPerChunk = blocks_of(F).columns / kBlock;
  const int64_t live = least(kQuantTile, p.features - first), blocks = p.columns / kBlock,
                size = row_size(F, p.columns);
  uint8_t* tile = static_cast<uint8_t*>(p.packed) + first * size;
  std::memset(tile, 0, live * size);
  for (int64_t i = 0; i < live; ++i) {
    const auto* from = static_cast<const uint8_t*>(p.blocks) + (first + i) * blocks * kBlockBytes<F>;
    for (int64_t b = 0, chunk = 0; b < blocks; b += kPerChunk, chunk += Layout<F>::kBytes)
      pack_chunk<F>(from + b * kBlockBytes<F>, least(kPerChunk, blocks - b), {tile, {live, i}, chunk},
                    Constant<kBlock>{});
  }
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::pack_blocks(const PackBlocksParams& p) {
  with_format(p.format, [&](auto format) {
    constexpr Format kFormat = decltype(format)::value;
    if constexpr (!Layout<kFormat>::kHasZeros)  // those are no blocks of a GGUF file (PackedWeight.of_integers)
      parallel_for(ceil_div(p.features, kQuantTile), p.features * p.columns, p.threads,
                   [&](int64_t tile) { pack_tile<kFormat>(p, tile * kQuantTile); });
  });
}
