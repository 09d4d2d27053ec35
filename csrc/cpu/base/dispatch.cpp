#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

#include "cpu/base/table.h"

namespace dflash {

// DFLASH_SETS is SET(isa) for each set of this build, from the plainest to the best.
#define SET(isa)                   \
  namespace isa {                  \
  extern const CpuKernels kernels; \
  }
DFLASH_SETS
#undef SET

namespace {

struct InstructionSet {
  const CpuKernels* kernels;
  bool (*runs_here)();
};

[[maybe_unused]] bool has_scalar() { return true; }

// ---- which of them the processor and the system run; a build may lack any of them

#if defined(__x86_64__)
[[maybe_unused]] bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

[[maybe_unused]] bool has_avx_vnni() {
  unsigned a, b, c, d;
  return has_avx2() && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}

[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

[[maybe_unused]] bool has_avx512_bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}

#if DFLASH_EMULATE_TILES
constexpr bool kEmulateTiles = true;
bool has_tiles() { return true; }
int tile_refusal() { return 0; }
#else
constexpr bool kEmulateTiles = false;
bool has_tiles() {
  unsigned a, b, c, d;
  const unsigned all = 1u << 22 | 1u << 24 | 1u << 25;  // AMX-BF16, AMX-TILE, AMX-INT8
  return has_avx512_bf16() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & all) == all;
}

// Linux lends tile registers to processes that ask. Returns 0 if this one has them, errno otherwise. Asking only
// permits: a thread's memory for the registers is taken when it first uses them. But it cannot be undone, and new
// alternate signal stacks must have room for the registers from then on. cpu_isas() asks too, whatever is chosen.
int tile_refusal() {
#if defined(__linux__)
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const int refusal = syscall(SYS_arch_prctl, kRequestPermission, kTileData) ? errno : 0;
  return refusal;
#else
  return ENOSYS;
#endif
}
#endif

[[maybe_unused]] bool has_amx() { return has_avx512() && has_tiles() && tile_refusal() == 0; }
#else
constexpr bool kEmulateTiles = false;
bool has_tiles() { return false; }
int tile_refusal() { return 0; }
#endif

#if defined(__aarch64__)
[[maybe_unused]] bool has_neon() { return true; }

#if defined(__APPLE__)
bool has_feature(const char* name) {
  int there = 0;
  size_t size = sizeof(there);
  return sysctlbyname(name, &there, &size, nullptr, 0) == 0 && there;
}
[[maybe_unused]] bool has_dotprod() { return has_feature("hw.optional.arm.FEAT_DotProd"); }
[[maybe_unused]] bool has_i8mm() { return has_dotprod() && has_feature("hw.optional.arm.FEAT_I8MM"); }
#else
// Bits of the two words in which Linux names the features of a processor.
constexpr unsigned long kDotProd = 1ul << 20, kInt8MatMul = 1ul << 13;
[[maybe_unused]] bool has_dotprod() { return getauxval(AT_HWCAP) & kDotProd; }
[[maybe_unused]] bool has_i8mm() { return has_dotprod() && getauxval(AT_HWCAP2) & kInt8MatMul; }
#endif
#endif

#define SET(isa) {&isa::kernels, has_##isa},
const InstructionSet kSets[] = {DFLASH_SETS};
#undef SET

}  // namespace

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const InstructionSet& set : kSets)
    if (set.runs_here()) names.push_back(set.kernels->isa);
  return names;
}

int64_t skinny_rows(DType dtype) {
  if (dtype == DType::kFloat32) return 512;
#if defined(__x86_64__)
  // Of the processor, not of the set in use, so that all sets take the same path. Without AVX-512 torch's products of
  // bf16 take thirteen times as long as ours. Without AMX a pass over 128 rows of a narrow model takes a tenth longer
  // with torch's, and one over 256 rows of a wide model a tenth less.
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx512bw")) return INT64_MAX;
  if (__builtin_cpu_supports("avx512bf16") && !__builtin_cpu_supports("amx-bf16")) return 128;
#endif
  return 64;
}

static const CpuKernels& choose() {
  const char* variable = std::getenv("DFLASH_ISA");
  const std::string wanted = variable ? variable : "";
  const CpuKernels* best = nullptr;
  for (const InstructionSet& set : kSets) {
    const std::string name = set.kernels->isa;
    const bool only_by_name = kEmulateTiles && name == "amx";
    if ((wanted.empty() ? !only_by_name : wanted == name) && set.runs_here()) best = set.kernels;
  }
  if (best) return *best;
  if (wanted.empty())
    throw std::runtime_error(
        "this build of dflash has no CPU kernels for this processor: install it on this machine, or anywhere with "
        "-C cmake.define.DFLASH_ALL_ISAS=ON");
  std::string names;
  for (const std::string& name : cpu_isas()) names += (names.empty() ? "" : ", ") + name;
  std::string reason;
  if (wanted == "amx" && has_tiles() && tile_refusal())
    reason = std::string("the system gives no tile registers (") + std::strerror(tile_refusal()) + "); ";
  throw std::runtime_error("DFLASH_ISA=" + wanted + " cannot run here: " + reason + "this build and processor have " +
                           names);
}

const CpuKernels& cpu_kernels() {
  static const CpuKernels& chosen = choose();
  return chosen;
}

}  // namespace dflash
