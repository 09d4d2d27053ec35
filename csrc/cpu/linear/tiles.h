// The AMX instructions that products use, on eight tile registers of 16 rows of 64 bytes; template arguments
// number them. With DFLASH_EMULATE_TILES the same functions compute in AVX-512 what Intel's manual says of
// the instructions, so that machines without AMX test what uses them.
#pragma once
#include "cpu/base/vec.h"

#if DFLASH_EMULATE_TILES
#include <immintrin.h>

#include <cstdlib>
#endif

DFLASH_NAMESPACE_BEGIN

constexpr int kTileRegisters = 8, kTileRows = 16, kTileBytes = 64;  // a row's
constexpr int kTileWords = kTileBytes / 4;

// Operands that are the same register are an illegal instruction.
template <int SUMS, int A, int B>
constexpr bool kAreDistinct = SUMS != A && SUMS != B && A != B;

#if DFLASH_EMULATE_TILES

struct alignas(64) EmulatedTile {
  uint32_t words[kTileRows][kTileWords];
};

struct EmulatedTiles {
  bool configured = false;
  EmulatedTile tiles[kTileRegisters];
};

static EmulatedTiles& emulated_tiles() {
  static thread_local EmulatedTiles tiles;
  return tiles;
}

static EmulatedTile& emulated_tile(int tile) {
  EmulatedTiles& all = emulated_tiles();
  if (!all.configured) std::abort();  // an illegal instruction
  return all.tiles[tile];
}

static inline void configure_tiles() { emulated_tiles() = {true, {}}; }
static inline void release_tiles() { emulated_tiles().configured = false; }

template <int TILE>
static inline void tile_zero() {
  emulated_tile(TILE) = {};
}

template <int TILE>
static inline void tile_load(const void* from, int64_t stride) {
  EmulatedTile& tile = emulated_tile(TILE);
  for (int i = 0; i < kTileRows; ++i)
    std::memcpy(tile.words[i], static_cast<const char*>(from) + i * stride, kTileBytes);
}

template <int TILE>
static inline void tile_stream(const void* from, int64_t stride) {
  tile_load<TILE>(from, stride);
}

template <int TILE>
static inline void tile_store(void* to, int64_t stride) {
  const EmulatedTile& tile = emulated_tile(TILE);
  for (int i = 0; i < kTileRows; ++i)
    std::memcpy(static_cast<char*>(to) + i * stride, tile.words[i], kTileBytes);
}

// A row's even and odd products are summed apart, each with one rounding, and then added to the accumulator.
// Denormals are zero, whatever the thread's own setting says.
__attribute__((noinline)) static void add_products(EmulatedTile& sums, const EmulatedTile& a,
                                                   const EmulatedTile& b) {
  constexpr unsigned kNearestFlushingQuiet = 0x9fc0;
  const unsigned before = _mm_getcsr();
  _mm_setcsr(kNearestFlushingQuiet);
  asm volatile("" ::: "memory");  // no operand is read before this line, and no sum stored after the next
  for (int m = 0; m < kTileRows; ++m) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int k = 0; k < kTileWords; ++k) {
      const __m512i x = _mm512_set1_epi32(int(a.words[m][k])), y = _mm512_load_si512(b.words[k]);
      const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
      even = _mm512_fmadd_ps((__m512)_mm512_slli_epi32(x, 16), (__m512)_mm512_slli_epi32(y, 16), even);
      odd = _mm512_fmadd_ps((__m512)_mm512_and_si512(x, high), (__m512)_mm512_and_si512(y, high), odd);
    }
    const __m512 sum = _mm512_add_ps(even, odd);
    _mm512_store_ps(sums.words[m], _mm512_add_ps(_mm512_load_ps(sums.words[m]), sum));
  }
  asm volatile("" ::: "memory");
  _mm_setcsr(before);
}

template <int SUMS, int A, int B>
static inline void tile_multiply() {
  static_assert(kAreDistinct<SUMS, A, B>);
  add_products(emulated_tile(SUMS), emulated_tile(A), emulated_tile(B));
}

// Integers are exact, in any order.
template <int SUMS, int A, int B>
static inline void tile_multiply_int8() {
  static_assert(kAreDistinct<SUMS, A, B>);
  EmulatedTile& sums = emulated_tile(SUMS);
  const EmulatedTile &a = emulated_tile(A), &b = emulated_tile(B);
  for (int m = 0; m < kTileRows; ++m)
    for (int k = 0; k < kTileWords; ++k)
      for (int shift = 24; shift >= 0; shift -= 8) {
        const int32_t x = int32_t(a.words[m][k] << shift) >> 24;
        const IVec y = (*reinterpret_cast<const IVec*>(b.words[k]) << shift) >> 24;
        *reinterpret_cast<IVec*>(sums.words[m]) += x * y;
      }
}

#else

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
