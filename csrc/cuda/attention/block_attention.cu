// The rows * (num_heads / num_kv_heads) queries that share a kv head are packed into tiles of 64 rows. A block of four
// warps, 16 rows each, reads every K/V byte once for the tile. Slots pass through a ring of cp.async stages, 32 at a
// time: S = Q K^T and O += P V by mma.sync, softmax in registers between them, fp32 sums.
//
// The cache is cut into chunks at fixed slots (Octave): 128 slots each up to 4096, then 256 up to 8192 and 512 from
// there on. Each chunk has its own (top, sum, o), and chunks are folded one by one in ascending order.
// Tiles and chunks start at absolute slots, and one without a visible key changes no bit of a row. The result therefore
// does not depend on how the work is split. All scores are in units of log2(e).
//
// If there are few tiles, blocks share the chunks of a tile and store their states, and a second kernel folds these,
// eight columns in each of its blocks. If there are many tiles, one block takes all chunks in turn.
//
// With ancestors, a row of a tree has the bits that it has in a chain: its keys take part at the positions of its path,
// not at their slots. Stages in front of the block are as above. attention_tree.cuh has the stages that reach into the
// block: there each set of rows that share a path multiplies its own keys and values.
//
// A chain may read old keys before its wait (the rule is in ptx.cuh). The kernel ahead is then that of
// qkv_norm_rope_append, which lets this one start after its own wait. All launches before that one have ended, so what
// the last step accepted, compacted and appended stands. The kernel ahead writes the queries, and keys and values from
// slot lengths[b] - fresh on. `lengths` and the slots before those are old.
//
// float32, and head dimensions that are over 256 or not a multiple of 8, use a plain kernel.
#include "cuda/attention/attention_tree.cuh"

