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
  int64_t c = 0;
  for (; c + kWidth <= n; c += kWidth) {
    Vec total = splat(-0.0f);  // to which adding zero of either sign gives that zero
    for (int64_t i = 0; i < reach; ++i) {
      const Vec weight = load(base + i * n + c) + load(spread + i * n + c);
      total = weight == Vec{} ? total : fma_vec(weight, load(x - i * n + c), total);
    }
    store(out + c, total);
  }
  for (; c < n; ++c) {
    float total = -0.0f;
    for (int64_t i = 0; i < reach; ++i) {
      const float weight = to_float(base[i * n + c]) + spread[i * n + c];
      if (weight != 0.0f) total = fma_one(weight, to_float(x[c - i * n]), total);
    }
    store_one(out + c, total);
  }
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
  int64_t i = 0;
  if (p.residual) {
    Sum16 lanes;
    float tail = 0.0f;
    // The sum is rounded to the storage type first: the norm must see what the next layer will add to.
    const T* residual = static_cast<const T*>(p.residual) + row * n;
    T* h = static_cast<T*>(p.residual_out) + row * n;
    for (; i + kWidth <= n; i += kWidth) {
      store(h + i, load(x + i) + load(residual + i));
      Vec v = load(h + i);
      lanes.lanes[i / kWidth % Sum16::kVecs] += v * v;
    }
    for (; i < n; ++i) {
      store_one(h + i, to_float(x[i]) + to_float(residual[i]));
      tail += to_float(h[i]) * to_float(h[i]);
    }
    if (p.tap) std::memcpy(static_cast<T*>(p.tap) + row * p.tap_stride, h, n * sizeof(T));
    x = h, squares = lanes.total() + tail;
  } else {
    squares = sum_of_squares(x, n);
  }
  const float scale = 1.0f / std::sqrt(squares / float(n) + p.eps);
  const float offset = norm_offset(p.zero_centered);
  for (i = 0; i + kWidth <= n; i += kWidth) store(out + i, load(x + i) * scale * (load(weight + i) + offset));
  for (; i < n; ++i) store_one(out + i, to_float(x[i]) * scale * (to_float(weight[i]) + offset));
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
  int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) store(out + i, silu(load(gate + i)) * load(up + i));
  for (; i < n; ++i) {
    const float g = to_float(gate[i]);
    store_one(out + i, g / (std::exp(-g) + 1.0f) * to_float(up[i]));
  }
}

template <typename T>
static void sigmoid_mul_row(const SigmoidMulParams& p, int64_t row) {
  for (int64_t h = 0; h < p.heads; ++h) {
    const T* gate = static_cast<const T*>(p.gate) + row * p.gate_stride_row + h * p.gate_stride_head;
    const T* x = static_cast<const T*>(p.x) + (row * p.heads + h) * p.width;
    T* out = static_cast<T*>(p.out) + (row * p.heads + h) * p.width;
    int64_t i = 0;
    for (; i + kWidth <= p.width; i += kWidth) store(out + i, load(x + i) / (exp_vec(-load(gate + i)) + 1.0f));
    for (; i < p.width; ++i) store_one(out + i, to_float(x[i]) / (std::exp(-to_float(gate[i])) + 1.0f));
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
  int64_t c = 0;
  for (; c + kWidth <= p.hidden; c += kWidth) store(out + c, load(x + c) * p.scale);
  for (; c < p.hidden; ++c) store_one(out + c, to_float(x[c]) * p.scale);
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
