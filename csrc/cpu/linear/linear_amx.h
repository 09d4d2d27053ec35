// Products of bf16 rows on AMX tiles: 16 features x 32 of k, loaded from the user's weights where they lie, are the
// first operand, 16 rows in pairs of k the second. Of the eight tile registers up to four hold the sums of 16 features
// x 16 rows each; with fewer rows a block has more features.
//
// A row is a column of the second operand, and its sum runs over all of k in tiles of 32: its bits depend neither on
// its place nor on the other rows. Groups of 16 are padded with zero words.
#pragma once
#include "cpu/linear/linear_tile.h"

#if DFLASH_TILES
// ---- the AMX instructions, on eight tile registers of 16 rows of 64 bytes; template arguments number them. A build
// with DFLASH_EMULATE_TILES has the same functions without AMX (tests/emulated_tiles.h).

DFLASH_NAMESPACE_BEGIN

constexpr int kTileRegisters = 8, kTileRows = 16, kTileBytes = 64;  // a row's
constexpr int kTileWords = kTileBytes / 4;

// Operands that are the same register are an illegal instruction.
template <int SUMS, int A, int B>
constexpr bool kAreDistinct = SUMS != A && SUMS != B && A != B;

DFLASH_NAMESPACE_END

#if DFLASH_EMULATE_TILES
#include "emulated_tiles.h"
#endif

DFLASH_NAMESPACE_BEGIN

#if !DFLASH_EMULATE_TILES
// GCC's own intrinsics name tiles by preprocessor tokens, and do not tell the compiler that memory is read.
struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};
};

static inline void configure_tiles() {
  TileConfig config;
  for (int i = 0; i < kTileRegisters; ++i) config.bytes[i] = kTileBytes, config.rows[i] = kTileRows;
  asm volatile("ldtilecfg %0" ::"m"(config));
}
static inline void release_tiles() { asm volatile("tilerelease"); }

template <int TILE>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

template <int TILE>
static inline void tile_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

// For what is read once: it need not stay in the caches.
template <int TILE>
static inline void tile_stream(const void* from, int64_t stride) {
  asm volatile("tileloaddt1 (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(TILE) : "memory");
}

template <int TILE>
static inline void tile_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(TILE) : "memory");
}

template <int SUMS, int A, int B>
static inline void tile_multiply() {
  static_assert(kAreDistinct<SUMS, A, B>);
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}

// Words of four bytes, those of A with a sign and those of B without; sums of int32.
template <int SUMS, int A, int B>
static inline void tile_multiply_int8() {
  static_assert(kAreDistinct<SUMS, A, B>);
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}
#endif

