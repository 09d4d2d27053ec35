// out[r][n] = sum_k x[r][k] weight[n][k] + bias[n]
//
// Each vector lane holds a row, and every weight is broadcast to all lanes, so the weights are read once and
// never copied as a matrix. A row's bits depend neither on its place nor on the number of rows. Up to 64 rows
// are taken at once.
//
// A task is a tile of weight rows: 24 accumulators in registers over 1 to 4 vectors of rows. Tiles are spread
// over threads. A single row would leave most lanes idle, so its output features go into the lanes (AVX-512).
// Partial sums of kSum products are added up, because one long sum loses more precision. bf16 uses vdpbf16ps,
// a pair of k at a time, if the processor has it, and is widened otherwise.
#include "cpu/linear.h"

#include "cpu/buffer.h"
#include "cpu/parallel.h"
#if defined(__AVX512F__)
// GCC 12 warns about uninitialised vectors in its own intrinsics.
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#include <immintrin.h>
#endif

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kSegment = 256;
constexpr int64_t kSum = 64;                             // products (pairs, in bf16) in one running sum
constexpr int64_t kSegmentStride = kSegment + 16;        // rows of a copied tile do not share cache sets
constexpr int64_t kParallelProducts = int64_t(3) << 19;  // fewer multiply-adds than this stay on one thread
constexpr int kMaxVecs = kWidth == 16 ? 4 : kWidth == 8 ? 2 : 2;
constexpr int kTiles[5] = {0, kWidth == 16 ? 24 : 12, kWidth == 16 ? 12 : 6, kWidth == 16 ? 9 : 3,
                           kWidth == 16 ? 6 : 3};

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
template <typename T>
static inline void store_tile(const float* sums, int64_t lanes, int64_t first, int64_t rows, int64_t live,
                              const T* bias, T* out, int64_t out_stride) {
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
        T* to = out + (r - first) * out_stride + done;
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

template <typename T, int NV, int TILE>
static void one_tile(const void* packed, bool pairs, int64_t in, const LinearPart& part, int64_t first_out,
                     int64_t live, int64_t rows, int64_t skip, int64_t row) {
  alignas(64) float sums[(TILE + 16) * NV * kWidth];  // store_tile turns 16 columns at a time
  const T* weight = static_cast<const T*>(part.weight) + first_out * in;
  if (!pairs) run_tile<T, NV, TILE>(static_cast<const float*>(packed), in, weight, live, sums);
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 2)
    if (pairs) run_pairs<NV, TILE>(static_cast<const uint32_t*>(packed), in, weight, live, sums);
#endif
  const T* bias = part.bias ? static_cast<const T*>(part.bias) + first_out : nullptr;
  store_tile<T>(sums, NV * kWidth, skip, rows, live, bias,
                static_cast<T*>(part.out) + row * part.out_stride + first_out, part.out_stride);
}

#if defined(__AVX512F__)
constexpr bool kSingleRow = true;  // one row takes its own path
#else
constexpr bool kSingleRow = false;
#endif

// The cost of one output feature for `rows` rows, in multiply-adds; a partly filled vector counts as full.
static inline int64_t products_of(int64_t rows, int64_t in) {
  if (rows == 1 && kSingleRow) return in * 4;
  return in * least((rows + kWidth - 1) / kWidth, int64_t(kMaxVecs)) * 16;
}

// Calls fn(part, first, live) for every tile of `size` output features of every part; each feature costs
// `products` multiply-adds.
template <typename Fn>
static inline void over_tiles(const LinearPart* parts, int num_parts, int64_t size, int64_t products,
                              int threads, const Fn& fn) {
  int64_t tiles = 0, features = 0;
  for (int i = 0; i < num_parts; ++i) {
    tiles += (parts[i].out_features + size - 1) / size;
    features += parts[i].out_features;
  }
  const auto task = [&](int64_t tile) {
    const LinearPart* part = parts;
    for (;; ++part) {
      const int64_t own = (part->out_features + size - 1) / size;
      if (tile < own) break;
      tile -= own;
    }
    fn(*part, tile * size, least(size, part->out_features - tile * size));
  };
  parallel_for(tiles, features * products >= kParallelProducts ? kParallelElements : 0, threads, task);
}

// The last tile of a matrix shrinks to a third or two thirds if that is enough.
template <typename T, int NV>
static void run_tiles(const void* packed, bool pairs, int64_t rows, int64_t first_row, int64_t in,
                      const LinearPart* parts, int num_parts, int threads) {
  constexpr int TILE = kTiles[NV];
  const auto task = [&](const LinearPart& part, int64_t first, int64_t live) {
    // skip the rows of this group that the part does not compute
    const int64_t skip = part.first_row > first_row ? part.first_row - first_row : 0;
    if (skip >= rows) return;
    const int64_t row = first_row + skip - part.first_row;
    if (live <= TILE / 3)
      one_tile<T, NV, TILE / 3>(packed, pairs, in, part, first, live, rows, skip, row);
    else if (live <= TILE / 3 * 2)
      one_tile<T, NV, TILE / 3 * 2>(packed, pairs, in, part, first, live, rows, skip, row);
    else
      one_tile<T, NV, TILE>(packed, pairs, in, part, first, live, rows, skip, row);
  };
  over_tiles(parts, num_parts, TILE, products_of(NV * kWidth, in), threads, task);
}

