// What the CUDA kernels and their launchers share.
#pragma once
#include "cuda/ptx.cuh"

namespace dflash {

// Makes a device current, and the previous one again at the end of the scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device) : device_(device) {
    error_ = cudaGetDevice(&previous_);
    if (error_ == cudaSuccess && previous_ != device_) error_ = cudaSetDevice(device_);
  }
  ~DeviceScope() {
    if (previous_ >= 0 && previous_ != device_) cudaSetDevice(previous_);
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;
  cudaError_t error() const { return error_; }

 private:
  int device_;
  int previous_ = -1;
  cudaError_t error_;
};

}  // namespace dflash
