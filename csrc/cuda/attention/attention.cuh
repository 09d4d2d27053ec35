// What both attention kernels share: the chunks of a cache, and which slots a query sees.
#pragma once
#include "cuda/base/device.cuh"

namespace dflash {

constexpr float kLog2E = 1.4426950408889634f;

// The first 1024 slots of a cache are one octave, every later octave is as long as all that is before it, and the last
// has no end. Each is cut into chunks of a length of its own, eight per octave.
constexpr int kOctaves = 5;
constexpr int kPerOctave = 8;
struct Octave {
  int begin, chunk;  // its first slot, and the slots of its chunks
  __host__ __device__ explicit Octave(int i) : begin(i ? 512 << i : 0), chunk(i ? 64 << i : 128) {}
};

// The first slot of a chunk, and the chunk of a slot.
static __host__ __device__ __forceinline__ int chunk_begin(int chunk) {
  const int i = min(chunk / kPerOctave, kOctaves - 1);
  const Octave octave(i);
  return octave.begin + (chunk - i * kPerOctave) * octave.chunk;
}
static __host__ __device__ __forceinline__ int chunk_of(int slot) {
  int i = 0;
  while (i + 1 < kOctaves && slot >= Octave(i + 1).begin) ++i;
  const Octave octave(i);
  return i * kPerOctave + (slot - octave.begin) / octave.chunk;
}

// A row of a tree sees the rows of its path. These stand in the sums where a chain would have them: at the positions
// from `length` on, in ascending order.
static_assert(kMaxTreeRows == 128, "bits of a path");
struct Path {
  uint64_t low, high;  // a bit per row of the block

  __device__ __forceinline__ int count() const { return __popcll(low) + __popcll(high); }
  __device__ __forceinline__ int depth() const { return max(count() - 1, 0); }
  __device__ __forceinline__ bool holds(int row) const { return (row < 64 ? low : high) >> row % 64 & 1; }
  // The depth at which it holds a row.
  __device__ __forceinline__ int depth_of(int row) const {
    const uint64_t before = (uint64_t(1) << row % 64) - 1;
    return row < 64 ? __popcll(low & before) : __popcll(low) + __popcll(high & before);
  }
};

static __device__ __forceinline__ Path path_of(const BlockAttentionParams& p, int64_t batch, int row) {
  const int words = int(p.rows + 63) / 64;
  const uint64_t* at = reinterpret_cast<const uint64_t*>(p.ancestors) + (batch * p.rows + row) * words;
  const uint64_t last = ~uint64_t(0) >> (64 * words - p.rows);  // bits past the last row do not count
  return words == 1 ? Path{at[0] & last, 0} : Path{at[0], at[1] & last};
}

// The positions that a query sees: [lo, hi). Both ends rise with the query's own position.
struct Sight {
  int lo, hi;

  __device__ __forceinline__ bool sees(int position) const { return position >= lo && position < hi; }
};

// The length, clamped to -rows .. 2 * capacity + rows, so that no sum overflows. A window is at most capacity + rows,
// and what is farther out sees the same slots. It may be read early, so past the L1.
static __device__ __forceinline__ int64_t length_of(const BlockAttentionParams& p, int64_t batch) {
  return max(-p.rows, min(__ldcg(p.lengths + batch), 2 * p.capacity + p.rows));
}

// What the query at position length + depth sees.
static __device__ __forceinline__ Sight sight_of(const BlockAttentionParams& p, int64_t length, int depth) {
  const int64_t valid = max(int64_t(0), min(length + p.rows, p.capacity)), query = length + depth;
  int64_t lo = 0, hi = valid;
  if (p.causal) hi = min(hi, query + 1);
  if (p.window) lo = max(lo, query - p.window + 1);
  if (p.window && !p.causal) hi = min(hi, query + p.window);
  return {int(lo), int(hi)};
}

}  // namespace dflash
