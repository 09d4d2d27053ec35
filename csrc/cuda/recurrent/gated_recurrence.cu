// out = S^T q is taken as S'^T q + (q . k) d. The columns of S are independent. Four warps of a block have eight each,
// in registers for the whole launch: eight lanes share the keys of two columns, and both sums of a row are reduced
// together. What columns share passes through shared memory, a chunk of rows ahead. Chunks of saved rows come first:
// they move S by the same function as the rows do.
//
// Several blocks read the saved k and a of a key head, and the last of them to have read what it applies overwrites
// them, while its other warps run the rows. A row's bits depend neither on chunks nor on the number of rows.
#include "cuda/base/device.cuh"

namespace dflash {

constexpr int kWarps = 4;                    // that have columns
constexpr int kThreads = 32 * (kWarps + 1);  // and one that saves
constexpr int kParts = 8;                    // lanes that share the keys of two columns
constexpr int kColumns = 2 * 32 / kParts * kWarps;
constexpr int kPerGroup = 4 * kParts;  // keys; a lane has four neighbours of each group
static_assert(kMaxRecurrentKeys == 8 * kPerGroup, "what fits in registers");

// ---- arithmetic: no contraction is left to the compiler

static __device__ __forceinline__ float decay_of(float log_decay) { return expf(log_decay); }

static __device__ __forceinline__ float decayed(float a, float s) { return __fmul_rn(a, s); }

// With decayed(), the one place where a state moves, so that a row moves it to the same bits in every pass.
static __device__ __forceinline__ float advanced(float decayed, float k, float d) { return __fmaf_rn(k, d, decayed); }

static __device__ __forceinline__ float corrected(float v, float held, float beta) {
  return __fmul_rn(beta, __fsub_rn(v, held));
}

// ---- which columns

struct Place {
  int64_t b, head, key_head, column;

  __device__ __forceinline__ explicit Place(const GatedRecurrenceParams& p) {
    const int64_t blocks = ceil_div(p.value_dim, kColumns), index = blockIdx.x / blocks;
    b = index / p.heads, head = index % p.heads, key_head = head / (p.heads / p.key_heads);
    column = blockIdx.x % blocks * kColumns;
  }
  // Of a row of [.., heads, size], or of [.., key_heads, size].
  __device__ __forceinline__ int64_t of_head(const GatedRecurrenceParams& p, int64_t row, int64_t size) const {
    return (row * p.heads + head) * size;
  }
  __device__ __forceinline__ int64_t of_key(const GatedRecurrenceParams& p, int64_t row) const {
    return (row * p.key_heads + key_head) * p.key_dim;
  }
};

// ---- chunks of rows in shared memory

template <int kGroups, bool kPerKey>
struct Chunk {
  static constexpr int kRows = kGroups > 4 ? 8 : 16;
  static constexpr int kKeys = kGroups * kPerGroup;  // zero past key_dim
  static constexpr int kDecays = kPerKey ? kKeys : 1;

  float k[kRows * kKeys], q[kRows * kKeys];
  float a[kRows * kDecays];   // log a until prepare(), if it is not saved
  float v[kRows * kColumns];  // d, if it is saved
  float beta[kRows], qk[kRows];

  // Starts copying `rows` rows of `count` floats; zeros from there to kPadded.
  template <int kPadded>
  static __device__ __forceinline__ void copy(float* to, const float* from, int64_t stride, int rows, int64_t count,
                                              bool wide) {
    constexpr int kPieces = kPadded % 4 == 0 ? kPadded / 4 : 1;
    if (kPadded % 4 == 0 && wide) {
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * kPieces; i += kThreads) {
        const int row = i / kPieces, at = i % kPieces * 4;
        const bool there = at < count;
        cp_async16_if(to + row * kPadded + at, from + row * stride + (there ? at : 0), there);
      }
    } else {
#pragma unroll 1
      for (int i = threadIdx.x; i < rows * kPadded; i += kThreads) {
        const int row = i / kPadded, at = i % kPadded;
        const bool there = at < count;
        cp_async4_if(to + i, from + row * stride + (there ? at : 0), there);
      }
    }
  }