#if defined(__AVX512F__)
// A single row: output features are in the lanes and x is broadcast. Weights are transposed on the fly.
// Products and summation order match those for many rows, and so do the bits.
template <typename T>
static void single_row(const T* x, int64_t in, bool pairs, const LinearPart* parts, int num_parts,
                       int threads) {
  constexpr int64_t kLanes = 64;
  const int64_t step = pairs ? 2 * kSum : kSum;
  static thread_local Buffer<float> floats;
  static thread_local Buffer<uint32_t> words;
  float* wide = floats.reserve(in);
  uint32_t* paired = words.reserve(in / 2 + 1);  // an odd last element is paired with zero
  if (pairs) {
    paired[in / 2] = 0;
    std::memcpy(paired, x, in * sizeof(T));
  } else {
    for (int64_t k = 0; k < in; ++k) wide[k] = to_float(x[k]);
  }
  const auto task = [&](const LinearPart& part, int64_t first, int64_t live) {
    if (part.first_row > 0) return;
    alignas(64) float sums[kLanes];
    const T* weight = static_cast<const T*>(part.weight) + first * in;
    for (int64_t k = 0; k < in; k += step) {
      const int64_t n = least(step, in - k), line = 64 / int64_t(sizeof(T));
      const T* next = k + step < in ? weight + k + step : weight + kLanes * in;
      for (int64_t i = 0; i < live; ++i)
        for (int64_t j = 0; j < step; j += line) __builtin_prefetch(next + i * in + j);
      if constexpr (sizeof(T) == 2) {
        if (pairs) {
          alignas(64) uint32_t turned[kSum * kLanes];
          pack_pairs(weight + k, live, in, n, kLanes, turned);
          multiply_pairs<4, 1>(paired + k / 2, turned, (n + 1) / 2, k > 0, sums, paired, 0);
          continue;
        }
      }
      alignas(64) float turned[kSum * kLanes];
      pack_rows(weight + k, live, in, n, kLanes, turned);
      multiply_tile<4, 1>(wide + k, turned, kLanes, n, k > 0, sums, wide, 0);
    }
    T* out = static_cast<T*>(part.out) + first;
    for (int64_t i = 0; i < live; ++i)
      store_one(out + i,
                part.bias ? sums[i] + to_float(static_cast<const T*>(part.bias)[first + i]) : sums[i]);
  };
  over_tiles(parts, num_parts, kLanes, products_of(1, in), threads, task);
}
#endif

template <typename T>
static void linear_all(const T* x, int64_t rows, int64_t in, const LinearPart* parts, int num_parts,
                       int threads) {
  static thread_local Buffer<float> buffer;
  bool pairs = false;
#if defined(__AVX512F__)
  pairs = sizeof(T) == 2 && has_bf16();
  if (rows == 1) {
    single_row(x, in, pairs, parts, num_parts, threads);
    return;
  }
#endif
  for (int64_t first = 0; first < rows; first += kMaxVecs * kWidth) {
    const int64_t n = least(kMaxVecs * kWidth, rows - first), vecs = (n + kWidth - 1) / kWidth,
                  lanes = vecs * kWidth;
    void* packed = buffer.reserve((in + 1) * lanes);
#if defined(__AVX512F__)
    if constexpr (sizeof(T) == 2)
      if (pairs) pack_pairs(x + first * in, n, in, in, lanes, static_cast<uint32_t*>(packed));
#endif
    if (!pairs) pack_rows(x + first * in, n, in, in, lanes, static_cast<float*>(packed));
    switch (vecs) {
      case 1:
        run_tiles<T, 1>(packed, pairs, n, first, in, parts, num_parts, threads);
        break;
      case 2:
        run_tiles<T, 2>(packed, pairs, n, first, in, parts, num_parts, threads);
        break;
#if DFLASH_WIDTH == 16
      case 3:
        run_tiles<T, 3>(packed, pairs, n, first, in, parts, num_parts, threads);
        break;
      default:
        run_tiles<T, 4>(packed, pairs, n, first, in, parts, num_parts, threads);
#endif
    }
  }
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void linear_parts(const void* x, int64_t rows, int64_t in, const LinearPart* parts, int num_parts,
                  DType dtype, int threads) {
  if (dtype == DType::kFloat32)
    linear_all(static_cast<const float*>(x), rows, in, parts, num_parts, threads);
  else
    linear_all(static_cast<const bf16*>(x), rows, in, parts, num_parts, threads);
}

bool linear_is_shared(int64_t rows, int64_t in, int64_t out_features) {
  return out_features * products_of(rows, in) >= kParallelProducts;
}

void linear(const LinearParams& p) {
  const int64_t size = p.dtype == DType::kFloat32 ? sizeof(float) : sizeof(bf16);
  LinearPart parts[kMaxLinearWeights];
  char* out = static_cast<char*>(p.out);
  for (int i = 0; i < p.num_weights; out += p.features[i++] * size)
    parts[i] = {p.weights[i], p.biases[i], out, p.features[i], p.out_features, 0};
  linear_parts(p.x, p.rows, p.in, parts, p.num_weights, p.dtype, p.threads);
}

}  // namespace dflash::DFLASH_ISA
