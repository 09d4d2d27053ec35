// out[t] = sum of (base[i] + dynamic[t, i]) * x[t - i]. One row at a time, rows over threads; sums in fp32.
#include "cpu/dynamic_conv.h"

#include "cpu/parallel.h"
#include "params.h"

namespace dflash::DFLASH_ISA {

void dynamic_conv(const DynamicConvParams& p) {
  parallel_for(p.rows, p.rows * p.hidden * p.width, p.threads, [&](int64_t row) {
    p.dtype == DType::kFloat32 ? convolve_row(p, row, static_cast<float*>(p.out) + row * p.hidden)
                               : convolve_row(p, row, static_cast<bf16*>(p.out) + row * p.hidden);
  });
}

}  // namespace dflash::DFLASH_ISA
