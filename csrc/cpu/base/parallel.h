// What kernels run on: threads, and memory that these keep.
#pragma once
#include <cstdlib>

#include "cpu/base/kernels.h"
#include "cpu/base/team.h"
#include "cpu/base/vec.h"

DFLASH_NAMESPACE_BEGIN

// Memory that one thread keeps between calls; it grows, never shrinks, and is not initialized.
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

// With fewer array elements than these, threads cost more than they save. Those of an open team wait already.
constexpr int64_t kParallelElements = 32768, kTeamElements = 8192;

// fn(first, last) for ranges that make up [0, n); `elements` is the total work, in array elements.
template <typename Fn>
static inline void parallel_ranges(int64_t n, int64_t elements, int threads, const Fn& fn) {
  if (threads > 1 && n > 1 && elements >= (team_is_open() ? kTeamElements : kParallelElements)) {
    const auto range = [](const void* context, int64_t first, int64_t last) {
      (*static_cast<const Fn*>(context))(first, last);
    };
    team_for(n, threads, range, &fn);
  } else {
    fn(0, n);
  }
}

// fn(i) for i in [0, n)
template <typename Fn>
static inline void parallel_for(int64_t n, int64_t elements, int threads, const Fn& fn) {
  parallel_ranges(n, elements, threads, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) fn(i);
  });
}

// fn(T(), i) for i in [0, n), with the storage type of `p`
template <typename Params, typename Fn>
static inline void parallel_rows(const Params& p, int64_t n, int64_t elements, const Fn& fn) {
  parallel_for(n, elements, p.threads, [&](int64_t i) { p.dtype == DType::kFloat32 ? fn(float(), i) : fn(bf16(), i); });
}

DFLASH_NAMESPACE_END
