// The bits of a row depend neither on its place nor on the number of rows: two kernels sum in the same order
// (linear_tile.h). In one a vector lane holds a row, and every weight is broadcast to all lanes, so weights are never
// copied as a matrix. In the other (AVX2, AVX-512) lanes hold weights as they lie in memory, for few rows: up to two
// vectors of them. With AMX, bf16 goes through tiles (linear_amx.h). Where weights are int8, rows are too, and lanes
// hold weights for any number of rows (linear_int8.h; linear_blocks.h for those of files).
//
// A task is a tile of weight rows, which comes from memory once for all rows that fit in a core's cache beside it.
// These are packed by every thread for itself; more of them by the calling thread for all.
#include "cpu/linear/linear.h"

#include "cpu/base/parallel.h"
#include "cpu/linear/linear_blocks.h"

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kParallelProducts = int64_t(3) << 18;  // fewer multiply-adds than this stay on one thread
constexpr int kMaxVecs = kWidth == 16 ? 4 : 2;
constexpr int64_t kMostRows = kMaxVecs * kWidth;  // of a group
constexpr int64_t kOwnRows = 384 << 10;  // bytes of packed rows that every thread has for itself, in its L2 cache

// How rows are multiplied: in groups of kMostRows in lanes, and what is left, one row at least, as the last group. Of
// it, rows of whole vectors are in lanes, of pairs of them if `most_few` is more than a vector, and the leftover ones,
// if there are at most `most_few`, as they lie in memory.
struct Split {
  int64_t groups;                // before the last
  int64_t in_lanes, few, lanes;  // of the last group
  int64_t count;

  Split(int64_t rows, int64_t most_few) : groups((rows - 1) / kMostRows), count(rows) {
    const int64_t last = rows - groups * kMostRows, left = last % (most_few < kWidth ? kWidth : 2 * kWidth);
    few = left <= most_few ? left : 0;
    in_lanes = last - few;
    lanes = ceil_div(in_lanes, kWidth) * kWidth;
  }

  int64_t all_in_lanes() const { return groups * kMostRows + in_lanes; }
  int64_t all_lanes() const { return groups * kMostRows + lanes; }
};

// Where a thread keeps packed rows, and the number of the product that they are of. They are still there when the
// thread reserves as much again.
struct PackedRows {
  Buffer<uint32_t> buffer;
  uint64_t product = 0;

  // Returns true if the thread has not packed the rows of this product yet.
  bool begins(uint64_t number) {
    const bool is_new = product != number;
    product = number;
    return is_new;
  }
};

static uint64_t next_product() {
  static uint64_t last = 0;
  return __atomic_add_fetch(&last, 1, __ATOMIC_RELAXED);
}

// Rows of x as the kernels of a format of weights read them, or of several.
struct Dense {};
struct W8A8 {};
struct Blocks {};
template <typename T, typename Formats>
class Rows;

template <typename T>
class Rows<T, Dense> : public Split {
 public:
  static constexpr bool kInLanes = true, kTakesFew = kWidth >= 8 && !kOnTiles<T>, kInGroups = !kOnTiles<T>;
  static constexpr int64_t kMostFew = kTakesFew ? 2 * kWidth - 1 : 0;
  using ThreadState = std::conditional_t<kOnTiles<T>, TileState, NoTiles>;
  template <int NV>
  static constexpr int kFeaturesPerTask = kFeaturesAtOnce<T, NV>;

  static bool takes(Format format) { return format == Format::kDense; }
  static int64_t packed_bytes(int64_t rows, int64_t in) { return Rows(rows, in).size() * int64_t(sizeof(Word<T>)); }

  Rows(const T* x, int64_t rows, int64_t in, uint64_t product) : Rows(rows, in) {
    static thread_local PackedRows mine;
    packed_ = reinterpret_cast<Word<T>*>(mine.buffer.reserve(size()));
    few_rows_ = packed_ + words_ * all_lanes();
    if (!mine.begins(product)) return;
    for (int64_t g = 0; g < groups; ++g)
      pack_rows(x + g * kMostRows * in, kMostRows, in, kMostRows, packed_ + g * kMostRows * words_);
    if (in_lanes > 0)
      pack_rows(x + groups * kMostRows * in, in_lanes, in, lanes, packed_ + groups * kMostRows * words_);
    // Rows lie two lines past a power of two apart, so that they do not share cache sets.
    if (few > 0) copy_rows(x + all_in_lanes() * in, few, padded(few), in, stride_, few_rows_);
  }

