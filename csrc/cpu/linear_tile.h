// The products of linear.cpp: a tile of weight rows with a segment of packed rows of x, in float and in pairs
// of bf16.
#pragma once
#include "cpu/vec.h"

// GCC 12 warns about uninitialised vectors in its own intrinsics, and about the sums of rows without columns,
// which nobody asks for.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kSegment = 256;
constexpr int64_t kSum = 64;                       // products (pairs, in bf16) in one running sum
constexpr int64_t kSegmentStride = kSegment + 16;  // rows of a copied tile do not share cache sets

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

#if defined(__AVX512F__)
// 16 x 16 words: out[j * out_step + i] = in[i * in_step + j]
static inline void transpose16(const __m512i (&in)[16], uint32_t* out, int64_t out_step) {
  __m512i a[16], b[16];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    a[2 * i] = _mm512_unpacklo_epi32(in[2 * i], in[2 * i + 1]);
    a[2 * i + 1] = _mm512_unpackhi_epi32(in[2 * i], in[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
    b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
    b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i p = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88),
                  q = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
    const __m512i r = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88),
                  s = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    _mm512_storeu_si512(out + i * out_step, _mm512_shuffle_i32x4(p, r, 0x88));
    _mm512_storeu_si512(out + (4 + i) * out_step, _mm512_shuffle_i32x4(q, s, 0x88));
    _mm512_storeu_si512(out + (8 + i) * out_step, _mm512_shuffle_i32x4(p, r, 0xdd));
    _mm512_storeu_si512(out + (12 + i) * out_step, _mm512_shuffle_i32x4(q, s, 0xdd));
  }
}
#endif

// packed [n, lanes] = x^T for n columns of rows that are `in` apart, lanes past the last row zero
template <typename T>
static void pack_rows(const T* x, int64_t rows, int64_t in, int64_t n, int64_t lanes, float* packed) {
  for (int64_t first = 0; first < lanes; first += kWidth) {
    int64_t k = 0;
#if defined(__AVX512F__)
    for (; k + 16 <= n; k += 16) {
      __m512i tile[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i) {
        const Vec v = first + i < rows ? load(x + (first + i) * in + k) : Vec{};
        tile[i] = reinterpret_cast<const __m512i&>(v);
      }
      transpose16(tile, reinterpret_cast<uint32_t*>(packed + k * lanes + first), lanes);
    }
#endif
    for (; k < n; ++k)
      for (int64_t i = 0; i < kWidth; ++i)
        packed[k * lanes + first + i] = first + i < rows ? to_float(x[(first + i) * in + k]) : 0.0f;
  }
}

template <typename T>
static inline void copy_tile(const T* weight, int64_t in, int64_t live, int tile, int64_t n, float* copied) {
  for (int i = 0; i < tile; ++i) {
    const T* from = weight + least(i, live - 1) * in;  // past the end: repeat the last row, drop the result
    float* to = copied + i * kSegmentStride;
    int64_t k = 0;
    for (; k + kWidth <= n; k += kWidth) {
      store(to + k, load(from + k));
    }
    for (; k < n; ++k) to[k] = to_float(from[k]);
  }
}

// Prefetches one cache line of each row of a tile that is needed soon (three tiles ahead if weights come from
// memory), spread over the 16 values of k in a line.
template <int TILE, typename T>
static inline void prefetch_next(const T* next, int64_t in, int64_t k) {
  constexpr int64_t kLine = 64 / sizeof(T) < 16 ? 64 / sizeof(T) : 16;
  const int64_t row = k % kLine, column = k - row;
  if (row < TILE) __builtin_prefetch(next + row * in + column);
  if constexpr (TILE > kLine)
    if (row + kLine < TILE) __builtin_prefetch(next + (row + kLine) * in + column);
}

// sums [tile, lanes] (+)= copied [tile, n] packed [n, lanes]
template <int NV, int TILE, typename T>
static inline void multiply_tile(const float* copied, const float* packed, int64_t lanes, int64_t n, bool add,
                                 float* sums, const T* next, int64_t in) {
  Vec acc[TILE][NV];
#pragma GCC unroll 32
  for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[i][v] = Vec{};
  for (int64_t k = 0; k < n; ++k) {
    prefetch_next<TILE>(next, in, k);
    Vec x[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) x[v] = load(packed + k * lanes + v * kWidth);
#pragma GCC unroll 32
    for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[i][v] += copied[i * kSegmentStride + k] * x[v];
  }
#pragma GCC unroll 32
  for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      float* at = sums + (i * NV + v) * kWidth;
      store(at, add ? load(at) + acc[i][v] : acc[i][v]);
    }
}

