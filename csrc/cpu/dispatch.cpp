#include <cstdlib>
#include <stdexcept>
#include <string>

#include "cpu/table.h"

namespace dflash {

namespace scalar {
extern const CpuKernels kernels;
}
#if DFLASH_WITH_X86
namespace avx2 {
extern const CpuKernels kernels;
}
namespace avx512 {
extern const CpuKernels kernels;
}
#endif

static const CpuKernels& choose() {
  const char* variable = std::getenv("DFLASH_ISA");
  const std::string wanted = variable ? variable : "";
  bool has_avx2 = false, has_avx512 = false;
#if DFLASH_WITH_X86
  __builtin_cpu_init();
  has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && (wanted.empty() || wanted == "avx512")) return avx512::kernels;
  if (has_avx2 && (wanted.empty() || wanted == "avx2")) return avx2::kernels;
#endif
  if (wanted.empty() || wanted == "scalar") return scalar::kernels;
  throw std::runtime_error("DFLASH_ISA=" + wanted + " cannot run here: this build and processor have scalar" +
                           (has_avx2 ? ", avx2" : "") + (has_avx512 ? ", avx512" : ""));
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

}  // namespace dflash
