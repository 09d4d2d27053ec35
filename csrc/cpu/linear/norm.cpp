// What runs over the rows between products: norms, convolutions over a block, gates, embeddings. Rows over threads.
#include <cmath>

#include "common/row_place.h"
#include "cpu/base/parallel.h"

DFLASH_NAMESPACE_BEGIN

// Row `row` of DynamicConvParams or ConvAddRmsNormParams -> out [hidden], rounded once.
template <typename T, typename Params>
static inline void convolve_row(const Params& p, int64_t row, T* out) {
  static thread_local Buffer<float> buffer;
  const int64_t n = p.hidden, size = n / p.groups, block = row / p.block_rows, t = row % p.block_rows;
  const int64_t reach = p.width < t + 1 ? p.width : t + 1;  // the rows in front of the block are zeros
  const T* x = static_cast<const T*>(p.x) + row * n;
  const T* base = static_cast<const T*>(p.base);
  const T* dynamic = static_cast<const T*>(p.dynamic) + block * p.dynamic_stride_block + t * p.dynamic_stride_row;
  // A group may be narrower than a vector, so each of its channels gets a copy.
  float* spread = buffer.reserve(reach * n);
  for (int64_t g = 0; g < reach * p.groups; ++g) {
    const float value = to_float(dynamic[g]);
    for (int64_t c = 0; c < size; ++c) spread[g * size + c] = value;
  }
  over_vectors(n, [&](int64_t c, auto count) {
    Vec total = splat(-0.0f);  // to which adding zero of either sign gives that zero
    for (int64_t i = 0; i < reach; ++i) {
      const Vec weight = load(base + i * n + c, count) + load(spread + i * n + c, count);
      total = weight == Vec{} ? total : fma_vec(weight, load(x - i * n + c, count), total);
    }
    store(out + c, total, count);
  });
}

template <typename T>
static void write_row(const DynamicConvParams& p, int64_t index) {
  const auto [is_front, row] = source_of(index, p.front_rows, p.block_rows);
  T* out = static_cast<T*>(p.out) + index * p.hidden;
  if (is_front)
    std::memcpy(out, static_cast<const T*>(p.front) + row * p.hidden, p.hidden * sizeof(T));
  else
    convolve_row(p, row, out);
}

// x [hidden] -> out [hidden]
template <typename T, typename Params>
static inline void norm_row(const Params& p, int64_t row, const T* x, T* out) {
  const int64_t n = p.hidden;
  const T* weight = static_cast<const T*>(p.weight);
  float squares;
  if (p.residual) {
    Sum16 lanes;
    // The sum is rounded to the storage type first: the norm must see what the next layer will add to.
    const T* residual = static_cast<const T*>(p.residual) + row * n;
    T* h = static_cast<T*>(p.residual_out) + row * n;
    over_vectors(n, [&](int64_t i, auto count) {
      store(h + i, load(x + i, count) + load(residual + i, count), count);
      const Vec v = load(h + i, count);
      lanes.of(i) = fma_vec(v, v, lanes.of(i));
    });
    if (p.tap) std::memcpy(static_cast<T*>(p.tap) + row * p.tap_stride, h, n * sizeof(T));
    x = h, squares = lanes.total();
  } else {
    squares = sum_of_squares(x, n);
  }
  const float scale = 1.0f / std::sqrt(squares / float(n) + p.eps);
  const float offset = norm_offset(p.zero_centered);
  over_vectors(n, [&](int64_t i, auto count) {
    store(out + i, load(x + i, count) * scale * (load(weight + i, count) + offset), count);
  });
}

template <typename T>
static void norm_row(const RmsNormParams& p, int64_t index) {
  const auto [is_front, row] = source_of(index, p.front_rows, p.rows_per_sequence);
  T* out = static_cast<T*>(p.out) + index * p.hidden;
  if (is_front) {
    std::memcpy(out, static_cast<const T*>(p.front) + row * p.hidden, p.hidden * sizeof(T));
  } else if (p.counts && row % p.rows_per_sequence >= p.counts[row / p.rows_per_sequence]) {
    for (int64_t i = 0; i < p.hidden; ++i) store_one(out + i, 0.0f);
  } else {
    norm_row(p, row, static_cast<const T*>(p.x) + row * p.hidden, out);
  }
}

