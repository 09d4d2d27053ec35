// o_i = sum_j p_ij v_j / (sum_j p_ij + exp(sink - top)),  p_ij = exp(s_ij - top),  s_ij = cap(scale * q_i .
// k_j)
//
// The rows * (num_heads / num_kv_heads) queries that share a kv head are packed into tiles of 64 rows. A
// block of four warps, 16 rows each, reads every K/V byte once for the tile. Slots pass through a ring of
// cp.async stages, 32 at a time: S = Q K^T and O += P V by mma.sync, softmax in registers between them, fp32
// sums.
//
// The cache is cut into chunks at fixed slots: 256 slots each up to 1024, then four per octave (a block reads
// at most an eighth to a quarter of the context). Each chunk computes its own (top, sum, o), and chunks are
// folded one by one in ascending order. Tiles and chunks start at absolute slots, and one without a visible
// key changes no bit of a row. The result therefore does not depend on how the work is split. All scores are
// in units of log2(e).
//
// If there are few tiles, each chunk gets a block. The last block to arrive at the tile's counter folds all
// chunks and resets the counter; a block whose chunk no row sees returns at once. If there are many tiles,
// one block takes all chunks in turn.
//
// With ancestors, a row of a tree has the bits that it has in a chain: its keys take part at the positions of
// its path, not at their slots. Stages in front of the block are as above. attention_tree.cuh has the stages
// that reach into the block: there each set of rows that share a path multiplies its own keys and values.
//
// float32, and head dimensions that are over 256 or not a multiple of 8, use a plain kernel: one block per
// query, 128 slots at a time, one key per thread.
#include "cuda/attention_tree.cuh"
#include "cuda/launch.h"
#include "cuda/plain_attention.cuh"

namespace dflash {

// Grid: (tiles * num_kv_heads * batch, splits). The last chunks start first, because they are the longest.
template <typename T, int kDim, bool kTree>
static __global__ void __launch_bounds__(kThreads<kDim>, 1)
    block_attention_kernel(const BlockAttentionParams p) {
  __shared__ unsigned bad[kThreads<kDim> / 32];
  __shared__ bool arrived_last;
  const int kv_heads = int(p.num_kv_heads), group = int(p.num_heads) / kv_heads;
  const int tiles = (int(p.rows) * group + kRows - 1) / kRows, index = int(blockIdx.x);
  const int tile = index % tiles, sequence_head = index / tiles, split = int(p.splits) - 1 - int(blockIdx.y);
  const int kv_head = sequence_head % kv_heads, sequence = sequence_head / kv_heads;
  grid_launch_dependents();
  grid_dependency_wait();
  const std::conditional_t<kTree, TreeTile<T, kDim>, ChainTile<T, kDim>> t(p, bad, group, kv_head, sequence,
                                                                           tile);
  const int first = chunk_of(t.begin), last = t.begin < t.end ? chunk_of(t.end - 1) : first;
  float* stored = p.workspace + index * p.splits * kStateFloats<kDim>;
  State<kDim> s;
  if (p.splits == 1) {
    for (int chunk = first; chunk <= last; ++chunk) {
      t.attend_chunk(s, chunk, chunk == first);
      if (chunk > first) fold<kDim, true>(s, stored);
      if (chunk < last) store_state(stored, s);
    }
    t.store(s);
    return;
  }
  if (split < first || split > last) return;
  t.attend_chunk(s, split, true);
  if (first < last) {
    store_state(stored + split * int64_t(kStateFloats<kDim>), s);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) arrived_last = atomicAdd(p.counters + index, 1u) == unsigned(last - first);
    __syncthreads();
    if (!arrived_last) return;
    __threadfence();
    if (threadIdx.x == 0) p.counters[index] = 0;
    // Each thread reads back its own part of every chunk's state, through the stages' memory.
    constexpr int kSlots = kFoldSlots<kDim>;
    float* slots = reinterpret_cast<float*>(shared<T>());
    const auto fetch = [&](int chunk) {
      const float* from = stored + chunk * int64_t(kStateFloats<kDim>);
      float* to = slots + (chunk - first) % kSlots * kStateFloats<kDim>;
#pragma unroll
      for (int n = 0; n < kStateVectors<kDim>; ++n)
        cp_async16(to + (n * kThreads<kDim> + threadIdx.x) * 4,
                   from + (n * kThreads<kDim> + threadIdx.x) * 4);
    };
    for (int chunk = first; chunk < first + kSlots; ++chunk) {
      if (chunk <= last) fetch(chunk);
      cp_async_commit();
    }
    s.clear();
    for (int chunk = first; chunk <= last; ++chunk) {
      cp_async_wait<kSlots - 1>();
      fold<kDim, false>(s, slots + (chunk - first) % kSlots * kStateFloats<kDim>);
      if (chunk + kSlots <= last) fetch(chunk + kSlots);
      cp_async_commit();
    }
  }
  t.store(s);
}

