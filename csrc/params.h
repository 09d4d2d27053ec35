// One plain struct per op. Every pointer carries its shape; all tensors are contiguous and row-major unless a
// stride field says otherwise. Index tensors (positions, lengths, ids, counts) are int64. This header is all that
// the kernels and the binding share.
#pragma once
#include <cstdint>

namespace dflash {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1 };

// RMSNorm, with an optional residual added first and an optional count of live rows per sequence.
struct RmsNormParams {
  const void* x;          // [rows, hidden]
  const void* residual;   // [rows, hidden] or null
  const void* weight;     // [hidden]
  const int64_t* counts;  // [rows / rows_per_sequence] or null: rows past the count are written as zero, never read
  void* out;              // [rows, hidden]
  void* residual_out;     // [rows, hidden], x + residual; null without residual
  int64_t rows;
  int64_t hidden;
  int64_t rows_per_sequence;
  float eps;
  DType dtype;
  int32_t threads;
};

// out = silu(gate) * up, gate and up packed side by side.
struct SiluMulParams {
  const void* gate_up;  // [rows, 2 * width]: gate, then up
  void* out;            // [rows, width]
  int64_t rows;
  int64_t width;
  DType dtype;
  int32_t threads;
};

}  // namespace dflash
