// The columns of a state are independent, so they are the lanes. A tile of up to 32 columns (16 KB at a key_dim of 128)
// stays in the L1 cache while the saved rows and all rows of the pass move it. One sweep moves it by a row and sums
// both what this row reads and what the next row's correction needs: four operations per element bound the speed.
#include "cpu/base/parallel.h"

DFLASH_NAMESPACE_BEGIN

constexpr int kVecs = kWidth == 16 ? 2 : 4;
constexpr int64_t kColumns = kVecs * kWidth;
constexpr int64_t kSum = 32;  // products in one running sum: a long one loses more precision

// One value per column of a tile, in registers.
struct Columns {
  Vec lanes[kVecs] = {};

  static Columns read(const float* from, int64_t columns) {
    float padded[kColumns];
    if (columns < kColumns) {
      std::memset(padded, 0, sizeof(padded));
      std::memcpy(padded, from, sizeof(float) * columns);
      from = padded;
    }
    Columns x;
    for (int i = 0; i < kVecs; ++i) x.lanes[i] = load(from + i * kWidth);
    return x;
  }
  void write(float* to, int64_t columns) const {
    float padded[kColumns];
    float* whole = columns < kColumns ? padded : to;
    for (int i = 0; i < kVecs; ++i) store(whole + i * kWidth, lanes[i]);
    if (whole != to) std::memcpy(to, padded, sizeof(float) * columns);
  }
};

// kColumns columns of a matrix, rows `stride` apart.
struct Place {
  float* values;
  int64_t stride = kColumns;
};

// tile = a from + k d^T: the one place where a state moves, by explicit operations, so that a row moves it to the same
// bits when it is verified and when it is applied again. With kRead, out = tile^T q; with kPredict, held = tile^T next;
// with kWrite, `to` becomes the tile too.
template <bool kPerChannel, bool kRead, bool kPredict, bool kWrite = false>
static inline void advance(Place from, float* tile, Place to, int64_t key_dim, const float* a, const float* k,
                           const Columns& d, const float* q, Columns& out, const float* next, Columns& held) {
  Vec decay = splat(a[0]);
  Columns row = d, total_out, total_held;
  for (int64_t first = 0; first < key_dim; first += kSum) {
    const int64_t end = least(first + kSum, key_dim);
    Columns sum_out, sum_held;
    for (int64_t i = first; i < end; ++i) {
      if (kPerChannel) decay = splat(a[i]);
      const Vec key = splat(k[i]), query = kRead ? splat(q[i]) : Vec{}, ahead = kPredict ? splat(next[i]) : Vec{};
      const float* source = from.values + i * from.stride;
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v) {
        const Vec moved = fma_vec(key, row.lanes[v], decay * load(source + v * kWidth));
        store(tile + i * kColumns + v * kWidth, moved);
        if (kWrite) store(to.values + i * to.stride + v * kWidth, moved);
        if (kRead) sum_out.lanes[v] = fma_vec(moved, query, sum_out.lanes[v]);
        if (kPredict) sum_held.lanes[v] = fma_vec(moved, ahead, sum_held.lanes[v]);
      }
    }
    for (int v = 0; v < kVecs; ++v) {
      total_out.lanes[v] += sum_out.lanes[v];
      total_held.lanes[v] += sum_held.lanes[v];
    }
  }
  if (kRead) out = total_out;
  if (kPredict) held = total_held;
}

// held = tile^T next, by the sums of advance.
static inline void predict(const float* tile, int64_t key_dim, const float* next, Columns& held) {
  held = {};
  for (int64_t first = 0; first < key_dim; first += kSum) {
    const int64_t end = least(first + kSum, key_dim);
    Columns sum;
    for (int64_t i = first; i < end; ++i)
      for (int v = 0; v < kVecs; ++v)
        sum.lanes[v] = fma_vec(load(tile + i * kColumns + v * kWidth), splat(next[i]), sum.lanes[v]);
    for (int v = 0; v < kVecs; ++v) held.lanes[v] += sum.lanes[v];
  }
}

static void exponentiate(float* x, int64_t n) {
  over_vectors(n, [&](int64_t i, auto count) { store(x + i, exp_vec(load(x + i, count)), count); });
}

