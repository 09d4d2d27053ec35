// The emulated twins of csrc/cuda/base/ptx.cuh: same names, same meaning, no PTX.
#pragma once
#include "cuda_emulation.h"

namespace dflash {

// ---- launches and dynamic shared memory

template <typename... Parameters>
cudaError_t launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t,
                   std::common_type_t<Parameters>... arguments) {
  static_assert((0 + ... + sizeof(Parameters)) <= 4096, "a kernel takes at most 4096 bytes of parameters");
  return emulation::enqueue(
      reinterpret_cast<const void*>(kernel), grid, block, shared, false, [=] { kernel(arguments...); },
      emulation::laid_out<Parameters...>(arguments...));
}

template <typename... Parameters>
cudaError_t launch_overlapping(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared, cudaStream_t,
                               std::common_type_t<Parameters>... arguments) {
  static_assert((0 + ... + sizeof(Parameters)) <= 4096, "a kernel takes at most 4096 bytes of parameters");
  return emulation::enqueue(
      reinterpret_cast<const void*>(kernel), grid, block, shared, true, [=] { kernel(arguments...); },
      emulation::laid_out<Parameters...>(arguments...));
}

inline void grid_dependency_wait() { emulation::dependency_wait(); }
inline void grid_launch_dependents() { emulation::launch_dependents(); }

template <typename T>
T* shared() {
  return reinterpret_cast<T*>(emulation::dynamic_shared());
}

inline int64_t opaque(int64_t x) { return x; }
inline uint32_t and_or(uint32_t x, uint32_t mask, uint32_t bits) { return (x & mask) | bits; }
inline uint32_t lower_twice(uint32_t word) { return (word & 0xffff) * 0x10001; }
template <int kByte>
float byte_from_2p23(uint32_t word) {
  return 0x1p23f + float(word >> 8 * kByte & 255);
}
inline uint32_t upper_twice(uint32_t word) { return (word >> 16) * 0x10001; }
inline uint32_t fma_pair(uint32_t a, uint32_t b, uint32_t c) {
  const auto part = [](uint32_t pair, int i) { return double(__uint_as_float(pair >> 16 * i << 16)); };
  uint32_t d = 0;
  for (int i = 0; i < 2; ++i) {
    const double exact = part(a, i) * part(b, i) + part(c, i);
    d |= uint32_t(__bfloat16_as_ushort(__double2bfloat16(exact))) << 16 * i;
  }
  return d;
}

// ---- a counter that blocks share

inline unsigned count_up(unsigned* counter, unsigned last) {
  emulation::fence();
  const unsigned before = atomicInc(counter, last);
  emulation::fence();
  return before;
}

// ---- loads and stores of 16 bytes

inline uint4 load16(const void* address) {
  emulation::expect_aligned(address, 16, "load16");
  return *static_cast<const uint4*>(address);
}
inline void store16(void* address, uint4 value) {
  emulation::expect_aligned(address, 16, "store16");
  *static_cast<uint4*>(address) = value;
}
inline void prefetch_l2(const void*) {}
inline uint64_t evict_first_policy() { return emulation::kPolicy; }
inline void expect_policy(uint64_t policy) {
  if (policy != emulation::kPolicy) emulation::fail("no cache policy: %llx", (unsigned long long)policy);
}

inline float exp2_approx(float x) {
  const float y = std::exp2f(x);
  return y < 0x1p-126f ? 0.0f : y;
}

// ---- cp.async

inline void cp_async16(void* shared, const void* global) { emulation::copy_async(shared, global, 16, 0); }
inline void cp_async16_if(void* shared, const void* global, bool valid) {
  emulation::copy_async(shared, global, valid ? 16 : 0, valid ? 0 : 16);
}
inline void cp_async4_if(void* shared, const void* global, bool valid) {
  emulation::copy_async(shared, global, valid ? 4 : 0, valid ? 0 : 4);
}
inline void cp_async16_hint_if(void* shared, const void* global, uint64_t policy, bool valid) {
  expect_policy(policy);
  cp_async16_if(shared, global, valid);
}
inline void cp_async_commit() { emulation::commit_async(); }
template <int kLeft>
void cp_async_wait() {
  emulation::wait_async(kLeft);
}

// ---- ldmatrix and mma

struct EmulatedLdmatrix {
  uint32_t* out;
  const void* row;
  bool transposed;
};

// Lane l of ldmatrix.x4 addresses row l % 8 of matrix l / 8; it receives elements 2 * (l % 4) and + 1 of row
// l / 4 of each matrix, or of its transpose.
inline void run_ldmatrix(void* const* payloads) {
  const auto lane = [&](int l) -> const EmulatedLdmatrix& {
    return *static_cast<const EmulatedLdmatrix*>(payloads[l]);
  };
  for (int l = 0; l < 32; ++l) {
    if (lane(l).transposed != lane(0).transposed)
      emulation::fail("the lanes of a warp run different kinds of ldmatrix");
    emulation::expect_aligned(lane(l).row, 16, "ldmatrix");
    emulation::expect_shared(lane(l).row, 16, "ldmatrix");
  }
  for (int l = 0; l < 32; ++l)
    for (int m = 0; m < 4; ++m)
      for (int half = 0; half < 2; ++half) {
        const int a = l / 4, b = 2 * (l % 4) + half;
        const int row = lane(0).transposed ? b : a, column = lane(0).transposed ? a : b;
        std::memcpy(reinterpret_cast<uint16_t*>(lane(l).out + m) + half,
                    static_cast<const uint16_t*>(lane(8 * m + row).row) + column, 2);
      }
}

inline void emulated_ldmatrix(uint32_t (&out)[4], const void* row, bool transposed) {
  std::memset(out, 0xff, sizeof(out));
  EmulatedLdmatrix payload{out, row, transposed};
  emulation::warp_collective(run_ldmatrix, &payload);
}
inline void ldmatrix(uint32_t (&out)[4], const void* row) { emulated_ldmatrix(out, row, false); }
inline void ldmatrix_transposed(uint32_t (&out)[4], const void* row) { emulated_ldmatrix(out, row, true); }

template <typename T>
struct EmulatedMma {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
  T type;
};

template <typename T>
inline void run_mma(void* const* payloads) {
  const auto element = [](uint32_t word, int half) {
    return double(float(emulation::from_bits<T>(word >> (16 * half))));
  };
  double a[16][16], b[16][8];
  for (int l = 0; l < 32; ++l) {
    const auto& p = *static_cast<const EmulatedMma<T>*>(payloads[l]);
    const int group = l / 4, pair = 2 * (l % 4);
    for (int half = 0; half < 2; ++half) {
      for (int r = 0; r < 4; ++r) a[group + 8 * (r % 2)][pair + half + 8 * (r / 2)] = element(p.a[r], half);
      for (int r = 0; r < 2; ++r) b[pair + half + 8 * r][group] = element(p.b[r], half);
    }
  }
  for (int l = 0; l < 32; ++l) {
    const auto& p = *static_cast<const EmulatedMma<T>*>(payloads[l]);
    for (int r = 0; r < 4; ++r) {
      const int row = l / 4 + 8 * (r / 2), column = 2 * (l % 4) + r % 2;
      double sum = p.d[r];
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      p.d[r] = float(sum);
    }
  }
}

// d += a b
template <typename T>
inline void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], T type) {
  EmulatedMma<T> payload{d, a, b, type};
  emulation::warp_collective(run_mma<T>, &payload);
}

}  // namespace dflash
