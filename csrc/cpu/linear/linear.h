// A product of a few rows with several matrices, shared by linear.cpp and decoder_layers.cpp.
#pragma once
#include "binding/params.h"

namespace dflash::DFLASH_ISA {

struct LinearPart {
  LinearWeight weight;  // [out_features, row_size]
  const void* bias;     // [out_features] or null
  void* out;            // [rows - first_row, out_features], rows out_stride apart
  int64_t out_features;
  int64_t out_stride;
  int64_t first_row;  // of x; the rows before it have no output
  bool wide = false;  // out is float and not rounded, whatever the dtype
};

// out = x[first_row:] weight^T + bias for every part; x [rows, in].
void linear_parts(const void* x, int64_t rows, int64_t in, const LinearPart* parts, int num_parts, DType dtype,
                  int threads);

// True if that is enough work for more than one thread.
bool linear_is_shared(int64_t rows, int64_t in, int64_t out_features);

}  // namespace dflash::DFLASH_ISA
