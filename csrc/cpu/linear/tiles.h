// The AMX instructions that products use, on eight tile registers of 16 rows of 64 bytes; template arguments number
// them. A build with DFLASH_EMULATE_TILES has the same functions without AMX (tests/emulated_tiles.h).
#pragma once
#include "cpu/base/vec.h"

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

// Words of four int8, sums of int32.
template <int SUMS, int A, int B>
static inline void tile_multiply_int8() {
  static_assert(kAreDistinct<SUMS, A, B>);
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUMS), "i"(A), "i"(B));
}
#endif

// Tile registers of this thread while it lives.
struct TileRegisters {
  TileRegisters() { configure_tiles(); }
  ~TileRegisters() { release_tiles(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

DFLASH_NAMESPACE_END
