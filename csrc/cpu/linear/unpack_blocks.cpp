// Rows of a weight in blocks, in float: embeddings whose weight is the head's too, and what a format stands for.
#include "cpu/base/parallel.h"
#include "cpu/linear/blocks.h"

DFLASH_NAMESPACE_BEGIN

template <Format F>
static void unpack_row(const UnpackBlocksParams& p, int64_t row) {
  using L = Layout<F>;
  const int64_t id = clamped(p.ids[row], p.features - 1), first = id / kQuantTile * kQuantTile;
  const TileFeature feature{least(kQuantTile, p.features - first), id - first};
  const auto* tile = static_cast<const uint8_t*>(p.packed) + first * row_size(F, p.columns);
  const auto at = [&](int64_t offset) { return tile + feature.offset<F>(offset); };
  const auto half = [&](int64_t offset) {
    uint16_t bits;
    std::memcpy(&bits, at(offset), 2);
    return half_to_float(bits);
  };
  const auto whole = [&](int64_t offset) {
    float out;
    std::memcpy(&out, at(offset), 4);
    return out;
  };
  const auto byte = [&](int64_t part, int i) { return at(part + i / 2 * kHalves)[i % 2]; };
  float* out = p.out + row * p.columns;
  for (int64_t k = 0, chunk = 0; k < p.columns; k += blocks_of(F).columns, chunk += L::kBytes)
    for (int g = 0; g < L::kGroups && k + g * kBlockGroup < p.columns; ++g) {
      uint32_t lines[L::kCode.bits];
      for (int i = 0; i < L::kCode.bits; ++i)
        std::memcpy(lines + i, at(chunk + L::kCodes + g * L::kGroupBytes + i * kLine), 4);
      float minimum = 0.0f;
      if (L::kCode.has_minima)
        minimum = L::kIsSuper   ? -half(chunk + kHalves) * float(byte(chunk + L::kMinima, g))
                  : L::kIsFloat ? whole(chunk + L::kMinima + L::float_line(g))
                                : half(chunk + L::kMinima + g * kHalves);
      const int offset = L::kHasZeros ? at(chunk + L::kZeros)[g] : L::kCode.offset;
      const int64_t live = least(kBlockGroup, p.columns - k - g * kBlockGroup);
      for (int i = 0; i < live; ++i) {
        const int w = i / 4, shift = 8 * (i % 4), part = i / L::kCode.scale_columns;
        float scale = 0.0f;
        if constexpr (L::kIsSuper) {
          const uint8_t bits = byte(chunk + L::kScales, g * L::kParts + part);
          scale = half(chunk) * float(L::kCode.has_minima ? bits : int8_t(bits));
        } else if constexpr (L::kIsFloat) {
          scale = whole(chunk + L::float_line(g));
        } else if constexpr (L::kCode.scales == Scales::kExponent) {
          scale = exponent_to_float(at(chunk)[g]);
        } else {
          scale = half(chunk + g * kHalves);
        }
        int code;
        if constexpr (L::kCode.bits == 8) {
          code = lines[w] >> shift & 255;
        } else {
          code = lines[w % 4] >> (shift + w / 4 * 4) & 15;
          if constexpr (L::kCode.bits == 5) code |= (lines[4] >> (shift + w) & 1) << 4;
          if constexpr (L::kCode.bits == 6) code |= (lines[4 + w / 4] >> (shift + 2 * (w % 4)) & 3) << 4;
        }
        if constexpr (L::kCode.table != nullptr) code = L::kCode.table[code];
        out[k + g * kBlockGroup + i] = scale * float(code - offset) + minimum;
      }
    }
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::unpack_blocks(const UnpackBlocksParams& p) {
  with_format(p.format, [&](auto format) {
    parallel_for(p.rows, p.rows * p.columns, p.threads,
                 [&](int64_t row) { unpack_row<decltype(format)::value>(p, row); });
  });
}
