// What Intel's manual says of the AMX instructions, computed in AVX-512, so that machines without AMX test
// what uses them: cpu/linear/linear_amx.h includes it in builds with DFLASH_EMULATE_TILES.
#pragma once
#include <immintrin.h>

#include <cstdlib>

DFLASH_NAMESPACE_BEGIN

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
  for (int i = 0; i < kTileRows; ++i) std::memcpy(static_cast<char*>(to) + i * stride, tile.words[i], kTileBytes);
}

// A row's even and odd products are summed apart, each with one rounding, and then added to the accumulator.
// Denormals are zero, whatever the thread's own setting says.
__attribute__((noinline)) static void add_products(EmulatedTile& sums, const EmulatedTile& a, const EmulatedTile& b) {
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
        const IVec y = ((*reinterpret_cast<const IVec*>(b.words[k]) << shift) >> 24) & 0xff;
        *reinterpret_cast<IVec*>(sums.words[m]) += x * y;
      }
}

DFLASH_NAMESPACE_END
