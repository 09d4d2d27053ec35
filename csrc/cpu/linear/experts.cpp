// A mixture of experts. Pairs (row, slot) are sorted by expert, so its weights are read once. With many experts in use
// each is a task, else the features of one are spread over the threads. Products are those of linear.cpp, or, for
// transposed weights, have their features in the lanes; neither lets a row's bits depend on the other rows.
#include "cpu/base/parallel.h"
#include "cpu/linear/linear.h"

DFLASH_NAMESPACE_BEGIN

constexpr int64_t kSum = 64;                     // products in one running sum
constexpr int kTileVecs = kWidth == 16 ? 4 : 2;  // of features, for transposed weights
constexpr int64_t kTile = kTileVecs * kWidth;
constexpr int kTileRows = 4;
constexpr int64_t kAhead = 16;  // rows of a transposed weight, requested before they are needed

// The pairs of a call by expert, and the experts that have any. Pair `row * top_k + slot` is the place[pair]-th; -1 if
// its id is no expert's.
struct Routing {
  int64_t* place;    // [pairs]
  int64_t* pairs;    // [pairs], those of one expert after another
  int64_t* first;    // [num_experts + 1]: where an expert's pairs begin
  int64_t* touched;  // [num_experts]
  int64_t num_touched;
};

static Routing route(const ExpertsParams& p) {
  static thread_local Buffer<int64_t> buffer;
  const int64_t pairs = p.rows * p.top_k;
  Routing r;
  r.place = buffer.reserve(2 * pairs + 2 * p.num_experts + 1);
  r.pairs = r.place + pairs, r.first = r.pairs + pairs, r.touched = r.first + p.num_experts + 1;
  const auto exists = [&](int64_t id) { return 0 <= id && id < p.num_experts; };
  for (int64_t e = 0; e <= p.num_experts; ++e) r.first[e] = 0;
  for (int64_t i = 0; i < pairs; ++i)
    if (exists(p.ids[i])) ++r.first[p.ids[i] + 1];
  r.num_touched = 0;
  for (int64_t e = 0; e < p.num_experts; ++e) {
    if (r.first[e + 1] > 0) r.touched[r.num_touched++] = e;
    r.first[e + 1] += r.first[e];
  }
  for (int64_t i = 0; i < pairs; ++i) {  // first[e] moves to the end of e's pairs, and back below
    r.place[i] = exists(p.ids[i]) ? r.first[p.ids[i]]++ : -1;
    if (r.place[i] >= 0) r.pairs[r.place[i]] = i;
  }
  for (int64_t e = p.num_experts; e > 0; --e) r.first[e] = r.first[e - 1];
  r.first[0] = 0;
  return r;
}

// sums [ROWS, NV vectors] of rows of x with features of a transposed weight, one row of which has `stride`.
template <typename T, int NV, int ROWS>
static void multiply(const float* x, int64_t in, const T* weight, int64_t stride, float* sums) {
  for (int64_t first = 0; first < in; first += kSum) {
    const int64_t end = least(first + kSum, in);
    Vec acc[ROWS][NV];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = Vec{};
    for (int64_t k = first; k < end; ++k) {
      const T* ahead = weight + (k + kAhead) * stride;  // rows of a weight lie pages apart
      for (int64_t i = 0; i < NV * kWidth; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(ahead + i);
      Vec w[NV];
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) w[v] = load(weight + k * stride + v * kWidth);
#pragma GCC unroll 4
      for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < NV; ++v) acc[r][v] = fma_vec(splat(x[r * in + k]), w[v], acc[r][v]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) {
        float* at = sums + (r * NV + v) * kWidth;
        store(at, first > 0 ? load(at) + acc[r][v] : acc[r][v]);
      }
  }
}

// out [rows, live] for `live` <= NV vectors of features; the last ones of a row may be less than a vector.
template <typename T, int NV>
static void transposed_tile(const float* x, int64_t rows, int64_t in, const T* weight, int64_t features, const T* bias,
                            int64_t live, float* out) {
  alignas(64) float sums[kTileRows * NV * kWidth];
  for (int64_t row = 0; row < rows; row += kTileRows) {
    const int64_t n = least(kTileRows, rows - row);
    const auto product = n == 4   ? multiply<T, NV, 4>
                         : n == 3 ? multiply<T, NV, 3>
                         : n == 2 ? multiply<T, NV, 2>
                                  : multiply<T, NV, 1>;
    product(x + row * in, in, weight, features, sums);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t i = 0; i < live; ++i)
        out[(row + r) * features + i] = sums[r * NV * kWidth + i] + (bias ? to_float(bias[i]) : 0.0f);
  }
}

// The features past the last whole vector, one at a time, in the order of multiply().
template <typename T>
static void transposed_rest(const float* x, int64_t rows, int64_t in, const T* weight, int64_t features, const T* bias,
                            int64_t live, float* out) {
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t i = 0; i < live; ++i) {
      float sum = 0.0f;
      for (int64_t first = 0; first < in; first += kSum) {
        float acc = 0.0f;
        for (int64_t k = first; k < least(first + kSum, in); ++k)
          acc = fma_one(x[row * in + k], to_float(weight[k * features + i]), acc);
        sum = first > 0 ? sum + acc : acc;
      }
      out[row * features + i] = sum + (bias ? to_float(bias[i]) : 0.0f);
    }
}