  // sums [kFeaturesPerTask<NV>, lanes] of `live` features
  template <int NV>
  void multiply_lanes(int64_t group, const T* weight, int64_t live, float* sums) const {
    multiply_rows<T, NV>(packed_ + group * kMostRows * words_, in_, weight, live, sums);
  }

#if defined(__AVX2__)
  // sums [n, kTile] of the few rows from `row`
  template <int ROWS>
  void multiply_few_rows(int64_t row, int64_t, const T* weight, int64_t live, float* sums) const {
    multiply_few<T, ROWS>(few_rows_ + row * stride_, stride_, in_, weight, live, sums);
  }
#endif

 private:
  Rows(int64_t rows, int64_t in) : Split(rows, kMostFew), in_(in), words_(words_of<T>(in)), stride_(words_ + 32) {}

  // Few rows are multiplied 8 at once, and what is left as 1, 2, 4, 6 or 8.
  static int64_t padded(int64_t few) { return few % kFewRows == 1 ? few : (few + 1) / 2 * 2; }
  int64_t size() const { return words_ * all_lanes() + stride_ * padded(few); }

  int64_t in_, words_, stride_;
  Word<T>*packed_, *few_rows_;  // groups of [words, lanes]; [few, stride]
};

// Rows in 8 bits: QuantizedRows or BlockRows. A task is a tile of features, whose words are in the lanes.
template <typename T, typename Rounded>
struct RowsInBytes : Rounded {
  static constexpr bool kInLanes = false, kInGroups = true;
  static constexpr int64_t kMostFew = 0;
  template <int>
  static constexpr int kFeaturesPerTask = kQuantTile;

  static int64_t packed_bytes(int64_t rows, int64_t in) { return Rounded(rows, in).size() * int64_t(sizeof(uint32_t)); }

  RowsInBytes(const T* x, int64_t rows, int64_t in, uint64_t product) : Rounded(rows, in) {
    static thread_local PackedRows mine;
    this->place(mine.buffer.reserve(this->size()));
    if (mine.begins(product)) this->round(x, in);
  }
};

template <typename T>
struct Rows<T, W8A8> : RowsInBytes<T, QuantizedRows> {
  using ThreadState = TileState;
  using RowsInBytes<T, QuantizedRows>::RowsInBytes;
  static bool takes(Format format) { return format == Format::kW8A8; }
};

// All formats with blocks, whose rows are the same: weights of several are multiplied at once.
template <typename T>
struct Rows<T, Blocks> : RowsInBytes<T, BlockRows> {
  using ThreadState = NoTiles;
  using RowsInBytes<T, BlockRows>::RowsInBytes;
  static bool takes(Format format) { return has_blocks(format); }
};

// The cost of one output feature for `rows` rows, in multiply-adds.
static inline int64_t products_of(int64_t rows, int64_t in) { return in * least(rows < 4 ? 4 : rows, kMostRows); }

// Features of a part; none where its weight is not of a format that R is for.
template <typename R>
static inline int64_t features_of(const LinearPart& part) {
  return R::takes(part.weight.format) ? part.out_features : 0;
}

// Calls fn(state, part, first, live) for every tile of `size` features of the parts that R is for; each feature costs
// `products` multiply-adds. make() is called for every range of tiles and returns `state`, which is the thread's own or
// one for all.
template <typename R, typename Make, typename Fn>
static inline void over_tiles(const LinearPart* parts, int num_parts, int64_t size, int64_t products, int threads,
                              const Make& make, const Fn& fn) {
  int64_t tiles = 0, features = 0;
  for (int i = 0; i < num_parts; ++i) {
    tiles += ceil_div(features_of<R>(parts[i]), size);
    features += features_of<R>(parts[i]);
  }
  const auto task = [&](const auto& state, int64_t tile) {
    const LinearPart* part = parts;
    for (;; ++part) {
      const int64_t own = ceil_div(features_of<R>(*part), size);
      if (tile < own) break;
      tile -= own;
    }
    fn(state, *part, tile * size, least(size, part->out_features - tile * size));
  };
  const int64_t work = features * products >= kParallelProducts ? kParallelElements : 0;
  parallel_ranges(tiles, work, threads, [&](int64_t begin, int64_t end) {
    const typename R::ThreadState registers;
    const auto& state = make();
    for (int64_t tile = begin; tile < end; ++tile) task(state, tile);
  });
}