// ---- launches

static int64_t num_tiles(int64_t rows, int64_t num_heads, int64_t num_kv_heads) {
  return ceil_div(rows * (num_heads / num_kv_heads), kRows);
}

// chunk_of(capacity - 1) + 1, computed on the host.
static int64_t num_chunks(int64_t capacity) {
  const int64_t first = (capacity - 1) / kFirstChunk;
  if (first < kPerOctave) return first + 1;
  int64_t octave = 0;
  while (first / kPerOctave >> (octave + 1)) ++octave;
  return kPerOctave * (octave + 1) + (first >> octave) % kPerOctave + 1;
}

// One split if the tiles alone fill a GPU, else one split per chunk of the capacity.
Workspace block_attention_workspace(DType dtype, const void* k_cache, const void* v_cache, int64_t batch,
                                    int64_t rows, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
                                    int64_t v_head_dim, int64_t capacity) {
  const int64_t dim = head_dim > v_head_dim ? head_dim : v_head_dim;
  if (dtype == DType::kFloat32 || head_dim % 8 || v_head_dim % 8 || dim > 256 || !aligned16(k_cache, v_cache))
    return {0, 0};
  const int64_t tiles = num_tiles(rows, num_heads, num_kv_heads) * batch * num_kv_heads;
  const int64_t splits = tiles <= kNumCounters ? num_chunks(capacity) : 1;
  const int64_t floats = dim <= 64 ? kStateFloats<64> : dim <= 128 ? kStateFloats<128> : kStateFloats<256>;
  return {splits, tiles * splits * floats * int64_t(sizeof(float))};
}

template <typename T, int kDim>
static cudaError_t launch_tiles(const BlockAttentionParams& p, cudaStream_t stream) {
  constexpr int kChainBytes = kSharedBytes<kDim>, kTreeBytes = TreeTile<T, kDim>::kBytes;
  static_assert(kTreeBytes >= kChainBytes && kTreeBytes <= 99 * 1024 - 64, "what every device has");
  static_assert(kFoldSlots<kDim> >= 1, "a stored state fits into the stages");
  const int64_t tiles = num_tiles(p.rows, p.num_heads, p.num_kv_heads);
  const dim3 grid(unsigned(tiles * p.num_kv_heads * p.batch), unsigned(p.splits));
  if (p.ancestors)
    return launch_overlapping(block_attention_kernel<T, kDim, true>, grid, dim3(kThreads<kDim>), kTreeBytes,
                              stream, p);
  return launch_overlapping(block_attention_kernel<T, kDim, false>, grid, dim3(kThreads<kDim>), kChainBytes,
                            stream, p);
}

cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  if (p.batch * p.rows * p.num_heads * p.v_head_dim == 0) return cudaSuccess;
  if (p.ancestors && (p.rows > kMaxTreeRows || !p.causal)) return cudaErrorInvalidValue;
  const DeviceScope scope(p.device);
  if (scope.error() != cudaSuccess) return scope.error();
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, float>) {
      const int64_t dim = p.head_dim > p.v_head_dim ? p.head_dim : p.v_head_dim;
      if (p.splits)
        return dim <= 64    ? launch_tiles<T, 64>(p, stream)
               : dim <= 128 ? launch_tiles<T, 128>(p, stream)
                            : launch_tiles<T, 256>(p, stream);
    }
    return launch_overlapping(plain_attention_kernel<T>,
                              dim3(unsigned(p.rows * p.num_heads), unsigned(p.batch)), dim3(kPlainThreads),
                              size_t(p.head_dim + p.v_head_dim) * sizeof(float), stream, p);
  });
}

}  // namespace dflash