template <typename T>
static void transposed_product(const T* x, int64_t rows, int64_t in, const T* weight, const T* bias, int64_t features,
                               float* out, int threads) {
  static thread_local Buffer<float> buffer;
  float* wide = buffer.reserve(rows * in);
  for (int64_t i = 0; i < rows * in; ++i) wide[i] = to_float(x[i]);
  parallel_for((features + kTile - 1) / kTile, rows * in * features, threads, [&](int64_t tile) {
    int64_t first = tile * kTile;
    const int64_t end = least(first + kTile, features);
    const auto take = [&](auto product, int64_t live) {
      product(wide, rows, in, weight + first, features, bias ? bias + first : nullptr, live, out + first);
      first += live;
    };
    if (first + kTile <= end) take(transposed_tile<T, kTileVecs>, kTile);
    while (first + kWidth <= end) take(transposed_tile<T, 1>, kWidth);
    if (first < end) take(transposed_rest<T>, end - first);
  });
}

// gate * sigmoid(s) * up, by the expert's kind of gate.
static inline Vec gated(const ExpertsParams& p, Vec gate, Vec up) {
  Vec s = gate;
  if (p.gate == Gate::kGeluTanh) {
    s = gelu_sigmoid(gate);
  } else if (p.gate == Gate::kClampedSilu) {
    const Vec limit = splat(p.limit), low = splat(-p.limit);
    gate = gate > limit ? limit : gate;
    up = (up > limit ? limit : up < low ? low : up) + 1.0f;
    s = gate * p.alpha;
  }
  return times_sigmoid(gate, s) * up;
}

template <typename T>
static void gate_rows(const ExpertsParams& p, const float* both, int64_t rows, T* out) {
  const int64_t apart = p.transposed ? 2 : 1, up_at = p.transposed ? 1 : p.width;
  for (int64_t row = 0; row < rows; ++row, both += 2 * p.width, out += p.width)
    for (int64_t i = 0; i < p.width; i += kWidth) {
      const int64_t n = least(kWidth, p.width - i);
      float gate[kWidth] = {}, up[kWidth] = {};
      for (int64_t j = 0; j < n; ++j) {
        gate[j] = both[(i + j) * apart];
        up[j] = both[(i + j) * apart + up_at];
      }
      store(gate, gated(p, load(gate), load(up)));
      for (int64_t j = 0; j < n; ++j) store_one(out + i + j, gate[j]);
    }
}

template <typename T>
static void product(const ExpertsParams& p, const T* x, int64_t rows, int64_t in, const void* weights, Format format,
                    const float* scales, const void* biases, int64_t expert, int64_t features, float* out,
                    int threads) {
  const int64_t size = format == Format::kDense ? sizeof(T) : 1;
  const void* weight = static_cast<const char*>(weights) + expert * features * row_size(format, in) * size;
  const T* bias = biases ? static_cast<const T*>(biases) + expert * features : nullptr;
  if (p.transposed) return transposed_product(x, rows, in, static_cast<const T*>(weight), bias, features, out, threads);
  const LinearPart part{
      {weight, scales ? scales + expert * features : nullptr, format}, bias, out, features, features, 0, true};
  linear_parts(x, rows, in, &part, 1, p.dtype, threads);
}

// The rows of one expert: out [its pairs, hidden].
template <typename T>
static void run_expert(const ExpertsParams& p, const Routing& routing, int64_t expert, float* out, int threads) {
  static thread_local Buffer<T> buffer;
  static thread_local Buffer<float> floats;
  const int64_t first = routing.first[expert], n = routing.first[expert + 1] - first;
  T *x = buffer.reserve(n * (p.hidden + p.width)), *inner = x + n * p.hidden;
  float* both = floats.reserve(n * 2 * p.width);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = routing.pairs[first + i] / p.top_k;
    std::memcpy(x + i * p.hidden, static_cast<const T*>(p.x) + row * p.hidden, p.hidden * sizeof(T));
  }
  product(p, x, n, p.hidden, p.gate_up, p.format, p.gate_up_scales, p.gate_up_bias, expert, 2 * p.width, both, threads);
  gate_rows(p, both, n, inner);
  product(p, inner, n, p.width, p.down, p.down_format, p.down_scales, p.down_bias, expert, p.hidden,
          out + first * p.hidden, threads);
}

template <typename T>
static void combine_row(const ExpertsParams& p, const Routing& routing, const float* results, int64_t row) {
  T* out = static_cast<T*>(p.out) + row * p.hidden;
  const auto score = [&](int64_t pair) {
    return p.float_scores ? static_cast<const float*>(p.scores)[pair] : to_float(static_cast<const T*>(p.scores)[pair]);
  };
  const auto over_slots = [&](auto&& add) {
    for (int64_t pair = row * p.top_k; pair < (row + 1) * p.top_k; ++pair)
      if (routing.place[pair] >= 0) add(score(pair), results + routing.place[pair] * p.hidden);
  };
  over_vectors(p.hidden, [&](int64_t i, auto count) {
    Vec sum{};
    over_slots([&](float s, const float* y) { sum = fma_vec(splat(s), load(y + i, count), sum); });
    store(out + i, sum, count);
  });
}

template <typename T>
static void run_experts(const ExpertsParams& p) {
  static thread_local Buffer<float> buffer;
  const Routing routing = route(p);
  float* results = buffer.reserve(p.rows * p.top_k * p.hidden);
  const bool by_expert = routing.num_touched >= 2 * p.threads;
  const int64_t work = routing.num_touched * 3 * p.width * p.hidden;
  parallel_for(routing.num_touched, work, by_expert ? p.threads : 1,
               [&](int64_t i) { run_expert<T>(p, routing, routing.touched[i], results, by_expert ? 1 : p.threads); });
  parallel_for(p.rows, p.rows * p.top_k * p.hidden, p.threads,
               [&](int64_t row) { combine_row<T>(p, routing, results, row); });
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::experts(const ExpertsParams& p) {
  p.dtype == DType::kFloat32 ? run_experts<float>(p) : run_experts<bf16>(p);
}