// Tile registers of this thread while it lives.
struct TileRegisters {
  TileRegisters() { configure_tiles(); }
  ~TileRegisters() { release_tiles(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// ---- products

// The tile registers of a block.
template <int NV, int TILE>
struct Block {
  static constexpr int kFeatureTiles = TILE / kTileRows;
  static constexpr int kFirst = NV * kFeatureTiles < 4 ? 4 : NV * kFeatureTiles;  // the rest are sums
  static constexpr int kWeights = kFeatureTiles < 3 ? kFeatureTiles : 3, kRows = kTileRegisters - kFirst - kWeights;
  static constexpr int sums(int f, int v) { return f * NV + v; }
  static constexpr int weights(int f) { return kFirst + f % kWeights; }
  static constexpr int rows(int v) { return kFirst + kWeights + v % kRows; }
  // Rows stay in their registers for all features of a block, or there is only one tile of features.
  static_assert(NV * kFeatureTiles <= 4 && (NV <= kRows || kFeatureTiles == 1));
};

// The features of a block: as many as there are registers for.
template <int NV>
constexpr int kBlockFeatures = NV == 1   ? 64
                               : NV == 2 ? 32
                                         : 16;

// Calls fn(features) with the constant of the smallest block that holds `live` features.
template <int NV, typename Fn>
static inline void choose_block(int64_t live, const Fn& fn) {
  if (NV == 1 && live > 32)
    fn(Constant<kBlockFeatures<NV>>{});
  else if (NV <= 2 && live > 16)
    fn(Constant<least(32, kBlockFeatures<NV>)>{});
  else
    fn(Constant<16>{});
}

template <int NV, int TILE>
static inline void zero_sums() {
  unroll<Block<NV, TILE>::kFeatureTiles * NV>([](auto i) { tile_zero<i>(); });
}

// sums [TILE, NV vectors of rows], words of 32 bits
template <int NV, int TILE>
static inline void store_sums(void* sums) {
  using B = Block<NV, TILE>;
  constexpr int64_t kStride = NV * kWidth * sizeof(float);
  unroll<B::kFeatureTiles>([&](auto tile) {
    constexpr int f = tile;
    unroll<NV>([&](auto v) {
      tile_store<B::sums(f, v)>(static_cast<char*>(sums) + f * kTileRows * kStride + v * kTileBytes, kStride);
    });
  });
}

// Copies up to 16 features, `stride` bytes apart, into a whole tile: it must not read past the matrix, nor multiply
// what follows a row.
static inline void copy_weights(const char* from, int64_t stride, int64_t features, int64_t bytes, char* to) {
  const __mmask64 mask = bytes < kTileBytes ? (__mmask64(1) << bytes) - 1 : ~__mmask64(0);
  for (int64_t i = 0; i < kTileRows; ++i)
    _mm512_store_si512(to + i * kTileBytes,
                       i < features ? _mm512_maskz_loadu_epi8(mask, from + i * stride) : _mm512_setzero_si512());
}

// Adds the products of the next 64 bytes of `live` features, of which the rows have `bytes`.
template <typename T, int NV, int TILE>
static inline void add_tile_products(const T* weight, int64_t in, int64_t live, int64_t bytes, const uint32_t* packed) {
  using B = Block<NV, TILE>;
  const int64_t stride = in * int64_t(sizeof(T));
  unroll<B::kFeatureTiles>([&](auto tile) {
    constexpr int f = tile;
    const char* from = reinterpret_cast<const char*>(weight) + f * kTileRows * stride;
    const int64_t features = live - f * kTileRows;
    if (bytes >= kTileBytes && features >= kTileRows) {
      tile_stream<B::weights(f)>(from, stride);
    } else {
      alignas(64) char copied[kTileRows * kTileBytes];
      copy_weights(from, stride, features, bytes, copied);
      tile_load<B::weights(f)>(copied, kTileBytes);
    }
    unroll<NV>([&](auto v) {
      if constexpr (f == 0) tile_load<B::rows(v)>(packed + v * kWidth, NV * kWidth * sizeof(uint32_t));
      tile_multiply<B::sums(f, v), B::weights(f), B::rows(v)>();
    });
  });
}

// Requests what add_tile_products takes `ahead` elements later.
template <int TILE, typename T>
static inline void prefetch_weights(const T* weight, int64_t in, int64_t k, int64_t ahead) {
  const T* at = weight + element_ahead(in, k + ahead, TILE);
#pragma GCC unroll 16
  for (int64_t i = 0; i < TILE; ++i) __builtin_prefetch(at + i * in);
}

// sums [TILE, NV vectors of rows] of `live` features
template <int NV, int TILE>
static void multiply_block(const uint32_t* packed, int64_t in, const bf16* weight, int64_t live, float* sums) {
  constexpr int64_t kDepth = kTileBytes / sizeof(bf16), kAhead = 4 * kDepth;  // of k
  zero_sums<NV, TILE>();
  for (int64_t k = 0; k < in; k += kDepth) {
    prefetch_weights<TILE>(weight, in, k, kAhead);
    add_tile_products<bf16, NV, TILE>(weight + k, in, live, (in - k) * int64_t(sizeof(bf16)),
                                      packed + k / 2 * NV * kWidth);
  }
  store_sums<NV, TILE>(sums);
}

DFLASH_NAMESPACE_END
#endif

DFLASH_NAMESPACE_BEGIN

// ---- the kernel of the rows in lanes, by their dtype

struct NoTiles {
  NoTiles() {}
};
#if DFLASH_TILES
constexpr bool kHasTiles = true;
using TileState = TileRegisters;
#else
constexpr bool kHasTiles = false;
using TileState = NoTiles;
template <int NV>
constexpr int kBlockFeatures = kTile;
#endif
template <typename T>
constexpr bool kOnTiles = kHasTiles && sizeof(T) == 2;
template <typename T, int NV>
constexpr int kFeaturesAtOnce = kOnTiles<T> ? kBlockFeatures<NV> : kTile;

// sums [kFeaturesAtOnce<T, NV>, NV vectors of rows] of `live` features
template <typename T, int NV>
static inline void multiply_rows(const Word<T>* packed, int64_t in, const T* weight, int64_t live, float* sums) {
#if DFLASH_TILES
  if constexpr (kOnTiles<T>)
    choose_block<NV>(live, [&](auto tile) { multiply_block<NV, tile>(packed, in, weight, live, sums); });
  else
#endif
    multiply_in_lanes<T, NV>(packed, in, weight, live, sums);
}

DFLASH_NAMESPACE_END