  // Starts copying the rows from `first` on, of those that were saved or of this pass.
  __device__ __forceinline__ void copy(const GatedRecurrenceParams& p, const Place& at, bool saved, int64_t first,
                                       bool wide) {
    const int64_t total = saved ? p.block : p.rows, row = at.b * total + first;
    const int64_t keys = p.key_heads * p.key_dim, decays = p.heads * p.decay_dim, values = p.heads * p.value_dim;
    const int rows = int(min(int64_t(kRows), total - first));
    copy<kKeys>(k, (saved ? p.saved_k : p.k) + at.of_key(p, row), keys, rows, p.key_dim, wide);
    copy<kDecays>(a, (saved ? p.saved_a : p.log_decay) + at.of_head(p, row, p.decay_dim), decays, rows, p.decay_dim,
                  wide);
    copy<kColumns>(v, (saved ? p.saved_d : p.v) + at.of_head(p, row, p.value_dim) + at.column, values, rows,
                   p.value_dim - at.column, wide);
    if (saved) return;
    copy<kKeys>(q, p.q + at.of_key(p, row), keys, rows, p.key_dim, wide);
    if (p.beta) copy<1>(beta, p.beta + at.of_head(p, row, 1), p.heads, rows, 1, false);
  }

  // What all columns need of a row, computed once: a, and q . k.
  __device__ __forceinline__ void prepare(int rows) {
#pragma unroll 1
    for (int i = threadIdx.x; i < rows * kDecays; i += kThreads) a[i] = decay_of(a[i]);
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int row = warp; row < rows; row += kWarps + 1) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kKeys / 32; ++i)
        sum = __fmaf_rn(q[row * kKeys + 32 * i + lane], k[row * kKeys + 32 * i + lane], sum);
      sum = warp_sum(sum);
      if (lane == 0) qk[row] = sum;
    }
  }
};

// ---- the lane's part

// A lane's part of a row.
template <int kGroups, bool kPerKey>
struct Row {
  static constexpr int kKeys = 4 * kGroups;
  float k[kKeys], q[kKeys], a[kPerKey ? kKeys : 1], v[2], beta, qk;

  static __device__ __forceinline__ void read_keys(const float* row, float (&to)[kKeys]) {
#pragma unroll
    for (int m = 0; m < kGroups; ++m) {
      float four[4];
      load<float, 4>(row + kPerGroup * m + 4 * (threadIdx.x % kParts), four);
#pragma unroll
      for (int e = 0; e < 4; ++e) to[4 * m + e] = four[e];
    }
  }
  // What moves the state.
  __device__ __forceinline__ void read(const Chunk<kGroups, kPerKey>& chunk, int row) {
    using C = Chunk<kGroups, kPerKey>;
    read_keys(chunk.k + row * C::kKeys, k);
    if constexpr (kPerKey)
      read_keys(chunk.a + row * C::kKeys, a);
    else
      a[0] = chunk.a[row];
    const float2 pair = *reinterpret_cast<const float2*>(chunk.v + row * kColumns + threadIdx.x / kParts * 2);
    v[0] = pair.x, v[1] = pair.y;
  }
  __device__ __forceinline__ void read_all(const Chunk<kGroups, kPerKey>& chunk, int row, bool delta) {
    read(chunk, row);
    read_keys(chunk.q + row * Chunk<kGroups, kPerKey>::kKeys, q);
    beta = delta ? chunk.beta[row] : 1.0f;
    qk = chunk.qk[row];
  }
};

// Two neighbours; `left` columns are left from the first one on.
static __device__ __forceinline__ void store_pair(float* to, const float (&x)[2], int64_t left, bool wide) {
  if (wide) {
    if (left > 0) *reinterpret_cast<float2*>(to) = make_float2(x[0], x[1]);
  } else {
    if (left > 0) to[0] = x[0];
    if (left > 1) to[1] = x[1];
  }
}

template <int kGroups>
struct State {
  static constexpr int kKeys = 4 * kGroups;
  float s[kKeys][2];

