// out[r][n] = sum_k x[r][k] weight[n][k] + bias[n]
//
// The bits of a row depend neither on its place nor on the number of rows: both kernels of linear_tile.h sum
// in the same order. In one a vector lane holds a row, up to 64 of them, and every weight is broadcast to all
// lanes, so that the weights are never copied as a matrix. In the other (AVX-512) the lanes hold weights as
// they lie in memory; it takes the few rows that would leave lanes idle. With AMX, bf16 goes through tiles
// instead (linear_amx.h), however many rows there are.
//
// int8 weights are widened to what a word is made of, which is exact, and the sums are multiplied by scales.
//
// A task is a tile of weight rows, which comes from memory once for all rows. Tiles are spread over threads.
#include "cpu/linear.h"

#include "cpu/buffer.h"
#include "cpu/linear_tile.h"
#include "cpu/parallel.h"
#if DFLASH_TILES
#include "cpu/linear_amx.h"
#endif

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kParallelProducts = int64_t(3) << 19;  // fewer multiply-adds than this stay on one thread
constexpr int kMaxVecs = kWidth == 16 ? 4 : 2;
constexpr int64_t kMostFew = 12;  // rows past the last whole vector that are cheaper as they are

// Rows of x as the kernels read them: the first in vectors of lanes, the rest as they are.
template <typename T>
struct Rows {
  int64_t count, in;
  int64_t in_lanes, few;  // of `count`
  const Word<T>* packed;  // [words, vectors]
  const Word<T>* apart;   // [few, stride]
  int64_t stride;
};

// Features of a task, and what a thread holds while it computes.
template <typename T, int NV>
constexpr int kFeatures = kTile;
template <typename T>
constexpr bool kOnTiles = false;
struct Nothing {
  Nothing() {}
};

#if DFLASH_TILES
template <int NV>
constexpr int kFeatures<bf16, NV> = kBlockFeatures<NV>;
template <>
constexpr bool kOnTiles<bf16> = true;
#endif

// The cost of one output feature for `rows` rows, in multiply-adds.
static inline int64_t products_of(int64_t rows, int64_t in) {
  return in * least(rows < 4 ? 4 : rows, int64_t(kMaxVecs * kWidth));
}

// Calls fn(part, first, live) for every tile of `size` features of every part; each feature costs `products`
// multiply-adds. Threads make a Holder for the time that they compute.
template <typename Holder, typename Fn>
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
  const int64_t work = features * products >= kParallelProducts ? kParallelElements : 0;
  parallel_ranges(tiles, work, threads, [&](int64_t begin, int64_t end) {
    const Holder holder;
    for (int64_t tile = begin; tile < end; ++tile) task(tile);
  });
}

// One tile of a part: features `first` and on, `live` of them, for all rows.
template <typename T, int NV, typename W>
static void one_tile(const Rows<T>& rows, int64_t first_row, const LinearPart& part, const W* weight,
                     int64_t first, int64_t live) {
  // skip the rows that the part does not compute
  const int64_t skip = part.first_row > first_row ? part.first_row - first_row : 0;
  if (skip >= rows.count) return;
  const auto finish_at = [&](int64_t at) {
    return Finish(part.weight.scales ? part.weight.scales + first + at : nullptr,
                  part.bias ? static_cast<const T*>(part.bias) + first + at : nullptr,
                  least(kTile, live - at));
  };
  // row `row` of the result, at feature `at` of the tile
  const auto store = [&](int64_t row, int64_t at, const auto& store_to) {
    at += (first_row + row - part.first_row) * part.out_stride + first;
    part.wide ? store_to(static_cast<float*>(part.out) + at) : store_to(static_cast<T*>(part.out) + at);
  };
  if constexpr (NV > 0)
    if (skip < rows.in_lanes) {
      alignas(64) float sums[kFeatures<T, NV> * NV * kWidth];
#if DFLASH_TILES
      if constexpr (kOnTiles<T>)
        multiply_on_tiles<NV>(rows.packed, rows.in, weight + first * rows.in, live, sums);
      else
#endif
        multiply_in_lanes<T, NV>(rows.packed, rows.in, weight + first * rows.in, live, sums);
      for (int64_t at = 0; at < live; at += kTile) {
        const Finish finish = finish_at(at);
        store(skip, at, [&](auto* out) {
          store_tile(sums + at * NV * kWidth, NV * kWidth, skip, rows.in_lanes, least(kTile, live - at),
                     finish, out, part.out_stride);
        });
      }
    }
#if defined(__AVX512F__)
  if constexpr (!kOnTiles<T>)
    for (int64_t row = 0; row < rows.few; row += kFewRows) {
      const int64_t n = least(kFewRows, rows.few - row);
      alignas(64) float sums[(kFewRows + 1) * kTile];
      const auto multiply = n == 1   ? multiply_few<T, 1, W>
                            : n == 2 ? multiply_few<T, 2, W>
                            : n <= 4 ? multiply_few<T, 4, W>
                            : n <= 6 ? multiply_few<T, 6, W>
                                     : multiply_few<T, 8, W>;
      multiply(rows.apart + row * rows.stride, rows.stride, rows.in, weight + first * rows.in, live, sums);
      const Finish finish = finish_at(0);
      for (int64_t r = 0; r < n; ++r)
        if (rows.in_lanes + row + r >= skip)
          store(rows.in_lanes + row + r, 0,
                [&](auto* out) { store_features(out, sums + r * kTile, finish, live); });
    }
#endif
}