namespace dflash {

constexpr int64_t kMaxSplitTiles = 128;  // with more, there is a block for every tile anyway
constexpr int64_t kMaxBlocks = 2048;     // of split tiles, about: blocks take chunks in turn beyond

// Behind the stored states: the first and last chunk that a tile has a state of.
template <int kDim>
static __device__ __forceinline__ int2* chunks_of(const BlockAttentionParams& p, int index) {
  return reinterpret_cast<int2*>(p.workspace + gridDim.x * p.splits * kStateFloats<kDim>) + index;
}

// Grid: (tiles * num_kv_heads * batch, blocks per tile).
template <typename T, int kDim, bool kTree>
static __global__ void __launch_bounds__(kThreads<kDim>, 1) block_attention_kernel(const BlockAttentionParams p) {
  __shared__ unsigned bad[kThreads<kDim> / 32];
  const int index = int(blockIdx.x);
  const TileRows<T, kDim> rows(p, index);
  const bool reads_early = !kTree && p.fresh >= 0;
  grid_launch_dependents();
  if (!reads_early) grid_dependency_wait();
  const std::conditional_t<kTree, TreeTile<T, kDim>, ChainTile<T, kDim>> t(rows, bad);
  const int first = chunk_of(t.begin), last = t.begin < t.end ? chunk_of(t.end - 1) : first;
  float* stored = p.workspace + index * p.splits * kStateFloats<kDim>;
  const bool is_split = p.splits > 1;
  // The last chunks of a split tile start first, because they are the longest.
  const int start = is_split ? last - int(blockIdx.y) : first, step = is_split ? -int(gridDim.y) : 1;
  const int copied = reads_early && start >= first ? t.copy_old_keys(start) : 0;
  grid_dependency_wait();
  if (is_split && blockIdx.y == 0 && threadIdx.x == 0) *chunks_of<kDim>(p, index) = make_int2(first, last);
  State<kDim> s;
  for (int chunk = start; chunk >= first && chunk <= last; chunk += step) {
    t.attend_chunk(s, chunk, chunk == start, chunk == start ? copied : 0);
    if (is_split) {
      store_state(stored + chunk * int64_t(kStateFloats<kDim>), s);
      continue;
    }
    if (chunk > first) fold(s, stored);
    if (chunk < last) store_state(stored, s);
  }
  if (!is_split) t.finish(s);
}

// Folds the states of a tile's chunks. A thread has the rows that it has above, and two of the block's eight columns.
// Grid: (tiles * num_kv_heads * batch, kStateVectors).
template <typename T, int kDim>
static __global__ void __launch_bounds__(kThreads<kDim>, 1) fold_chunks_kernel(const BlockAttentionParams p) {
  constexpr int kAtOnce = 8;  // chunks whose states are requested before the first is used
  const int index = int(blockIdx.x), n = int(blockIdx.y);
  const TileRows<T, kDim> rows(p, index);
  const float4* stored = reinterpret_cast<const float4*>(p.workspace + index * p.splits * kStateFloats<kDim>);
  grid_begin();
  const int2 chunks = __ldcg(chunks_of<kDim>(p, index));
  float4 out{}, sums{};  // as in a stored state
  for (int begin = chunks.x; begin <= chunks.y; begin += kAtOnce) {
    float4 outs[kAtOnce], all_sums[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const float4* state = stored + (begin + i) * int64_t(kStateSize<kDim>);
      if (begin + i > chunks.y) continue;
      outs[i] = __ldcg(state + columns_at<kDim>(n));
      all_sums[i] = __ldcg(state + sums_at<kDim>());
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (begin + i > chunks.y) continue;
      const float4 o = outs[i], l = all_sums[i];
      if (begin + i == chunks.x) {
        out = o, sums = l;
        continue;
      }
      const Fold add[2] = {{sums.x, l.x}, {sums.y, l.y}};
      sums = make_float4(add[0].top, add[1].top, add[0](sums.z, l.z), add[1](sums.w, l.w));
      out = make_float4(add[0](out.x, o.x), add[0](out.y, o.y), add[1](out.z, o.z), add[1](out.w, o.w));
    }
  }
  if (rows.row(0) < rows.live) rows.store(rows.result(0), n, out.x, out.y, rows.factor(0, sums.x, sums.z));
  if (rows.row(1) < rows.live) rows.store(rows.result(1), n, out.z, out.w, rows.factor(1, sums.y, sums.w));
}

// ---- attention without tensor cores: one block per query, 128 slots at a time, one key per thread

constexpr int kPlainThreads = 128;
static_assert(kPlainThreads >= kMaxTreeRows, "a thread for each row of a tree");

// Grid: (rows * num_heads, batch). Weights of zero are skipped in the sums, so slots that a query does not see may hold
// anything.
template <typename T>
static __global__ void __launch_bounds__(kPlainThreads, 1) plain_attention_kernel(const BlockAttentionParams p) {
  __shared__ float weights[kPlainThreads], scratch[2][kPlainThreads / 32];
  __shared__ int slots[kPlainThreads];          // of the keys
  __shared__ unsigned char path[kMaxTreeRows];  // of a tree: the block's rows that the query sees
  float* q = shared<float>();                   // [head_dim]
  float* out = q + p.head_dim;                  // [v_head_dim]
  const int64_t row = blockIdx.x / p.num_heads, head = blockIdx.x % p.num_heads, b = blockIdx.y;
  const int64_t kv_head = head / (p.num_heads / p.num_kv_heads);
  grid_begin();
  const int length = int(length_of(p, b)), own = int(threadIdx.x);
  int depth = int(row), seen = 0;  // seen: rows of the path
  if (p.ancestors) {
    const Path tree = path_of(p, b, depth);
    if (own < p.rows && tree.holds(own)) path[tree.depth_of(own)] = (unsigned char)own;
    depth = tree.depth(), seen = tree.count();
  }
  const Sight sight = sight_of(p, length, depth);
  const int64_t cache = (b * p.num_kv_heads + kv_head) * p.capacity;
  const T* k = static_cast<const T*>(p.k_cache) + cache * p.head_dim;
  const T* v = static_cast<const T*>(p.v_cache) + cache * p.v_head_dim;
  const T* from = static_cast<const T*>(p.q) + b * p.q_stride_batch + row * p.q_stride_row + head * p.q_stride_head;
  const float scale = p.softcap != 0.0f ? p.scale / p.softcap : p.scale;
  for (int64_t i = threadIdx.x; i < p.head_dim; i += kPlainThreads) q[i] = to_float(from[i]) * scale;
  for (int64_t i = threadIdx.x; i < p.v_head_dim; i += kPlainThreads) out[i] = 0.0f;
  __syncthreads();
  float top = -infinity(), sum = 0.0f;
  for (int first = sight.lo / kPlainThreads * kPlainThreads; first < sight.hi; first += kPlainThreads) {
    int slot = sight.sees(first + own) ? first + own : -1;
    if (p.ancestors && slot >= max(length, 0)) {
      const int place = slot - length;  // a path may be empty
      slot = place < seen && length + path[place] < p.capacity ? length + path[place] : -1;
    }
    float x = -infinity();
    if (slot >= 0) {
      const T* key = k + slot * p.head_dim;
      float part[8] = {};
      int64_t i = 0;
      for (; i + 8 <= p.head_dim; i += 8)
#pragma unroll
        for (int j = 0; j < 8; ++j) part[j] += q[i + j] * to_float(key[i + j]);
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (i + j < p.head_dim) part[j] += q[i + j] * to_float(key[i + j]);
      x = ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
      if (p.softcap != 0.0f) x = tanhf(x) * p.softcap;
    }
    const float larger = fmaxf(top, block_max(x, scratch[0])), base = larger == -infinity() ? 0.0f : larger;
    const float weight = expf(x - base), alpha = expf(top - base);
    weights[threadIdx.x] = weight, slots[threadIdx.x] = slot;
    sum = sum * alpha + block_sum(weight, scratch[1]);  // also the barrier for the weights
    top = larger;
    const int keys = min(kPlainThreads, sight.hi - first);
    for (int64_t d = threadIdx.x; d < p.v_head_dim; d += kPlainThreads) {
      float part[4] = {};
      for (int i = 0; i < keys; i += 4)
#pragma unroll
        for (int j = 0; j < 4; ++j)
          if (i + j < keys && weights[i + j] != 0.0f)
            part[j] += weights[i + j] * to_float(v[slots[i + j] * p.v_head_dim + d]);
      out[d] = out[d] * alpha + ((part[0] + part[1]) + (part[2] + part[3]));
    }
    __syncthreads();
  }
  float keep = 1.0f;
  if (p.sinks) {
    const float larger = fmaxf(top, p.sinks[head]), base = larger == -infinity() ? 0.0f : larger;
    keep = expf(top - base);
    sum = sum * keep + expf(p.sinks[head] - base);
  }
  const float factor = sum == 0.0f ? 0.0f : keep / sum;
  T* to = static_cast<T*>(p.out) + ((b * p.rows + row) * p.num_heads + head) * p.v_head_dim;
  for (int64_t i = threadIdx.x; i < p.v_head_dim; i += kPlainThreads) to[i] = from_float<T>(out[i] * factor);
}

// ---- launches

static int64_t num_tiles(int64_t rows, int64_t num_heads, int64_t num_kv_heads) {
  return ceil_div(rows * (num_heads / num_kv_heads), kRows);
}

// One state per tile if the tiles alone fill a GPU, else one per chunk of the capacity.
Workspace block_attention_workspace(DType dtype, const void* k_cache, const void* v_cache, int64_t batch, int64_t rows,
                                    int64_t num_heads, int64_t num_kv_heads, int64_t head_dim, int64_t v_head_dim,
                                    int64_t capacity) {
  const int64_t dim = head_dim > v_head_dim ? head_dim : v_head_dim;
  if (dtype == DType::kFloat32 || head_dim % 8 || v_head_dim % 8 || dim > 256 || !aligned16(k_cache, v_cache))
    return {0, 0};
  const int64_t tiles = num_tiles(rows, num_heads, num_kv_heads) * batch * num_kv_heads;
  const int64_t splits = tiles <= kMaxSplitTiles ? chunk_of(int(capacity) - 1) + 1 : 1;
  const int64_t floats = dim <= 64 ? kStateFloats<64> : dim <= 128 ? kStateFloats<128> : kStateFloats<256>;
  return {splits, tiles * (splits * floats * int64_t(sizeof(float)) + int64_t(sizeof(int2)))};
}

template <typename T, int kDim>
static cudaError_t launch_tiles(const BlockAttentionParams& p, cudaStream_t stream) {
  constexpr int kChainBytes = kSharedBytes<kDim>, kTreeBytes = TreeTile<T, kDim>::kBytes;
  static_assert(kTreeBytes >= kChainBytes && kTreeBytes <= 99 * 1024 - 64, "what every device has");
  const int64_t tiles = num_tiles(p.rows, p.num_heads, p.num_kv_heads) * p.num_kv_heads * p.batch;
  const int64_t blocks = max(int64_t(1), min(p.splits, kMaxBlocks / tiles));
  const dim3 grid{unsigned(tiles), unsigned(blocks)}, threads(kThreads<kDim>);
  const cudaError_t error =
      p.ancestors ? launch_overlapping(block_attention_kernel<T, kDim, true>, grid, threads, kTreeBytes, stream, p)
                  : launch_overlapping(block_attention_kernel<T, kDim, false>, grid, threads, kChainBytes, stream, p);
  if (error != cudaSuccess || p.splits == 1) return error;
  return launch_overlapping(fold_chunks_kernel<T, kDim>, dim3(unsigned(tiles), kStateVectors<kDim>), threads, 0, stream,
                            p);
}

cudaError_t launch_block_attention(const BlockAttentionParams& p, cudaStream_t stream) {
  if (p.ancestors && (p.rows > kMaxTreeRows || !p.causal)) return cudaErrorInvalidValue;
  return run_on_device(p, p.batch * p.rows * p.num_heads * p.v_head_dim, [&](auto type) {
    using T = decltype(type);
    if constexpr (!std::is_same_v<T, float>) {
      const int64_t dim = p.head_dim > p.v_head_dim ? p.head_dim : p.v_head_dim;
      if (p.splits)
        return dim <= 64    ? launch_tiles<T, 64>(p, stream)
               : dim <= 128 ? launch_tiles<T, 128>(p, stream)
                            : launch_tiles<T, 256>(p, stream);
    }
    return launch_overlapping(plain_attention_kernel<T>, dim3(unsigned(p.rows * p.num_heads), unsigned(p.batch)),
                              dim3(kPlainThreads), size_t(p.head_dim + p.v_head_dim) * sizeof(float), stream, p);
  });
}

}  // namespace dflash