  static __device__ __forceinline__ int key(int i) { return i / 4 * kPerGroup + 4 * int(threadIdx.x % kParts) + i % 4; }
  // from: the first key's, at the lane's first column.
  __device__ __forceinline__ void load(const GatedRecurrenceParams& p, const float* from, int64_t left, bool wide) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const float* at = from + key(i) * p.value_dim;
      const bool there = key(i) < p.key_dim;
      float2 pair = make_float2(0.0f, 0.0f);
      if (wide) {
        if (there && left > 0) pair = *reinterpret_cast<const float2*>(at);
      } else {
        if (there && left > 0) pair.x = at[0];
        if (there && left > 1) pair.y = at[1];
      }
      s[i][0] = pair.x, s[i][1] = pair.y;
    }
  }
  __device__ __forceinline__ void store(const GatedRecurrenceParams& p, float* to, int64_t left, bool wide) const {
    const int64_t stride = opaque(p.value_dim);
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
      if (key(i) < p.key_dim) store_pair(to + key(i) * stride, s[i], left, wide);
  }
  template <bool kPerKey>
  __device__ __forceinline__ void decay(const Row<kGroups, kPerKey>& row) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) s[i][c] = decayed(row.a[kPerKey ? i : 0], s[i][c]);
  }
  __device__ __forceinline__ void add(const float (&k)[kKeys], const float (&d)[2]) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
#pragma unroll
      for (int c = 0; c < 2; ++c) s[i][c] = advanced(s[i][c], k[i], d[c]);
  }
  // The sums over all keys, for both columns; the lane's own in four chains.
  __device__ __forceinline__ void dot(const float (&x)[kKeys], float (&sum)[2]) const {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      float chain[4] = {};
#pragma unroll
      for (int i = 0; i < kKeys; ++i) chain[i % 4] = __fmaf_rn(s[i][c], x[i], chain[i % 4]);
      sum[c] = __fadd_rn(__fadd_rn(chain[0], chain[1]), __fadd_rn(chain[2], chain[3]));
    }
#pragma unroll
    for (int step = kParts / 2; step > 0; step /= 2)
#pragma unroll
      for (int c = 0; c < 2; ++c) sum[c] = __fadd_rn(sum[c], __shfl_xor_sync(kAllLanes, sum[c], step));
  }
};

// ---- saving k and a

// One warp: to = f(from) for rows of `count` floats.
template <int kWidth, typename F>
static __device__ __forceinline__ void move_rows(const float* from, int64_t from_stride, float* to, int64_t to_stride,
                                                 int rows, int count, F f) {
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

// One warp of every block, once the whole block has read the saved rows: the last of the blocks that count on the same
// counter overwrites them. A counter serves one key head, or more when there are too many; it wraps to zero.
static __device__ __forceinline__ void save(const GatedRecurrenceParams& p, const Place& at, bool wide) {
  const int64_t units = p.batch * p.key_heads, counter = (at.b * p.key_heads + at.key_head) % kNumCounters;
  const int64_t members = ceil_div(units - counter, kNumCounters);
  const unsigned last = unsigned(members * (p.heads / p.key_heads) * ceil_div(p.value_dim, kColumns) - 1);
  unsigned ticket = 0;
  if (threadIdx.x % 32 == 0) ticket = count_up(p.counters + counter, last);
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
  grid_begin();
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
    // The next chunk, or the first two. All that was saved is copied, without waiting for the number that counts.
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
      if (part == 0) store_pair(p.out + at.of_head(p, at.b * p.rows + t, p.value_dim) + column, read, left, wide);
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
  return launch_overlapping(
      p.beta ? gated_recurrence_kernel<kGroups, kPerKey, true> : gated_recurrence_kernel<kGroups, kPerKey, false>,
      dim3(unsigned(p.batch * p.heads * ceil_div(p.value_dim, kColumns))), dim3(kThreads), kBytes, stream, p, wide);
}

cudaError_t launch_gated_recurrence(const GatedRecurrenceParams& p, cudaStream_t stream) {
  if (p.key_dim > kMaxRecurrentKeys) return cudaErrorInvalidValue;
  const bool per_key = p.decay_dim > 1;
  const bool wide = p.key_dim % 4 == 0 && p.value_dim % 4 == 0 &&
                    aligned16(p.q, p.k, p.v, p.state, p.saved_k, p.saved_d, p.out) &&
                    (!per_key || aligned16(p.log_decay, p.saved_a));
  const auto launch = [&](auto groups) {
    constexpr int kGroups = decltype(groups)::value;
    return per_key ? launch_groups<kGroups, true>(p, wide, stream) : launch_groups<kGroups, false>(p, wide, stream);
  };
  return run_on_device(p, p.batch, [&] {
    return p.key_dim <= 2 * kPerGroup   ? launch(std::integral_constant<int, 2>())
           : p.key_dim <= 4 * kPerGroup ? launch(std::integral_constant<int, 4>())
                                        : launch(std::integral_constant<int, 8>());
  });
}

}  // namespace dflash