template <typename T, int NV>
static void run_tiles(const Rows<T>& rows, int64_t first_row, const LinearPart* parts, int num_parts,
                      int threads) {
#if DFLASH_TILES
  using Holder = std::conditional_t<kOnTiles<T>, TileRegisters, Nothing>;
#else
  using Holder = Nothing;
#endif
  over_tiles<Holder>(parts, num_parts, kFeatures<T, NV>, products_of(rows.count, rows.in), threads,
                     [&](const LinearPart& part, int64_t first, int64_t live) {
                       const auto run = [&](const auto* weight) {
                         one_tile<T, NV>(rows, first_row, part, weight, first, live);
                       };
                       part.weight.scales ? run(static_cast<const int8_t*>(part.weight.values))
                                          : run(static_cast<const T*>(part.weight.values));
                     });
}

// Rows that are not in lanes: their words, with zeros up to a whole number of what multiply_few takes. Rows
// lie two lines past a power of two apart, so that they do not share cache sets.
template <typename T>
static void copy_rows(const T* x, const Rows<T>& rows, Word<T>* apart) {
  const int64_t all = (rows.few + kFewRows - 1) / kFewRows * kFewRows;
  for (int64_t r = 0; r < all; ++r)
    for (int64_t k = 0; k < rows.stride; k += kWidth) {
      const int64_t left = rows.in - k * kEach<T>;
      const bool exists = r < rows.few && left > 0;
      store(reinterpret_cast<float*>(apart) + r * rows.stride + k,
            exists ? load_some<T>(x + r * rows.in + k * kEach<T>, left) : Vec{});
    }
}

template <typename T>
static void linear_all(const T* x, int64_t rows_in, int64_t in, const LinearPart* parts, int num_parts,
                       int threads) {
  static thread_local Buffer<Word<T>> buffer;
  constexpr int64_t most_few = kWidth == 16 && !kOnTiles<T> ? kMostFew : 0;
  const int64_t words = words_of<T>(in), stride = words + 32;
  for (int64_t first = 0, n; first < rows_in; first += n) {
    n = least(kMaxVecs * kWidth, rows_in - first);
    const int64_t few = n % kWidth <= most_few ? n % kWidth : 0, in_lanes = n - few;
    const int64_t vecs = (in_lanes + kWidth - 1) / kWidth, lanes = vecs * kWidth;
    Word<T>* packed = buffer.reserve(words * lanes + stride * (few + kFewRows));
    Word<T>* apart = packed + words * lanes;
    const Rows<T> rows{n, in, in_lanes, few, packed, apart, stride};
    if (in_lanes > 0) pack_rows(x + first * in, in_lanes, in, lanes, packed);
    if (few > 0) copy_rows(x + (first + in_lanes) * in, rows, apart);
    const auto run = vecs == 0   ? run_tiles<T, 0>
                     : vecs == 1 ? run_tiles<T, 1>
                     : vecs == 2 ? run_tiles<T, 2>
                     : vecs == 3 ? run_tiles<T, least(3, kMaxVecs)>
                                 : run_tiles<T, least(4, kMaxVecs)>;
    run(rows, first, parts, num_parts, threads);
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
    parts[i] = {{p.weights[i], p.scales[i]}, p.biases[i], out, p.features[i], p.out_features, 0};
  linear_parts(p.x, p.rows, p.in, parts, p.num_weights, p.dtype, p.threads);
}

}  // namespace dflash::DFLASH_ISA
