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
#include "cpu/linear_tile.h"
#include "cpu/parallel.h"

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kParallelProducts = int64_t(3) << 19;  // fewer multiply-adds than this stay on one thread
constexpr int kMaxVecs = kWidth == 16 ? 4 : kWidth == 8 ? 2 : 2;
constexpr int kTiles[5] = {0, kWidth == 16 ? 24 : 12, kWidth == 16 ? 12 : 6, kWidth == 16 ? 9 : 3,
                           kWidth == 16 ? 6 : 3};

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
  const auto store = [&](auto* out) {
    store_tile(sums, NV * kWidth, skip, rows, live, bias, out + row * part.out_stride + first_out,
               part.out_stride);
  };
  part.wide ? store(static_cast<float*>(part.out)) : store(static_cast<T*>(part.out));
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
    const auto store = [&](auto* out) {
      for (int64_t i = 0; i < live; ++i)
        store_one(out + first + i,
                  part.bias ? sums[i] + to_float(static_cast<const T*>(part.bias)[first + i]) : sums[i]);
    };
    part.wide ? store(static_cast<float*>(part.out)) : store(static_cast<T*>(part.out));
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
