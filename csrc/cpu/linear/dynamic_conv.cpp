// out[t] = sum of (base[i] + dynamic[t, i]) * x[t - i]. One row at a time, rows over threads; sums in fp32.
#include "cpu/linear/dynamic_conv.h"

#include "common/row_place.h"
#include "cpu/base/parallel.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
static void write_row(const DynamicConvParams& p, int64_t index) {
  const auto [is_front, row] = source_of(index, p.front_rows, p.block_rows);
  T* out = static_cast<T*>(p.out) + index * p.hidden;
  if (is_front)
    std::memcpy(out, static_cast<const T*>(p.front) + row * p.hidden, p.hidden * sizeof(T));
  else
    convolve_row(p, row, out);
}

DFLASH_NAMESPACE_END

namespace dflash::DFLASH_ISA {

void dynamic_conv(const DynamicConvParams& p) {
  const int64_t rows = p.rows + p.sequences * p.front_rows;
  parallel_for(rows, rows * p.hidden * p.width, p.threads, [&](int64_t index) {
    p.dtype == DType::kFloat32 ? write_row<float>(p, index) : write_row<bf16>(p, index);
  });
}

}  // namespace dflash::DFLASH_ISA