// One tile of a part: `live` features from `first`, for all rows.
template <int NV, typename T>
static void one_tile(const Rows<T, Dense>& rows, int64_t first_row, const LinearPart& part, int64_t in, int64_t first,
                     int64_t live) {
  using R = Rows<T, Dense>;
  // 1. Skip the rows that the part does not compute
  const int64_t skip = part.first_row > first_row ? part.first_row - first_row : 0;
  if (skip >= rows.count) return;
  const auto* weight = static_cast<const T*>(part.weight.values) + first * in;
  const auto finish_at = [&](int64_t at) {
    return Finish(part.bias ? static_cast<const T*>(part.bias) + first + at : nullptr, least(kTile, live - at));
  };
  // row `row` of the result, at feature `at` of the tile
  const auto store = [&](int64_t row, int64_t at, const auto& store_to) {
    at += (first_row + row - part.first_row) * part.out_stride + first;
    part.wide ? store_to(static_cast<float*>(part.out) + at) : store_to(static_cast<T*>(part.out) + at);
  };
  // 2. Rows in lanes, those of a group in as many vectors as `vecs` says
  const auto multiply_lanes = [&](int64_t group, int64_t in_lanes, auto vecs) {
    constexpr int kVecs = vecs;
    const int64_t row = group * kMostRows, dropped = skip > row ? skip - row : 0;
    if (dropped >= in_lanes) return;
    alignas(64) float sums[R::template kFeaturesPerTask<kVecs> * kVecs * kWidth];
    rows.template multiply_lanes<kVecs>(group, weight, live, sums);
    for (int64_t at = 0; at < live; at += kTile) {
      const Finish finish = finish_at(at);
      store(row + dropped, at, [&](auto* out) {
        store_tile(sums + at * kVecs * kWidth, kVecs * kWidth, dropped, in_lanes, least(kTile, live - at), finish, out,
                   part.out_stride);
      });
    }
  };
  if constexpr (R::kInGroups)
    for (int64_t group = 0; group < rows.groups; ++group) multiply_lanes(group, kMostRows, Constant<kMaxVecs>{});
  if constexpr (NV > 0) multiply_lanes(rows.groups, rows.in_lanes, Constant<NV>{});
  // 3. Rows as they lie in memory
  if constexpr (R::kTakesFew)
    for (int64_t row = 0; row < rows.few; row += kFewRows) {
      const int64_t n = least(kFewRows, rows.few - row), at = rows.all_in_lanes() + row;
      alignas(64) float sums[kFewRows * kTile];
      const auto multiply = n == 1   ? &R::template multiply_few_rows<1>
                            : n == 2 ? &R::template multiply_few_rows<2>
                            : n <= 4 ? &R::template multiply_few_rows<4>
                            : n <= 6 ? &R::template multiply_few_rows<6>
                                     : &R::template multiply_few_rows<8>;
      (rows.*multiply)(row, n, weight, live, sums);
      const Finish finish = finish_at(0);
      for (int64_t r = 0; r < n; ++r)
        if (at + r >= skip) store(at + r, 0, [&](auto* out) { store_features(out, sums + r * kTile, finish, live); });
    }
}

template <int, typename T>
static void one_tile(const Rows<T, W8A8>& rows, int64_t first_row, const LinearPart& part, int64_t in, int64_t first,
                     int64_t live) {
  // 1. The tile, padded if it is not whole, and what finishes its features
  const auto* weight = static_cast<const uint8_t*>(part.weight.values) + first * row_size(Format::kW8A8, in);
  if (live < kQuantTile) {
    static thread_local Buffer<uint8_t> buffer;
    uint8_t* padded = buffer.reserve(rows.groups * kInt8Group);
    copy_int8_tile(weight, rows.groups, live, padded);
    weight = padded;
  }
  alignas(64) float scales[kQuantTile] = {}, bias[kQuantTile] = {};
  for (int64_t i = 0; i < live; ++i) {
    scales[i] = part.weight.scales[first + i];
    if (part.bias) bias[i] = to_float(static_cast<const T*>(part.bias)[first + i]);
  }
  // 2. Its products with the rows that the part computes
  const int64_t skip = most(0, part.first_row - first_row);
  const auto multiply = [&](auto* out) {
    for (int64_t row = skip / kInt8Rows * kInt8Rows; row < rows.rows; row += kInt8Rows) {
      alignas(64) float sums[kInt8Rows * kQuantTile];
      multiply_int8(rows.block(row), rows.groups, weight, sums);
      for (int64_t r = most(row, skip); r < least(row + kInt8Rows, rows.rows); ++r)
        finish_int8(sums + (r - row) * kQuantTile, scales, part.bias ? bias : nullptr, live,
                    out + (first_row + r - part.first_row) * part.out_stride + first);
    }
  };
  part.wide ? multiply(static_cast<float*>(part.out)) : multiply(static_cast<T*>(part.out));
}

