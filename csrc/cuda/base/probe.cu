// What a build asks the driver: does it hold code that a device runs, and may launches overlap there?
#include <atomic>
#include <map>
#include <mutex>
#include <utility>

#include "cuda/base/device.cuh"

namespace dflash {

static __global__ void probe_kernel() {}

bool has_context(int device) {
  using GetState = int (*)(int device, unsigned* flags, int* active);  // cuDevicePrimaryCtxGetState
  static const auto get_state = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    cudaGetDriverEntryPointByVersion("cuDevicePrimaryCtxGetState", &found, 7000, cudaEnableDefault, &result);
    return reinterpret_cast<GetState>(found);
  }();
  unsigned flags = 0;
  int active = 0;
  return !get_state || get_state(device, &flags, &active) != 0 || active;  // true where nobody says
}

cudaError_t probe_kernels(int device) {
  const DeviceScope scope(device);
  if (scope.error() != cudaSuccess) return scope.error();
  cudaFuncAttributes attributes;
  const cudaError_t error = cudaFuncGetAttributes(&attributes, probe_kernel);
  cudaGetLastError();  // clear the error, or a later launch would report it
  return error;
}

static std::atomic<bool> overlap_is_on{true};  // false turns every launch into an ordinary one (DFLASH_OVERLAP=0)

void set_overlap(bool on) { overlap_is_on = on; }

// The code of `kernel` that the device runs must hold the waits of an overlapping launch: a newer device that runs code
// compiled for an older one (PTX of compute_80, say) has none. Asked once per device, when the kernel also says how it
// wants the memory of a multiprocessor split.
bool launches_overlap(const void* kernel) {
  if (!overlap_is_on) return false;
  static std::mutex mutex;
  static std::map<std::pair<const void*, int>, bool> known;
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  const auto [entry, added] = known.try_emplace({kernel, device}, false);
  if (added) {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, kernel) == cudaSuccess) entry->second = attributes.ptxVersion >= 90;
    // Kernels that want its memory split differently between L1 and shared memory cannot share a multiprocessor.
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    cudaGetLastError();  // the launch will say what is wrong
  }
  return entry->second;
}

bool overlaps(int device) {
  const DeviceScope scope(device);
  return scope.error() == cudaSuccess && launches_overlap(reinterpret_cast<const void*>(probe_kernel));
}

}  // namespace dflash
