// S' = a S;  d = beta (v - S'^T k), or v;  S = S' + k d^T;  out = S^T q = S'^T q + (q . k) d, per head and
// row.
//
// The columns of S are independent. Four warps of a block have eight each, in registers for the whole launch:
// eight lanes share the keys of two columns. Both sums of a row are over S', so they are reduced together.
// What the columns share (k, q, a, beta) and the block's part of v pass through shared memory, a chunk of
// rows ahead of the rows that run. Chunks of saved rows come first: they move S by the same function as the
// rows do.
//
// Several blocks read the saved k and a of a key head, and one overwrites them: the last of these blocks to
// have read what it applies, while its other warps run the rows. Everything else is written by the thread's
// warp that reads it. A row's bits depend neither on chunks nor on the number of rows.
#include "cuda/base/launch.h"
#include "cuda/recurrent/gated_recurrence.cuh"

namespace dflash {

// ---- saving k and a

// One warp: to = f(from) for rows of `count` floats.
template <int kWidth, typename F>
static __device__ __forceinline__ void move_rows(const float* from, int64_t from_stride, float* to,
                                                 int64_t to_stride, int rows, int count, F f) {
#pragma unroll(2 * kWidth)
  for (int i = threadIdx.x % 32 * kWidth; i < rows * count; i += 32 * kWidth) {
    const int row = i / count, at = i % count;
    float x[kWidth];
    load<float, kWidth>(from + row * from_stride + at, x);
#pragma unroll
    for (int e = 0; e < kWidth; ++e) x[e] = f(x[e]);
    store<float, kWidth>(to + row * to_stride + at, x);
  }
}

template <int kWidth>
static __device__ void save_rows(const GatedRecurrenceParams& p, int64_t b, int64_t key_head) {
  const int rows = int(min(p.rows, p.block)), groups = int(p.heads / p.key_heads);
  const int64_t keys = p.key_heads * p.key_dim, decays = p.heads * p.decay_dim;
  const int64_t key = key_head * p.key_dim, decay = key_head * groups * p.decay_dim;
  const auto same = [](float x) { return x; };
  move_rows<kWidth>(p.k + b * p.rows * keys + key, keys, p.saved_k + b * p.block * keys + key, keys, rows,
                    int(p.key_dim), same);
  const float* log_decay = p.log_decay + b * p.rows * decays + decay;
  float* saved_a = p.saved_a + b * p.block * decays + decay;
  if (p.decay_dim == 1)
    move_rows<1>(log_decay, decays, saved_a, decays, rows, groups, decay_of);
  else
    move_rows<kWidth>(log_decay, decays, saved_a, decays, rows, groups * int(p.decay_dim), decay_of);
}

// One warp of every block, once the whole block has read the saved rows: the last of the blocks that count on
// the same counter overwrites them. A counter serves one key head, or more when there are too many; it wraps
// to zero.
static __device__ __forceinline__ void save(const GatedRecurrenceParams& p, const Place& at, bool wide) {
  const int64_t units = p.batch * p.key_heads, counter = (at.b * p.key_heads + at.key_head) % kNumCounters;
  const int64_t members = ceil_div(units - counter, kNumCounters);
  const unsigned last = unsigned(members * (p.heads / p.key_heads) * ceil_div(p.value_dim, kColumns) - 1);
  unsigned ticket = 0;
  if (threadIdx.x % 32 == 0) {
    __threadfence();
    ticket = atomicInc(p.counters + counter, last);
    __threadfence();
  }
  ticket = __shfl_sync(kAllLanes, ticket, 0);
  if (ticket != last) return;
  __syncwarp();
  for (int64_t unit = counter; unit < units; unit += kNumCounters) {
    if (wide)
      save_rows<4>(p, unit / p.key_heads, unit % p.key_heads);
    else
      save_rows<1>(p, unit / p.key_heads, unit % p.key_heads);
  }
}

// ---- the kernel

template <int kGroups, bool kPerKey, bool kDelta>
static __global__ void __launch_bounds__(kThreads, 1)
    gated_recurrence_kernel(const GatedRecurrenceParams p, const bool wide) {
  using C = Chunk<kGroups, kPerKey>;
  C* chunks = shared<C>();
  const Place at(p);
  const int part = threadIdx.x % kParts, lane_column = threadIdx.x / kParts * 2;
  const bool computes = threadIdx.x < 32 * kWarps;
  const int64_t left = computes ? p.value_dim - at.column - lane_column : 0;
  const int64_t pending_chunks = ceil_div(p.block, C::kRows);
  const int64_t num_chunks = pending_chunks + ceil_div(p.rows, C::kRows);
  grid_launch_dependents();
  grid_dependency_wait();
  const int64_t pending = clamped(p.pending[at.b], p.block), keep = clamped(p.keep[at.b], p.rows);
  const int64_t store_at = pending > 0 || keep > 0 ? keep : -1;  // else it is as it was
  float* kept = p.state + at.of_head(p, at.b, p.key_dim * p.value_dim) + at.column + lane_column;
  State<kGroups> state;
  if (computes) state.load(p, kept, left, wide);

#pragma unroll 1
  for (int64_t c = 0, ahead = 0; c < num_chunks; ++c) {
    if (c > 0) {
      cp_async_wait<0>();
      __syncthreads();
    }
    // The next chunk, or the first two. All that was saved is copied, without waiting for the number that
    // counts.
#pragma unroll 1
    for (; ahead < c + 2; ++ahead) {
      const bool saved = ahead < pending_chunks;
      if (ahead < num_chunks)
        chunks[ahead % 2].copy(p, at, saved, (saved ? ahead : ahead - pending_chunks) * C::kRows, wide);
      cp_async_commit();
    }
    if (c == 0) {
      cp_async_wait<1>();
      __syncthreads();
    }
    C& chunk = chunks[c % 2];
    Row<kGroups, kPerKey> row;
    if (c < pending_chunks) {
      const int rows = int(clamped(pending - c * C::kRows, C::kRows));
#pragma unroll 1
      for (int r = 0; computes && r < rows; ++r) {
        row.read(chunk, r);
        state.decay(row);
        state.add(row.k, row.v);
      }
      continue;
    }
    const int64_t first = (c - pending_chunks) * C::kRows;
    const int rows = int(min(int64_t(C::kRows), p.rows - first));
    chunk.prepare(rows);
    __syncthreads();
    if (!computes) {
      if (first == 0 && p.block > 0) save(p, at, wide);
      continue;
    }
    row.read_all(chunk, 0, kDelta);
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      const int64_t t = first + r;
      if (t == store_at) state.store(p, kept, left, wide);
      float held[2], read[2], d[2] = {row.v[0], row.v[1]};
      state.decay(row);
      state.dot(row.q, read);
      if constexpr (kDelta) {
        state.dot(row.k, held);
#pragma unroll
        for (int i = 0; i < 2; ++i) d[i] = corrected(row.v[i], held[i], row.beta);
      }
      state.add(row.k, d);
#pragma unroll
      for (int i = 0; i < 2; ++i) read[i] = __fmaf_rn(row.qk, d[i], read[i]);
      const int64_t column = at.column + lane_column;
      if (part == 0)
        store_pair(p.out + at.of_head(p, at.b * p.rows + t, p.value_dim) + column, read, left, wide);
      if (part == 1 && t < p.block)
        store_pair(p.saved_d + at.of_head(p, at.b * p.block + t, p.value_dim) + column, d, left, wide);
      row.read_all(chunk, min(r + 1, rows - 1), kDelta);
    }
  }
  if (computes && store_at == p.rows) state.store(p, kept, left, wide);
}