template <int, typename T>
static void one_tile(const Rows<T, Blocks>& rows, int64_t first_row, const LinearPart& part, int64_t in, int64_t first,
                     int64_t live) {
  static thread_local Buffer<uint8_t> padded;
  static thread_local Buffer<float> buffer;
  const int64_t skip = most(0, part.first_row - first_row), from = skip / kBlockRows * kBlockRows;
  if (skip >= rows.rows) return;
  // 1. Its products with the rows that the part computes
  float* sums = buffer.reserve(ceil_div(rows.rows - from, kBlockRows) * kBlockRows * kQuantTile);
  with_format(part.weight.format, [&](auto format) {
    constexpr Format kFormat = decltype(format)::value;
    const auto* tile = static_cast<const uint8_t*>(part.weight.values) + first * row_size(kFormat, in);
    if (live < kQuantTile) {
      uint8_t* whole = padded.reserve(kQuantTile * row_size(kFormat, in));
      copy_block_tile<kFormat>(tile, ceil_div(in, blocks_of(kFormat).columns), live, whole);
      tile = whole;
    }
    multiply_tile<kFormat>(rows, from, in, tile, sums);
  });
  // 2. The bias, and rounding
  alignas(64) float bias[kQuantTile] = {};
  for (int64_t i = 0; part.bias && i < live; ++i) bias[i] = to_float(static_cast<const T*>(part.bias)[first + i]);
  const auto finish = [&](auto* out) {
    for (int64_t r = skip; r < rows.rows; ++r)
      finish_int8(sums + (r - from) * kQuantTile, nullptr, part.bias ? bias : nullptr, live,
                  out + (first_row + r - part.first_row) * part.out_stride + first);
  };
  part.wide ? finish(static_cast<float*>(part.out)) : finish(static_cast<T*>(part.out));
}

template <typename T, int NV, typename R>
static void run_tiles(const T* x, int64_t rows, int64_t first_row, const LinearPart* parts, int num_parts, int64_t in,
                      int threads) {
  const uint64_t product = next_product();
  const auto run = [&](const auto& make) {
    over_tiles<R>(parts, num_parts, R::template kFeaturesPerTask<NV>, products_of(rows, in), threads, make,
                  [&](const R& packed, const LinearPart& part, int64_t first, int64_t live) {
                    one_tile<NV>(packed, first_row, part, in, first, live);
                  });
  };
  const auto pack = [&] { return R(x, rows, in, product); };
  if (R::packed_bytes(rows, in) <= kOwnRows) return run(pack);
  const R packed = pack();
  run([&]() -> const R& { return packed; });
}

// The products of the parts that R is for.
template <typename T, typename R>
static void linear_all(const T* x, int64_t count, int64_t in, const LinearPart* parts, int num_parts, int threads) {
  int64_t features = 0;
  for (int i = 0; i < num_parts; ++i) features += features_of<R>(parts[i]);
  if (features == 0) return;
  const int64_t groups = R::kInGroups ? most(1, kOwnRows / R::packed_bytes(kMostRows, in)) : 1;
  for (int64_t first = 0, n; first < count; first += n) {
    n = least(kMostRows * groups, count - first);
    const int64_t vecs = R::kInLanes ? Split(n, R::kMostFew).lanes / kWidth : 0;
    constexpr int kMost = R::kInLanes ? kMaxVecs : 0;
    const auto run = vecs == 0   ? run_tiles<T, 0, R>
                     : vecs == 1 ? run_tiles<T, least(1, kMost), R>
                     : vecs == 2 ? run_tiles<T, least(2, kMost), R>
                     : vecs == 3 ? run_tiles<T, least(3, kMost), R>
                                 : run_tiles<T, kMost, R>;
    run(x + first * in, n, first, parts, num_parts, in, threads);
  }
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::linear_parts(const void* x, int64_t rows, int64_t in, const LinearPart* parts, int num_parts,
                                      DType dtype, int threads) {
  const auto run = [&](auto type) {
    using T = decltype(type);
    linear_all<T, Rows<T, Dense>>(static_cast<const T*>(x), rows, in, parts, num_parts, threads);
    linear_all<T, Rows<T, W8A8>>(static_cast<const T*>(x), rows, in, parts, num_parts, threads);
    linear_all<T, Rows<T, Blocks>>(static_cast<const T*>(x), rows, in, parts, num_parts, threads);
  };
  dtype == DType::kFloat32 ? run(float()) : run(bf16());
}

bool dflash::DFLASH_ISA::linear_is_shared(int64_t rows, int64_t in, int64_t out_features) {
  return out_features * products_of(rows, in) >= kParallelProducts;
}

void dflash::DFLASH_ISA::linear(const LinearParams& p) {
  const int64_t size = p.dtype == DType::kFloat32 ? sizeof(float) : sizeof(bf16);
  LinearPart parts[kMaxLinearWeights];
  char* out = static_cast<char*>(p.out);
  for (int i = 0; i < p.num_weights; out += p.features[i++] * size)
    parts[i] = {{p.weights[i], p.scales[i], p.format}, p.biases[i], out, p.features[i], p.out_features, 0};
  linear_parts(p.x, p.rows, p.in, parts, p.num_weights, p.dtype, p.threads);
}