// One head of one sequence, and memory for what its tiles share.
struct Head {
  const GatedRecurrenceParams& p;
  int64_t b, h, key_head, pending, keep;
  float* tile;       // [key_dim, kColumns]
  float* a;          // [rows, decay_dim]
  float* decayed_k;  // [rows, key_dim], a k: S'^T k = S^T (a k)

  Head(const GatedRecurrenceParams& p, int64_t b, int64_t h) : p(p), b(b), h(h) {
    static thread_local Buffer<float> memory;
    const int64_t tile_size = p.key_dim * kColumns, decays = ceil_div(p.rows * p.decay_dim, 16) * 16;
    key_head = h / (p.heads / p.key_heads);
    pending = clamped(p.pending[b], p.block), keep = clamped(p.keep[b], p.rows);
    tile = memory.reserve(tile_size + decays + p.rows * p.key_dim);
    a = tile + tile_size, decayed_k = a + decays;
    for (int64_t t = 0; t < p.rows; ++t)
      std::memcpy(a + t * p.decay_dim, p.log_decay + ((b * p.rows + t) * p.heads + h) * p.decay_dim,
                  sizeof(float) * p.decay_dim);
    exponentiate(a, p.rows * p.decay_dim);
    for (int64_t t = 0; p.beta && t < p.rows; ++t)
      for (int64_t i = 0; i < p.key_dim; ++i)
        decayed_k[t * p.key_dim + i] = key(p.k, t)[i] * a[p.decay_dim == 1 ? t : t * p.key_dim + i];
  }

  const float* key(const float* of, int64_t t) const {
    return of + ((b * p.rows + t) * p.key_heads + key_head) * p.key_dim;
  }

  float* state_at(int64_t column) const { return p.state + (b * p.heads + h) * p.key_dim * p.value_dim + column; }

  void move_tile(int64_t column, int64_t columns, bool from_state) const {
    float* state = state_at(column);
    for (int64_t i = 0; i < p.key_dim; ++i) {
      float *here = tile + i * kColumns, *there = state + i * p.value_dim;
      from_state ? Columns::read(there, columns).write(here, kColumns)
                 : Columns::read(here, kColumns).write(there, columns);
    }
  }

  // Asks for row t's share of what the next tile reads and writes, which comes from memory while this one is worked on.
  // Behind the last tile of a head lies the next head's first. Inlined, because GCC drops a call that only prefetches.
  __attribute__((always_inline)) void prefetch_next(int64_t column, int64_t t) const {
    const bool is_last = column + kColumns >= p.value_dim;
    if (is_last && h + 1 == p.heads) return;
    const int64_t head = b * p.heads + h, next = column + kColumns;
    const float* state = p.state + head * p.key_dim * p.value_dim + (is_last ? p.key_dim * p.value_dim : next);
    const int64_t share = ceil_div(p.key_dim, p.rows), end = least((t + 1) * share, p.key_dim);
    for (int64_t i = t * share; i < end; ++i)
      for (int64_t line = 0; line < kColumns; line += 16) __builtin_prefetch(state + i * p.value_dim + line, 0, 2);
    if (t >= p.block) return;
    const float* saved = p.saved_d + ((b * p.block + t) * p.heads + h) * p.value_dim + next;
    for (int64_t line = 0; line < kColumns; line += 16) __builtin_prefetch(saved + line, 1, 3);
  }

  // Applies the saved rows: tile = the state after them, and the state too if `write`. With
  // kPredict, held = tile^T decayed_k. A whole tile is read and written on the way, by the first row and the last.
  template <bool kPerChannel, bool kPredict>
  void replay(int64_t column, int64_t columns, bool write, Columns& held) const {
    const bool is_whole = columns == kColumns;
    const Place own{tile}, state{state_at(column), p.value_dim};
    if (!is_whole || pending == 0) move_tile(column, columns, true);
    Columns none;
    for (int64_t t = 0; t < pending; ++t) {
      const int64_t slot = b * p.block + t, head = slot * p.heads + h;
      const float *k = p.saved_k + (slot * p.key_heads + key_head) * p.key_dim, *a = p.saved_a + head * p.decay_dim;
      const Columns d = Columns::read(p.saved_d + head * p.value_dim + column, columns);
      const Place from = is_whole && t == 0 ? state : own;
      if (t + 1 < pending)
        advance<kPerChannel, false, false>(from, tile, own, p.key_dim, a, k, d, nullptr, none, nullptr, none);
      else if (is_whole && write)
        advance<kPerChannel, false, kPredict, true>(from, tile, state, p.key_dim, a, k, d, nullptr, none, decayed_k,
                                                    held);
      else
        advance<kPerChannel, false, kPredict>(from, tile, own, p.key_dim, a, k, d, nullptr, none, decayed_k, held);
    }
    if (!is_whole && write && pending > 0) move_tile(column, columns, false);
    if (kPredict && pending == 0) predict(tile, p.key_dim, decayed_k, held);
  }