template <int kGroups, bool kPerKey>
static cudaError_t launch_groups(const GatedRecurrenceParams& p, bool wide, cudaStream_t stream) {
  constexpr size_t kBytes = 2 * sizeof(Chunk<kGroups, kPerKey>);
  static_assert(kBytes <= 99 * 1024, "more shared memory than every device has");
  return launch_overlapping(p.beta ? gated_recurrence_kernel<kGroups, kPerKey, true>
                                   : gated_recurrence_kernel<kGroups, kPerKey, false>,
                            dim3(unsigned(p.batch * p.heads * ceil_div(p.value_dim, kColumns))),
                            dim3(kThreads), kBytes, stream, p, wide);
}

cudaError_t launch_gated_recurrence(const GatedRecurrenceParams& p, cudaStream_t stream) {
  if (p.key_dim > kMaxRecurrentKeys) return cudaErrorInvalidValue;
  const bool per_key = p.decay_dim > 1;
  const bool wide = p.key_dim % 4 == 0 && p.value_dim % 4 == 0 &&
                    aligned16(p.q, p.k, p.v, p.state, p.saved_k, p.saved_d, p.out) &&
                    (!per_key || aligned16(p.log_decay, p.saved_a));
  const auto launch = [&](auto groups) {
    constexpr int kGroups = decltype(groups)::value;
    return per_key ? launch_groups<kGroups, true>(p, wide, stream)
                   : launch_groups<kGroups, false>(p, wide, stream);
  };
  return run_on_device(p, p.batch, [&] {
    return p.key_dim <= kPerGroup       ? launch(std::integral_constant<int, 1>())
           : p.key_dim <= 2 * kPerGroup ? launch(std::integral_constant<int, 2>())
           : p.key_dim <= 4 * kPerGroup ? launch(std::integral_constant<int, 4>())
                                        : launch(std::integral_constant<int, 8>());
  });
}

}  // namespace dflash
