// What both attention kernels share: the chunks of a cache, and which slots a query sees.
#pragma once
#include "cuda/device.cuh"

namespace dflash {

constexpr float kLog2E = 1.4426950408889634f;
constexpr int kFirstChunk = 256;
constexpr int kPerOctave = 4;

// The first slot of a chunk, and the chunk of a slot.
static __device__ __forceinline__ int chunk_begin(int chunk) {
  const int octave = chunk / kPerOctave, place = chunk % kPerOctave;
  return octave == 0 ? kFirstChunk * place : (kFirstChunk * (kPerOctave + place)) << (octave - 1);
}
static __device__ __forceinline__ int chunk_of(int slot) {
  const int first = slot / kFirstChunk;
  if (first < kPerOctave) return first;
  const int octave = 31 - __clz(first / kPerOctave);
  return kPerOctave * (octave + 1) + (first >> octave) % kPerOctave;
}

static __device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }
static __device__ __forceinline__ float not_a_number() { return __int_as_float(0x7fc00000); }

// The slots that a query sees: [lo, hi), except block slots whose ancestor bit is not set. Both ends rise
// with the row.
struct Sight {
  int lo, hi, length;
  const uint64_t* ancestors;  // [ceil(rows / 64)] or null

  __device__ __forceinline__ bool sees(int slot) const {
    if (slot < lo || slot >= hi) return false;
    if (!ancestors || slot < length) return true;
    return ancestors[(slot - length) / 64] >> ((slot - length) % 64) & 1;
  }
};

// The length, clamped to -rows .. 2 * capacity + rows, so that no sum overflows. A window is at most capacity
// + rows, and what is farther out sees the same slots.
static __device__ __forceinline__ int64_t length_of(const BlockAttentionParams& p, int64_t batch) {
  return max(-p.rows, min(p.lengths[batch], 2 * p.capacity + p.rows));
}

static __device__ __forceinline__ Sight sight_of(const BlockAttentionParams& p, int64_t batch, int64_t length,
                                                 int row) {
  const int64_t valid = max(int64_t(0), min(length + p.rows, p.capacity)), query = length + row;
  int64_t lo = 0, hi = valid;
  if (p.ancestors) {
    const uint64_t* bits =
        reinterpret_cast<const uint64_t*>(p.ancestors) + (batch * p.rows + row) * ((p.rows + 63) / 64);
    return {0, int(hi), int(min(length, valid)), bits};
  }
  if (p.causal) hi = min(hi, query + 1);
  if (p.window) lo = max(lo, query - p.window + 1);
  if (p.window && !p.causal) hi = min(hi, query + p.window);
  return {int(lo), int(hi), int(min(length, valid)), nullptr};
}

}  // namespace dflash
