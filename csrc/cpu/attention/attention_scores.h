// q k^T of block_attention.cpp. The queries of a group times the keys of a tile are a product like those of linear.cpp,
// with keys in place of weights, and go through the same kernels.
#pragma once
#include "cpu/attention/attention_group.h"
#include "cpu/linear/linear_few.h"
#if DFLASH_TILES
#include "cpu/linear/linear_amx.h"
#endif

DFLASH_NAMESPACE_BEGIN

// Calls fn(first lane, number of vectors as a constant) over all lanes.
template <int NV, typename Fn>
static inline void over_lanes(int64_t lane, int64_t lanes, const Fn& fn) {
  for (; lane + NV * kWidth <= lanes; lane += NV * kWidth) fn(lane, std::integral_constant<int, NV>{});
  if constexpr (NV > 1) over_lanes<NV - 1>(lane, lanes, fn);
}

// True if a group has too few queries to fill the lanes, which then hold columns and keys.
static inline bool has_few(const Group& g) { return kWidth == 16 && g.live <= kFewRows; }

// A group's queries, packed once for the kernel that multiplies them. The choice of kernel does not affect the bits.
template <typename T>
class Queries {
 public:
  Queries(const BlockAttentionParams& p, const Group& g)
      : live_(g.live), lanes_(g.lanes), dim_(p.head_dim), words_(words_of<T>(dim_)), few_(has_few(g) && !kOnTiles) {
    static thread_local Buffer<T> row_buffer;
    static thread_local Buffer<Word<T>> buffer;
    T* rows = row_buffer.reserve(live_ * dim_);
    copy_queries(p, g, rows);
    packed_ = buffer.reserve(words_ * (few_ ? kFewRows : lanes_));
    if (few_)
      copy_rows(rows, live_, kFewRows, dim_, words_, packed_);
    else
      over_lanes<kMostVecs>(0, lanes_, [&](int64_t lane, auto vecs) {
        const int64_t count = least(vecs * kWidth, live_ - lane);
        pack_rows(rows + lane * dim_, count, dim_, vecs * kWidth, packed_ + lane * words_);
      });
  }

  // scores [keys, lanes] of k [keys, head_dim]
  void score(const T* k, int64_t keys, float* scores) const {
#if defined(__AVX512F__)
    if (few_) return score_few(k, keys, scores);
#endif
    over_lanes<kMostVecs>(0, lanes_, [&](int64_t lane, auto vecs) {
      constexpr int kKeys = kKeysAtOnce<vecs>;
      alignas(64) float sums[kKeys * vecs * kWidth];
      for (int64_t key = 0; key < keys; key += kKeys) {
        const int64_t count = least(kKeys, keys - key);
        multiply_keys<vecs>(packed_ + lane * words_, k + key * dim_, count, sums);
        for (int64_t i = 0; i < count; ++i)
          for (int v = 0; v < vecs; ++v)
            store(scores + (key + i) * lanes_ + lane + v * kWidth, load(sums + (i * vecs + v) * kWidth));
      }
    });
  }

 private:
  static constexpr int kMostVecs = kWidth == 16 ? 4 : 2;
#if DFLASH_TILES
  static constexpr bool kOnTiles = sizeof(T) == 2;
  template <int NV>
  static constexpr int kKeysAtOnce = kOnTiles ? kBlockFeatures<NV> : kTile;
#else
  static constexpr bool kOnTiles = false;
  template <int NV>
  static constexpr int kKeysAtOnce = kTile;
#endif

  void copy_queries(const BlockAttentionParams& p, const Group& g, T* rows) const {
    const int64_t heads = p.num_heads / p.num_kv_heads;
    for (int64_t query = g.first; query < g.first + g.live; ++query, rows += p.head_dim)
      std::memcpy(rows,
                  static_cast<const T*>(p.q) + g.batch * p.q_stride_batch + query / heads * p.q_stride_row +
                      (g.kv_head * heads + query % heads) * p.q_stride_head,
                  p.head_dim * sizeof(T));
  }

  // sums [kKeysAtOnce<NV>, NV vectors of lanes] of `count` keys
  template <int NV>
  void multiply_keys(const Word<T>* packed, const T* k, int64_t count, float* sums) const {
#if DFLASH_TILES
    if constexpr (kOnTiles)
      multiply_on_tiles<NV>(packed, dim_, k, count, sums);
    else
#endif
      multiply_in_lanes<T, NV>(packed, dim_, k, count, sums);
  }

#if defined(__AVX512F__)
  void score_few(const T* k, int64_t keys, float* scores) const {
    live_ == 1   ? score_rows<1>(k, keys, scores)
    : live_ == 2 ? score_rows<2>(k, keys, scores)
    : live_ <= 4 ? score_rows<4>(k, keys, scores)
                 : score_rows<kFewRows>(k, keys, scores);
  }

  // Scores of the first ROWS lanes at most; those of the others are zero.
  template <int ROWS>
  void score_rows(const T* k, int64_t keys, float* scores) const {
    std::memset(scores, 0, keys * lanes_ * sizeof(float));
    for (int64_t key = 0; key < keys; key += kTile) {
      const int64_t count = least(kTile, keys - key);
      alignas(64) float sums[ROWS * kTile];
      multiply_few<T, ROWS>(packed_, words_, dim_, k + key * dim_, count, sums);
      for (int64_t i = 0; i < count; ++i)
        for (int64_t row = 0; row < live_; ++row) scores[(key + i) * lanes_ + row] = sums[row * kTile + i];
    }
  }
#endif

#if DFLASH_TILES
  const TileRegisters registers_;  // of the thread that attends
#endif
  int64_t live_, lanes_, dim_, words_;
  bool few_;
  Word<T>* packed_;  // [words, lanes] of each kMostVecs vectors of lanes, or [kFewRows, words]
};

DFLASH_NAMESPACE_END