// out [rows, live] = sums^T + bias
template <typename T, typename Out>
static inline void store_tile(const float* sums, int64_t lanes, int64_t first, int64_t rows, int64_t live,
                              const T* bias, Out* out, int64_t out_stride) {
  if (bias) {
    for (int64_t r = first; r < rows; ++r)
      for (int64_t i = 0; i < live; ++i)
        store_one(out + (r - first) * out_stride + i, sums[i * lanes + r] + to_float(bias[i]));
    return;
  }
  int64_t done = 0;
#if defined(__AVX512F__)
  alignas(64) uint32_t turned[256];
  for (; done + 8 <= live; done += 16) {
    const int64_t columns = least(16, live - done);
    if (columns != 16 && columns != 8) break;
    for (int64_t lane = 0; lane < lanes; lane += 16) {
      if (lane >= rows || lane + 16 <= first) continue;
      __m512i tile[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        tile[i] = i < columns ? _mm512_load_si512(sums + (done + i) * lanes + lane) : _mm512_setzero_si512();
      transpose16(tile, turned, 16);
      for (int64_t r = lane < first ? first : lane; r < rows && r < lane + 16; ++r) {
        const float* from = reinterpret_cast<const float*>(turned) + (r - lane) * 16;
        Out* to = out + (r - first) * out_stride + done;
        if (columns == 16)
          store(to, load(from));
        else
          for (int i = 0; i < 8; ++i) store_one(to + i, from[i]);
      }
    }
  }
  done = least(done, live);
#endif
  for (int64_t r = first; r < rows; ++r)
    for (int64_t i = done; i < live; ++i) store_one(out + (r - first) * out_stride + i, sums[i * lanes + r]);
}

template <typename T, int NV, int TILE>
static void run_tile(const float* packed, int64_t in, const T* weight, int64_t live, float* sums) {
  alignas(64) float copied[TILE * kSegmentStride];
  constexpr int64_t lanes = NV * kWidth;
  for (int64_t k = 0; k < in; k += kSegment) {
    const int64_t n = least(kSegment, in - k);
    copy_tile(weight + k, in, live, TILE, n, copied);
    for (int64_t j = 0; j < n; j += kSum)
      multiply_tile<NV, TILE>(copied + j, packed + (k + j) * lanes, lanes, least(kSum, n - j), k + j > 0,
                              sums, weight + (in - k > kSegment ? k + kSegment : 3 * TILE * in) + j, in);
  }
}

#if defined(__AVX512F__)
#define DFLASH_BF16 __attribute__((target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq")))

static bool has_bf16() {
  static const bool has = __builtin_cpu_supports("avx512bf16");
  return has;
}

// packed [ceil(n / 2), lanes]: pairs of bf16, laid out as in pack_rows
static void pack_pairs(const bf16* x, int64_t rows, int64_t in, int64_t n, int64_t lanes, uint32_t* packed) {
  for (int64_t first = 0; first < lanes; first += 16) {
    int64_t k = 0;
    for (; k + 32 <= n; k += 32) {
      __m512i tile[16];
#pragma GCC unroll 16
      for (int i = 0; i < 16; ++i)
        tile[i] = first + i < rows ? _mm512_loadu_si512(x + (first + i) * in + k) : _mm512_setzero_si512();
      transpose16(tile, packed + k / 2 * lanes + first, lanes);
    }
    for (; k < n; k += 2)
      for (int64_t i = 0; i < 16; ++i) {
        const bf16* at = x + (first + i) * in + k;
        uint32_t pair = 0;
        if (first + i < rows) pair = at[0].bits | (k + 1 < n ? uint32_t(at[1].bits) << 16 : 0);
        packed[k / 2 * lanes + first + i] = pair;
      }
  }
}

constexpr int64_t kPairStride = kSegment + 16;  // pairs: a segment is 2 * kSegment of k

template <int NV, int TILE>
DFLASH_BF16 static void multiply_pairs(const uint32_t* copied, const uint32_t* packed, int64_t n, bool add,
                                       float* sums, const uint32_t* next, int64_t in) {
  __m512 acc[TILE][NV];
#pragma GCC unroll 32
  for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[i][v] = _mm512_setzero_ps();
  for (int64_t k = 0; k < n; ++k) {
    prefetch_next<TILE>(next, in / 2, k);
    __m512i x[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) x[v] = _mm512_loadu_si512(packed + (k * NV + v) * 16);
#pragma GCC unroll 32
    for (int i = 0; i < TILE; ++i) {
      const __m512i w = _mm512_set1_epi32(int(copied[i * kPairStride + k]));
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[i][v] = _mm512_dpbf16_ps(acc[i][v], (__m512bh)w, (__m512bh)x[v]);
    }
  }
#pragma GCC unroll 32
  for (int i = 0; i < TILE; ++i)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) {
      float* at = sums + (i * NV + v) * 16;
      _mm512_storeu_ps(at, add ? _mm512_add_ps(_mm512_loadu_ps(at), acc[i][v]) : acc[i][v]);
    }
}

template <int NV, int TILE>
static void run_pairs(const uint32_t* packed, int64_t in, const bf16* weight, int64_t live, float* sums) {
  alignas(64) uint32_t copied[TILE * kPairStride];
  for (int64_t k = 0; k < in; k += 2 * kSegment) {
    const int64_t n = least(2 * kSegment, in - k);
    for (int i = 0; i < TILE; ++i) {
      const bf16* from = weight + least(i, live - 1) * in + k;
      uint32_t* to = copied + i * kPairStride;
      int64_t j = 0;
      for (; j + 32 <= n; j += 32) {
        _mm512_storeu_si512(to + j / 2, _mm512_loadu_si512(from + j));
      }
      for (; j < n; j += 2) to[j / 2] = from[j].bits | (j + 1 < n ? uint32_t(from[j + 1].bits) << 16 : 0);
    }
    const int64_t pairs = (n + 1) / 2;
    for (int64_t j = 0; j < pairs; j += kSum)
      multiply_pairs<NV, TILE>(copied + j, packed + (k / 2 + j) * NV * 16, least(kSum, pairs - j), k + j > 0,
                               sums,
                               reinterpret_cast<const uint32_t*>(
                                   weight + (in - k > 2 * kSegment ? k + 2 * kSegment : 3 * TILE * in)) +
                                   j,
                               in);
  }
}
#endif

DFLASH_NAMESPACE_END