  template <bool kPerChannel, bool kCorrected>
  void run(int64_t column, bool ahead) const {
    const int64_t columns = least(kColumns, p.value_dim - column);
    const Place own{tile};
    Columns held, out;
    p.rows > 0 ? replay<kPerChannel, kCorrected>(column, columns, keep == 0, held)
               : replay<kPerChannel, false>(column, columns, keep == 0, held);
    for (int64_t t = 0; t < p.rows; ++t) {
      const int64_t row = (b * p.rows + t) * p.heads + h;
      const float *row_a = a + t * p.decay_dim, *k = key(p.k, t), *q = key(p.q, t);
      const float* next = decayed_k + (t + 1) * p.key_dim;
      if (ahead) prefetch_next(column, t);
      Columns d = Columns::read(p.v + row * p.value_dim + column, columns);
      if (kCorrected)
        for (int v = 0; v < kVecs; ++v) d.lanes[v] = (d.lanes[v] - held.lanes[v]) * p.beta[row];
      if (kCorrected && t + 1 < p.rows)
        advance<kPerChannel, true, true>(own, tile, own, p.key_dim, row_a, k, d, q, out, next, held);
      else
        advance<kPerChannel, true, false>(own, tile, own, p.key_dim, row_a, k, d, q, out, next, held);
      out.write(p.out + row * p.value_dim + column, columns);
      if (t < p.block) d.write(p.saved_d + ((b * p.block + t) * p.heads + h) * p.value_dim + column, columns);
      if (t + 1 == keep) move_tile(column, columns, false);
    }
  }

  // `ahead`: the next tile is this thread's too.
  void run(int64_t column, bool ahead) const {
    if (p.decay_dim == 1)
      p.beta ? run<false, true>(column, ahead) : run<false, false>(column, ahead);
    else
      p.beta ? run<true, true>(column, ahead) : run<true, false>(column, ahead);
  }
};

// After all heads, which share keys, and all tiles, which share decays.
static void save_row(const GatedRecurrenceParams& p, int64_t b, int64_t t) {
  const int64_t keys = p.key_heads * p.key_dim, decays = p.heads * p.decay_dim;
  const int64_t row = b * p.rows + t, slot = b * p.block + t;
  std::memcpy(p.saved_k + slot * keys, p.k + row * keys, sizeof(float) * keys);
  std::memcpy(p.saved_a + slot * decays, p.log_decay + row * decays, sizeof(float) * decays);
  exponentiate(p.saved_a + slot * decays, decays);
}

DFLASH_NAMESPACE_END

void dflash::DFLASH_ISA::gated_recurrence(const GatedRecurrenceParams& p) {
  const int64_t heads = p.batch * p.heads, tiles = ceil_div(p.value_dim, kColumns);
  const int64_t parts = p.threads > 1 && heads < 4 * p.threads ? tiles : 1;
  parallel_for(heads * parts, heads * p.rows * p.key_dim * p.value_dim, p.threads, [&](int64_t i) {
    const Head head(p, i / parts / p.heads, i / parts % p.heads);
    for (int64_t tile = i % parts; tile < tiles; tile += parts) head.run(tile * kColumns, parts == 1);
  });
  const int64_t saved = least(p.rows, p.block);
  const int64_t elements = p.batch * saved * (p.key_heads * p.key_dim + p.heads * p.decay_dim);
  parallel_for(p.batch * saved, elements, p.threads, [&](int64_t i) { save_row(p, i / saved, i % saved); });
}
