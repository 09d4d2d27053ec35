// A tile whose rows belong to a tree, see block_attention.cu.
#pragma once
#include "cuda/attention/attention_tile.cuh"

namespace dflash {

// In a stage of 32 positions that reaches into the block, each row of the tree has keys of its own: those of its path,
// at the positions where a chain would have them. A product of tensor cores takes such a row's keys and values through
// the addresses of ldmatrix and counts for the rows that share them; the other rows keep what they had. So a row's sums
// are those of a chain.
//
// All K/V rows of the block are copied to shared memory 64 columns at a time, first of K, then of V, with the slots of
// the stage in front of the block. A key is named by its row there.
constexpr int kTreeColumns = 64;
constexpr int kTreeKeys = kKeys + int(kMaxTreeRows);  // rows of shared memory: slots before the block, the block
constexpr int kNoKey = kKeys - 1;  // a row of zeros: a stage holds a slot of the block, so fewer before it
constexpr int kTreeRing = 3;       // copies in turn

// What the stage looks like to the 16 rows that a warp owns.
struct WarpPaths {
  unsigned char keys[16][kKeys];    // by node among the rows, then position
  unsigned char shared[2][16][16];  // by half of the stage: the keys of rows that share them
  unsigned char ends[2][16];        // where such rows end
  int passes[2];                    // how many such sets of rows there are
};

template <typename T, int kDim>
struct TreeTile : Tile<T, kDim, true> {
  using Base = Tile<T, kDim, true>;
  using Base::batch, Base::begin, Base::end, Base::first_row, Base::group, Base::k, Base::lane, Base::length,
      Base::live, Base::p, Base::v, Base::warp, Base::warp_row;

  static constexpr int kCopy = kTreeKeys * kTreeColumns;  // elements
  static constexpr int kPiecesPerRow = kTreeColumns / 8, kApart = kThreads<kDim> / kPiecesPerRow;
  static constexpr int kParts = kDim / kTreeColumns;  // of K, then as many of V

  WarpPaths* paths;    // [kRows / 16]
  unsigned* bad_rows;  // [kTreeKeys / 32]: a bit per value row that is not finite

  static constexpr int kBytes =
      kRows * kDim * 2 + kTreeRing * kCopy * 2 + kRows / 16 * int(sizeof(WarpPaths)) + kTreeKeys / 8;

  __device__ __forceinline__ TreeTile(const TileRows<T, kDim>& rows, unsigned* bad)
      : Base(rows, bad, 0, deepest(rows, bad)),
        paths(reinterpret_cast<WarpPaths*>(Base::stages + kTreeRing * kCopy)),
        bad_rows(reinterpret_cast<unsigned*>(paths + kRows / 16)) {
    Base::all_to = max(0, min(length, end));  // rows of the block are not seen by all
  }

  // The depth of the deepest row of a tile.
  static __device__ __forceinline__ int deepest(const TileRows<T, kDim>& rows, unsigned* scratch) {
    const int query = rows.first_row / rows.group + int(threadIdx.x),
              last = (rows.first_row + rows.live - 1) / rows.group;
    const unsigned depth = query <= last ? path_of(rows.p, rows.batch, query).depth() : 0;
    const unsigned most = __reduce_max_sync(kAllLanes, depth);
    if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = most;
    __syncthreads();
    unsigned all = 0;
#pragma unroll
    for (int i = 0; i < kThreads<kDim> / 32; ++i) all = max(all, scratch[i]);
    return int(all);
  }

  __device__ __forceinline__ T* ring(int part) const { return Base::stages + part % kTreeRing * kCopy; }
  __device__ __forceinline__ int node(int row) const { return (first_row + row) / group; }
  __device__ __forceinline__ WarpPaths& own_paths() const { return paths[warp_row() / 16]; }

  // Copies 64 columns of the stage at `from`; absent slots become zeros.
  __device__ __forceinline__ void copy_part(int part, int from) const {
    const int piece = threadIdx.x % kPiecesPerRow, column = part % kParts * kTreeColumns + piece * 8;
    const int dim = int(part < kParts ? p.head_dim : p.v_head_dim);
    const T* source = (part < kParts ? k : v) + column;
    const int before = min(length, int(p.capacity)) - from;
    for (int row = threadIdx.x / kPiecesPerRow; row < kKeys + int(p.rows); row += kApart) {
      const int slot = row < kKeys ? from + row : length + row - kKeys;
      const bool valid = column < dim && (row < kKeys ? row < before : slot >= 0 && slot < p.capacity);
      cp_async16_if(ring(part) + place<kTreeColumns>(row, piece), source + int64_t(valid ? slot : 0) * dim, valid);
    }
  }