template <typename T>
static void convolve_and_norm_row(const ConvAddRmsNormParams& p, int64_t row) {
  static thread_local Buffer<T> buffer;
  T* x = buffer.reserve(p.hidden);
  convolve_row(p, row, x);
  norm_row<T>(p, row, x, static_cast<T*>(p.out) + row * p.hidden);
}

// ---- gates

template <typename T>
static void silu_mul_row(const SiluMulParams& p, int64_t row) {
  const int64_t n = p.width;
  const T* gate = static_cast<const T*>(p.gate_up) + row * 2 * n;
  const T* up = gate + n;
  T* out = static_cast<T*>(p.out) + row * n;
  over_vectors(n, [&](int64_t i, auto count) {
    const Vec x = load(gate + i, count), s = p.gate == Gate::kGeluTanh ? gelu_sigmoid(x) : x;
    store(out + i, times_sigmoid(x, s) * load(up + i, count), count);
  });
}

template <typename T>
static void sigmoid_mul_row(const SigmoidMulParams& p, int64_t row) {
  for (int64_t h = 0; h < p.heads; ++h) {
    const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride_row + h * p.gate_stride_head;
    const T* x = static_cast<const T*>(p.x) + (row * p.heads + h) * p.width;
    T* out = static_cast<T*>(p.out) + (row * p.heads + h) * p.width;
    over_vectors(p.width, [&](int64_t i, auto count) {
      store(out + i, load(x + i, count) / (exp_vec(-load(gate + i, count)) + 1.0f), count);
    });
  }
}

// ---- embeddings of the block that is drafted

template <typename T>
static void draft_row(const DraftRowsParams& p, int64_t index) {
  const T* x = embedding_of<T>(p, drafted_id(p, index / p.rows, index % p.rows));
  T* out = static_cast<T*>(p.embeds) + index * p.hidden;
  if (p.scale == 1.0f) {
    std::memcpy(out, x, p.hidden * sizeof(T));
    return;
  }
  over_vectors(p.hidden, [&](int64_t c, auto count) { store(out + c, load(x + c, count) * p.scale, count); });
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::dynamic_conv(const DynamicConvParams& p) {
  const int64_t rows = p.rows + p.sequences * p.front_rows;
  parallel_rows(p, rows, rows * p.hidden * p.width,
                [&](auto type, int64_t index) { write_row<decltype(type)>(p, index); });
}

void dflash::DFLASH_ISA::rms_norm(const RmsNormParams& p) {
  const int64_t rows = p.rows + p.sequences * p.front_rows;
  parallel_rows(p, rows, rows * p.hidden, [&](auto type, int64_t index) { norm_row<decltype(type)>(p, index); });
}

void dflash::DFLASH_ISA::conv_add_rms_norm(const ConvAddRmsNormParams& p) {
  parallel_rows(p, p.rows, p.rows * p.hidden * p.width,
                [&](auto type, int64_t row) { convolve_and_norm_row<decltype(type)>(p, row); });
}

void dflash::DFLASH_ISA::silu_mul(const SiluMulParams& p) {
  parallel_rows(p, p.rows, p.rows * p.width, [&](auto type, int64_t row) { silu_mul_row<decltype(type)>(p, row); });
}

void dflash::DFLASH_ISA::sigmoid_mul(const SigmoidMulParams& p) {
  parallel_rows(p, p.rows, p.rows * p.heads * p.width,
                [&](auto type, int64_t row) { sigmoid_mul_row<decltype(type)>(p, row); });
}

void dflash::DFLASH_ISA::draft_rows(const DraftRowsParams& p) {
  for (int64_t b = 0; b < p.batch; ++b) {
    p.anchor[b] = drafted_id(p, b, 0);
    for (int64_t i = 0; i < p.num_drafts; ++i) p.positions[b * p.num_drafts + i] = anchor_position(p, b) + 1 + i;
  }
  const int64_t rows = p.batch * p.rows;
  parallel_rows(p, rows, rows * p.hidden, [&](auto type, int64_t index) { draft_row<decltype(type)>(p, index); });
}
