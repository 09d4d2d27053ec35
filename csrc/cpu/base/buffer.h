// Memory that one thread keeps between calls; it grows, never shrinks, and is not initialized.
#pragma once
#include <cstdint>
#include <cstdlib>

#include "cpu/base/vec.h"

DFLASH_NAMESPACE_BEGIN

template <typename T>
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(data_); }

  // Returns room for `count` elements; what was there is lost if the memory has to grow.
  T* reserve(int64_t count) {
    if (count > size_) {
      std::free(data_);
      size_ = (count + 1023) / 1024 * 1024;
      data_ = static_cast<T*>(std::aligned_alloc(64, size_ * sizeof(T)));
      if (!data_) std::abort();
    }
    return data_;
  }

 private:
  T* data_ = nullptr;
  int64_t size_ = 0;
};

DFLASH_NAMESPACE_END
