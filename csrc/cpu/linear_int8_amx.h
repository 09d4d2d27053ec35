// Products of rows in 8 bits with int8 weights on AMX tiles, as linear_amx.h multiplies bf16. A group's sums
// are whole numbers: they leave the tiles after each group, for its scale.
#pragma once
#include "cpu/linear_amx.h"
#include "cpu/linear_int8.h"

DFLASH_NAMESPACE_BEGIN

// Copies up to 16 features x 64 of k into a whole tile, as copy_weights.
static inline void copy_bytes(const int8_t* from, int64_t in, int64_t features, int64_t depth, int8_t* to) {
  const __mmask64 mask = depth < kTileBytes ? (__mmask64(1) << depth) - 1 : ~__mmask64(0);
  for (int64_t i = 0; i < kTileRows; ++i)
    _mm512_store_si512(to + i * kTileBytes,
                       i < features ? _mm512_maskz_loadu_epi8(mask, from + i * in) : _mm512_setzero_si512());
}

// sums [TILE, NV vectors of rows] of `live` features
template <int NV, int TILE>
static void multiply_int8_block(const QuantizedRows& rows, int64_t in, const int8_t* weight, int64_t live,
                                float* sums) {
  using B = Block<NV, TILE>;
  constexpr int64_t lanes = NV * kWidth;
  alignas(64) int8_t copied[kTileRows * kTileBytes];
  alignas(64) int32_t whole[TILE * lanes];
  std::memset(sums, 0, TILE * lanes * sizeof(float));
  for (int64_t g = 0; g < rows.groups; ++g) {
    unroll<B::kFeatureTiles * NV>([](auto i) { tile_zero<i>(); });
    for (int64_t k = g * kQuantGroup; k < least(in, (g + 1) * kQuantGroup); k += kTileBytes) {
      const int8_t* next = int8_ahead(weight, in, k, TILE);
#pragma GCC unroll 16
      for (int64_t i = 0; i < TILE; ++i) __builtin_prefetch(next + i * in);
      const uint32_t* words = rows.packed + k / kInt8Each * lanes;
      const int64_t depth = least(kTileBytes, in - k);
      unroll<B::kFeatureTiles>([&](auto tile) {
        constexpr int f = tile;
        const int8_t* from = weight + f * kTileRows * in + k;
        const int64_t features = live - f * kTileRows;
        if (depth == kTileBytes && features >= kTileRows) {
          tile_stream<B::weights(f)>(from, in);
        } else {
          copy_bytes(from, in, features, depth, copied);
          tile_load<B::weights(f)>(copied, kTileBytes);
        }
        unroll<NV>([&](auto v) {
          if constexpr (f == 0) tile_load<B::rows(v)>(words + v * kWidth, lanes * int64_t(sizeof(uint32_t)));
          tile_multiply_int8<B::sums(f, v), B::weights(f), B::rows(v)>();
        });
      });
    }
    unroll<B::kFeatureTiles>([&](auto tile) {
      constexpr int f = tile;
      unroll<NV>([&](auto v) {
        tile_store<B::sums(f, v)>(whole + f * kTileRows * lanes + v * kWidth,
                                  lanes * int64_t(sizeof(int32_t)));
      });
    });
    for (int64_t i = 0; i < TILE; ++i)
      for (int64_t at = i * lanes, v = 0; v < NV; ++v, at += kWidth)
        store(sums + at, load(sums + at) + __builtin_convertvector(load_ints(whole + at), Vec) *
                                               load(rows.packed_steps + g * lanes + v * kWidth));
  }
}

template <int NV>
static void multiply_int8_on_tiles(const QuantizedRows& rows, int64_t in, const int8_t* weight, int64_t live,
                                   float* sums) {
  if (NV == 1 && live > 32)
    multiply_int8_block<NV, kBlockFeatures<NV>>(rows, in, weight, live, sums);
  else if (NV <= 2 && live > 16)
    multiply_int8_block<NV, least(32, kBlockFeatures<NV>)>(rows, in, weight, live, sums);
  else
    multiply_int8_block<NV, 16>(rows, in, weight, live, sums);
}

DFLASH_NAMESPACE_END