  // Zeros replace what is not finite in the values that this thread has copied, see clear_bad_values.
  __device__ __forceinline__ void clear_bad_part(int part) const {
    const int piece = threadIdx.x % kPiecesPerRow;
    for (int row = threadIdx.x / kPiecesPerRow; row < kKeys + int(p.rows); row += kApart) {
      T* at = ring(part) + place<kTreeColumns>(row, piece);
      const uint4 w = load16(at);
      if (not_finite<T>(w.x) || not_finite<T>(w.y) || not_finite<T>(w.z) || not_finite<T>(w.w)) {
        store16(at, make_uint4(0, 0, 0, 0));
        atomicOr(bad_rows + row / 32, 1u << row % 32);
      }
    }
  }

  // Fills the paths of the warp's rows for the stage at `from`. By the warp.
  __device__ __forceinline__ void find_paths(int from) const {
    WarpPaths& to = own_paths();
    const int first = node(warp_row()), last = node(min(warp_row() + 16, live) - 1);
    for (int query = first; query <= last; ++query) {
      const Path path = path_of(p, batch, query);
      const Sight sight = sight_of(p, length, path.depth());
      unsigned char* keys = to.keys[query - first];
      const bool before = from + lane() < length && sight.sees(from + lane());
      keys[lane()] = (unsigned char)(before ? lane() : kNoKey);
      __syncwarp();
      for (int row = lane(); row < p.rows; row += 32) {
        const int position = length + path.depth_of(row), place = position - from;
        if (path.holds(row) && place >= 0 && place < kKeys && sight.sees(position) && length + row < p.capacity)
          keys[place] = (unsigned char)(kKeys + row);
      }
    }
    __syncwarp();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int passes = 0, shared = kNoKey;
      const auto add_pass = [&](int end) {
        if (lane() < 16) to.shared[half][passes][lane()] = (unsigned char)shared;
        if (lane() == 0) to.ends[half][passes] = (unsigned char)end;
        ++passes;
      };
      for (int query = first; query <= last; ++query) {
        const int key = to.keys[query - first][half * 16 + lane() % 16];
        if (!__all_sync(kAllLanes, key == shared || key == kNoKey || shared == kNoKey)) {
          add_pass(query * group - first_row - warp_row());
          shared = kNoKey;
        }
        if (key != kNoKey) shared = key;
      }
      if (__any_sync(kAllLanes, shared != kNoKey)) add_pass(16);
      if (lane() == 0) to.passes[half] = passes;
    }
  }

