// Products of rows in 8 bits with int8 weights on AMX tiles, as linear_amx.h multiplies bf16. A group's sums are whole
// numbers: they leave the tiles after each group, for its scale.
#pragma once
#include "cpu/linear/linear_amx.h"
#include "cpu/linear/linear_int8.h"

DFLASH_NAMESPACE_BEGIN

// sums [TILE, NV vectors of rows] of `live` features
template <int NV, int TILE>
static void multiply_int8_block(const QuantizedRows& rows, int64_t in, const int8_t* weight, int64_t live,
                                float* sums) {
  constexpr int64_t lanes = NV * kWidth;
  alignas(64) int32_t whole[TILE * lanes];
  std::memset(sums, 0, TILE * lanes * sizeof(float));
  for (int64_t g = 0; g < rows.groups; ++g) {
    zero_sums<NV, TILE>();
    for (int64_t k = g * kQuantGroup; k < least(in, (g + 1) * kQuantGroup); k += kTileBytes) {
      prefetch_weights<TILE>(weight, in, k, kInt8Ahead);
      add_tile_products<int8_t, NV, TILE>(weight + k, in, live, in - k, rows.packed + k / kInt8Each * lanes);
    }
    store_sums<NV, TILE>(whole);
    for (int64_t i = 0; i < TILE; ++i)
      for (int64_t at = i * lanes, v = 0; v < NV; ++v, at += kWidth)
        store(sums + at, load(sums + at) + __builtin_convertvector(load_ints(whole + at), Vec) *
                                               load(rows.packed_scales + g * lanes + v * kWidth));
  }
}

template <int NV>
static void multiply_int8_on_tiles(const QuantizedRows& rows, int64_t in, const int8_t* weight, int64_t live,
                                   float* sums) {
  choose_block<NV>(live, [&](auto tile) { multiply_int8_block<NV, tile>(rows, in, weight, live, sums); });
}

DFLASH_NAMESPACE_END
