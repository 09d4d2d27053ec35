// The format kW8A16, int8 weights on GPUs, as the second factor of mma.sync. The integers are exact in 16 bits, so the
// scale of a channel is multiplied with its sum.
//
// Memory holds tiles of eight features, the last perhaps with fewer; of a tile 64 columns at a time, as many as a stage
// has; of these 16 bytes per lane, what it has of the factor: a word for each step of 16 columns, whose bytes 0 and 2
// are columns 2t and 2t + 1, and 1 and 3 those eight further on (t = lane % 4). So a lane reads back one piece as it
// was copied, and no two lanes share a bank.
#pragma once
#include "cuda/linear/main_loop.cuh"

namespace dflash {

// Bytes 0 and 2 of a word as two numbers of 16 bits: the low seven bits make a number above the base, which lose the
// base, or as much more as the top bit says.
template <typename T>
static __device__ __forceinline__ uint32_t int8_pair(uint32_t word) {
  constexpr bool kIsHalf = std::is_same_v<T, __half>;
  constexpr uint32_t kBase = kIsHalf ? 0x64006400u : 0x43004300u;  // 1024, 128
  const uint32_t low = and_or(word, 0x007f007fu, kBase), top = and_or(word, 0x00800080u, kBase);
  std::conditional_t<kIsHalf, __half2, __nv_bfloat162> a, b;
  memcpy(static_cast<void*>(&a), &low, 4), memcpy(static_cast<void*>(&b), &top, 4);
  a = __hsub2_rn(a, b);
  uint32_t pair;
  memcpy(&pair, static_cast<const void*>(&a), 4);
  return pair;
}

template <>
struct PackedStage<Format::kW8A16, 64> {
  static constexpr int kTileBytes = 512;  // of a stage: 8 features x 64 columns

  const unsigned char* from[2];  // of a thread's pieces, in the two tiles that its warp copies
  int step[2];                   // bytes of a tile between stages

  // The i-th tile of the warp begins with `feature` of a weight [features, row_size], or is its last; stages begin with
  // the column `inner`.
  __device__ __forceinline__ void set(int i, Format, const void* weight, int64_t feature, int64_t features, int64_t in,
                                      int64_t inner, int64_t) {
    const int64_t first = min(feature, (features - 1) / 8 * 8), live = min(int64_t(8), features - first);
    from[i] =
        static_cast<const unsigned char*>(weight) + first * int8_row_size(in) + live * inner + threadIdx.x % 32 * 16;
    step[i] = int(live) * 64;
  }

  // Features that a tile lacks become zero.
  __device__ __forceinline__ void copy(void* stage, int index, uint64_t policy) const {
    unsigned char* to = static_cast<unsigned char*>(stage) + threadIdx.x / 32 * 2 * kTileBytes;
    const int at = threadIdx.x % 32 * 16;
#pragma unroll
    for (int i = 0; i < 2; ++i)
      cp_async16_hint_if(to + i * kTileBytes + at, from[i] + int64_t(index) * step[i], policy, at < step[i]);
  }

  // A lane's share of kTiles tiles of a stage.
  template <typename T, int kTiles>
  struct Factor {
    uint4 pieces[kTiles];

    __device__ __forceinline__ Factor(const PackedStage&, const void* first) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i)
        pieces[i] = load16(static_cast<const unsigned char*>(first) + i * kTileBytes + threadIdx.x % 32 * 16);
    }
    // 16 features, columns from 16 k on.
    __device__ __forceinline__ void operator()(uint32_t (&to)[4], int n, int k) const {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint4 piece = pieces[2 * n + i];
        const uint32_t words[4] = {piece.x, piece.y, piece.z, piece.w};
        to[2 * i] = int8_pair<T>(words[k]), to[2 * i + 1] = int8_pair<T>(words[k] >> 8);
      }
    }
  };
};

}  // namespace dflash