  // Calls product(half, keys, takes) for each set of rows with their 16 keys: takes(i) is true if the thread's row i is
  // one of them.
  template <typename F>
  __device__ __forceinline__ void for_passes(F&& product) const {
    const WarpPaths& paths = own_paths();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int begin = 0;
      const int passes = paths.passes[half];
      for (int pass = 0; pass < passes; ++pass) {
        const int end = paths.ends[half][pass];
        product(half, paths.shared[half][pass], [&](int i) {
          const int row = lane() / 4 + 8 * i;
          return row >= begin && row < end;
        });
        begin = end;
      }
    }
  }

  // Adds 64 columns of the dot products to the scores.
  __device__ __forceinline__ void score_part(float (&score)[kKeys / 8][4], int part) const {
    for_passes([&](int half, const unsigned char* keys, auto takes) {
      const int at = place<kTreeColumns>(keys[lane() / 16 * 8 + lane() % 8], lane() / 8 % 2);
      float left[4], right[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) left[e] = score[2 * half][e], right[e] = score[2 * half + 1][e];
#pragma unroll
      for (int d = 0; d < kTreeColumns / 16; ++d) {
        uint32_t a[4], b[4];
        Base::load_queries(a, part * (kTreeColumns / 16) + d);
        ldmatrix(b, ring(part) + (at ^ 16 * d));
        const uint32_t first[2] = {b[0], b[1]}, second[2] = {b[2], b[3]};
        mma_m16n8k16(left, a, first, T());
        mma_m16n8k16(right, a, second, T());
      }
#pragma unroll
      for (int e = 0; e < 4; ++e)
        if (takes(e / 2)) score[2 * half][e] = left[e], score[2 * half + 1][e] = right[e];
    });
  }

  // Adds the weighted values of 64 columns, the n-th of the columns that the warp owns.
  template <int n>
  __device__ __forceinline__ void add_values(State<kDim>& s, const uint32_t (&weight)[kKeys / 8][2], int part) const {
    for_passes([&](int half, const unsigned char* keys, auto takes) {
      const int at = place<kTreeColumns>(keys[lane() % 16], lane() / 16);
      const uint32_t a[4] = {weight[2 * half][0], weight[2 * half][1], weight[2 * half + 1][0],
                             weight[2 * half + 1][1]};
#pragma unroll
      for (int d = 0; d < kTreeColumns / 16; ++d) {
        uint32_t b[4];
        ldmatrix_transposed(b, ring(part) + (at ^ 16 * d));
#pragma unroll
        for (int side = 0; side < 2; ++side) {
          float (&out)[4] = s.out[n * (kTreeColumns / 8) + 2 * d + side];
          const uint32_t values[2] = {b[2 * side], b[2 * side + 1]};
          float sum[4] = {out[0], out[1], out[2], out[3]};
          mma_m16n8k16(sum, a, values, T());
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (takes(e / 2)) out[e] = sum[e];
        }
      }
    });
  }

  __device__ __forceinline__ int key_of(int i, int place) const {
    const int row = warp_row() + lane() / 4 + 8 * i;
    return own_paths().keys[node(min(row, live - 1)) - node(warp_row())][place];
  }

  // Waits for a part, and copies the one after the next into the memory that is free now.
  __device__ __forceinline__ void next_part(int part, int from) const {
    cp_async_wait<kTreeRing - 2>();
    if (part >= kParts) clear_bad_part(part);
    __syncthreads();
    if (part + kTreeRing - 1 < 2 * kParts) copy_part(part + kTreeRing - 1, from);
    cp_async_commit();
  }

  // Adds the 32 positions from `from` on, some of which are the block's.
  __device__ __forceinline__ void attend_positions(State<kDim>& s, int from) const {
    const bool works = warp_row() < live;
    __syncthreads();  // all threads have read what the memory held before
#pragma unroll
    for (int part = 0; part < kTreeRing - 1; ++part) {
      copy_part(part, from);
      cp_async_commit();
    }
    if (threadIdx.x < kTreeKeys / 32) bad_rows[threadIdx.x] = 0;
    if (works && Base::column() == 0) find_paths(from);
    float score[kKeys / 8][4] = {};
#pragma unroll 1
    for (int part = 0; part < kParts; ++part) {
      next_part(part, from);
      if (works) score_part(score, part);
    }
    uint32_t weight[kKeys / 8][2];
    if (works) {
      Base::scale_scores(score);
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (key_of(e / 2, n * 8 + lane() % 4 * 2 + e % 2) == kNoKey) score[n][e] = -infinity();
      Base::weigh(s, score, weight);
    }
    add_all_values<0>(s, weight, from, works);
    unsigned any_bad = 0;
#pragma unroll
    for (int i = 0; i < kTreeKeys / 32; ++i) any_bad |= bad_rows[i];
    if (!works || !any_bad) return;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int key = key_of(e / 2, n * 8 + lane() % 4 * 2 + e % 2);
        if (score[n][e] != 0.0f && bad_rows[key / 32] >> key % 32 & 1) s.sum[e / 2] = not_a_number();
      }
  }

  template <int n>
  __device__ __forceinline__ void add_all_values(State<kDim>& s, const uint32_t (&weight)[kKeys / 8][2], int from,
                                                 bool works) const {
    constexpr int kOwned = kColumns<kDim> / kTreeColumns;  // parts of a warp's columns
    next_part(kParts + n, from);
    if (works && Base::column() / kTreeColumns == n / kOwned * kOwned) add_values<n % kOwned>(s, weight, kParts + n);
    if constexpr (n + 1 < kParts) add_all_values<n + 1>(s, weight, from, works);
  }

  // As Tile's: the slots before the block, then the positions of the block.
  __device__ __forceinline__ void attend_chunk(State<kDim>& s, int chunk, bool with_queries, int) const {
    const int2 slots = Base::slots_of(chunk);
    const int block = max(length, 0) / kKeys * kKeys;
    s.clear();
    Base::attend_slots(s, slots.x, min(slots.y, block), with_queries);
    for (int at = max(slots.x, block); at < slots.y; at += kKeys) attend_positions(s, at);
    Base::complete(s);
  }
};

}  // namespace dflash
