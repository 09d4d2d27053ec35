// Products of bf16 rows on AMX tiles: 16 features x 32 of k, loaded from the user's weights where they lie,
// are the first operand, 16 rows in pairs of k the second. Of the eight tile registers up to four hold the
// sums of 16 features x 16 rows each; with fewer rows a block has more features.
//
// A row is a column of the second operand, and its sum runs over all of k in tiles of 32: its bits depend
// neither on its place nor on the other rows. What is missing to whole tiles is zero.
#pragma once
#include <utility>

#include "cpu/linear_tile.h"
#include "cpu/tiles.h"

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kTileDepth = 32;  // of k
constexpr int64_t kAhead = 128;     // of k, 256 bytes: weights are requested that long before they are needed

// A number as a type, of this namespace (vec.h).
template <int I>
struct Constant {
  constexpr operator int() const { return I; }
};

// Calls fn(0), ..., fn(N - 1) with constants, unrolled.
template <typename Fn, int... I>
static inline void unroll(const Fn& fn, std::integer_sequence<int, I...>) {
  (fn(Constant<I>{}), ...);
}
template <int N, typename Fn>
static inline void unroll(const Fn& fn) {
  unroll(fn, std::make_integer_sequence<int, N>{});
}

// Copies up to 16 features x 32 of k into a whole tile: one may neither read behind a matrix nor multiply
// what follows a row.
static inline void copy_weights(const bf16* from, int64_t in, int64_t features, int64_t depth, bf16* to) {
  const __mmask32 mask = depth < kTileDepth ? (__mmask32(1) << depth) - 1 : ~__mmask32(0);
  for (int64_t i = 0; i < kTileRows; ++i)
    _mm512_store_si512(to + i * kTileDepth,
                       i < features ? _mm512_maskz_loadu_epi16(mask, from + i * in) : _mm512_setzero_si512());
}

// The tile registers of a block.
template <int NV, int TILE>
struct Block {
  static constexpr int kFeatureTiles = TILE / kTileRows;
  static constexpr int kFirst = NV * kFeatureTiles < 4 ? 4 : NV * kFeatureTiles;  // the rest are sums
  static constexpr int kWeights = kFeatureTiles < 3 ? kFeatureTiles : 3,
                       kRows = kTileRegisters - kFirst - kWeights;
  static constexpr int sums(int f, int v) { return f * NV + v; }
  static constexpr int weights(int f) { return kFirst + f % kWeights; }
  static constexpr int rows(int v) { return kFirst + kWeights + v % kRows; }
  // Rows stay in their registers for all features of a block, or there is only one tile of features.
  static_assert(NV * kFeatureTiles <= 4 && (NV <= kRows || kFeatureTiles == 1));
};

// Requests the weights of a step that comes kAhead later, in the same rows or at the beginning of the next
// block's.
template <int TILE>
static inline void prefetch_weights(const bf16* weight, int64_t in, int64_t k) {
  const bf16* at = k + kAhead < in ? weight + k + kAhead : weight + TILE * in + (k + kAhead - in);
#pragma GCC unroll 16
  for (int64_t i = 0; i < TILE; ++i) __builtin_prefetch(at + i * in);
}

// sums [TILE, NV vectors of rows] of `live` features
template <int NV, int TILE>
static void multiply_block(const uint32_t* packed, int64_t in, const bf16* weight, int64_t live,
                           float* sums) {
  using B = Block<NV, TILE>;
  constexpr int64_t lanes = NV * kWidth;
  alignas(64) bf16 copied[kTileRows * kTileDepth];
  unroll<B::kFeatureTiles * NV>([](auto i) { tile_zero<i>(); });
  for (int64_t k = 0; k < in; k += kTileDepth) {
    prefetch_weights<TILE>(weight, in, k);
    const uint32_t* rows = packed + k / 2 * lanes;
    const int64_t depth = least(kTileDepth, in - k);
    unroll<B::kFeatureTiles>([&](auto tile) {
      constexpr int f = tile;
      const bf16* from = weight + f * kTileRows * in + k;
      const int64_t features = live - f * kTileRows;
      if (depth == kTileDepth && features >= kTileRows) {
        tile_stream<B::weights(f)>(from, in * int64_t(sizeof(bf16)));
      } else {
        copy_weights(from, in, features, depth, copied);
        tile_load<B::weights(f)>(copied, kTileBytes);
      }
      unroll<NV>([&](auto v) {
        if constexpr (f == 0) tile_load<B::rows(v)>(rows + v * kWidth, lanes * int64_t(sizeof(uint32_t)));
        tile_multiply<B::sums(f, v), B::weights(f), B::rows(v)>();
      });
    });
  }
  unroll<B::kFeatureTiles>([&](auto tile) {
    constexpr int f = tile;
    unroll<NV>([&](auto v) {
      tile_store<B::sums(f, v)>(sums + f * kTileRows * lanes + v * kWidth, lanes * int64_t(sizeof(float)));
    });
  });
}

// As many features as there are registers for.
template <int NV>
constexpr int kBlockFeatures = NV == 1   ? 64
                               : NV == 2 ? 32
                                         : 16;

template <int NV>
static void multiply_on_tiles(const uint32_t* packed, int64_t in, const bf16* weight, int64_t live,
                              float* sums) {
  if (NV == 1 && live > 32)
    multiply_block<NV, kBlockFeatures<NV>>(packed, in, weight, live, sums);
  else if (NV <= 2 && live > 16)
    multiply_block<NV, least(32, kBlockFeatures<NV>)>(packed, in, weight, live, sums);
  else
    multiply_block<NV, 16>(packed, in, weight, live, sums);
}

DFLASH_NAMESPACE_END
