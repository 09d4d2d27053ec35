// One plain struct per op. Every pointer carries its shape; all tensors are contiguous and row-major unless a
// stride field says otherwise. Index tensors (positions, lengths, ids, counts) are int64. `threads` is how
// many a CPU kernel may use, `device` the CUDA device that holds the tensors; the binding sets both.
// wire() lists the fields in the order in which a Python call passes them (pack.h). This header is all that
// the kernels and the binding share.
#pragma once
#include <cstdint>
#include <tuple>

namespace dflash {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };  // kFloat16: CUDA only

// What is added to the weight of a norm: one if the model stores it less one. Adding -0 changes no bit.
#ifdef __CUDACC__
#define DFLASH_ANYWHERE __host__ __device__
#else
#define DFLASH_ANYWHERE
#endif
DFLASH_ANYWHERE constexpr float norm_offset(bool zero_centered) { return zero_centered ? 1.0f : -0.0f; }

// RMSNorm, with an optional residual added first and an optional count of live rows per sequence. With
// `front` each sequence of the result begins with rows of that tensor, as they are.
struct RmsNormParams {
  const void* x;         // [rows, hidden]
  const void* residual;  // [rows, hidden] or null
  const void* weight;    // [hidden]
  const int64_t*
      counts;  // [rows / rows_per_sequence] or null: rows past the count are written as zero, never read
  void* out;   // [rows, hidden]; [sequences, front_rows + rows_per_sequence, hidden]
  void* residual_out;  // [rows, hidden], x + residual; null without residual
  int64_t rows;
  int64_t hidden;
  int64_t rows_per_sequence;
  float eps;
  DType dtype;
  int32_t threads;
  int32_t device = 0;
  void* tap = nullptr;     // [rows, hidden], strided, or null: x + residual once more
  int64_t tap_stride = 0;  // between its rows, in elements
  bool zero_centered = false;
  const void* front = nullptr;  // [sequences, front_rows, hidden] or null
  int64_t sequences = 0;        // with front
  int64_t front_rows = 0;

  static constexpr auto wire() {
    using P = RmsNormParams;
    return std::tuple(&P::x, &P::residual, &P::weight, &P::counts, &P::front, &P::out, &P::residual_out,
                      &P::tap, &P::tap_stride, &P::rows, &P::hidden, &P::rows_per_sequence, &P::sequences,
                      &P::front_rows, &P::eps, &P::zero_centered, &P::dtype);
  }
};

// out[t] = sum of (base[i] + dynamic[t, i]) * x[t - i], i ascending: a convolution over the rows of a block,
// with zeros in front of it. A weight of zero adds nothing, not even a NaN. `front` is as in RmsNormParams.
struct DynamicConvParams {
  const void* x;        // [rows, hidden]
  const void* base;     // [width, hidden]
  const void* dynamic;  // [rows, width, groups], strided by row; a group is hidden / groups channels
  void* out;            // [rows, hidden]; [sequences, front_rows + block_rows, hidden]
  int64_t dynamic_stride_block, dynamic_stride_row;
  int64_t rows;        // of all blocks
  int64_t block_rows;  // of one block
  int64_t hidden;
  int64_t width;
  int64_t groups;
  DType dtype;
  int32_t threads;
  int32_t device = 0;
  const void* front = nullptr;  // [sequences, front_rows, hidden] or null
  int64_t sequences = 0;        // with front
  int64_t front_rows = 0;

  static constexpr auto wire() {
    using P = DynamicConvParams;
    return std::tuple(&P::x, &P::base, &P::dynamic, &P::front, &P::out, &P::dynamic_stride_block,
                      &P::dynamic_stride_row, &P::rows, &P::block_rows, &P::hidden, &P::width, &P::groups,
                      &P::sequences, &P::front_rows, &P::dtype);
  }
};

// Dynamic convolution of x, rounded to the storage type, in front of RMSNorm with a residual.
struct ConvAddRmsNormParams {
  const void* x;         // [rows, hidden]
  const void* base;      // [width, hidden]
  const void* dynamic;   // [rows, width, groups], as above
  const void* residual;  // [rows, hidden]
  const void* weight;    // [hidden]
  void* out;             // [rows, hidden]
  void* residual_out;    // [rows, hidden]
  void* tap;             // [rows, hidden], strided, or null
  int64_t tap_stride;
  int64_t dynamic_stride_block, dynamic_stride_row;
  int64_t rows;
  int64_t block_rows;
  int64_t hidden;
  int64_t width;
  int64_t groups;
  float eps;
  bool zero_centered;
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = ConvAddRmsNormParams;
    return std::tuple(&P::x, &P::base, &P::dynamic, &P::residual, &P::weight, &P::out, &P::residual_out,
                      &P::tap, &P::tap_stride, &P::dynamic_stride_block, &P::dynamic_stride_row, &P::rows,
                      &P::block_rows, &P::hidden, &P::width, &P::groups, &P::eps, &P::zero_centered,
                      &P::dtype);
  }
};

// The rows that a drafter takes: row 0 is the embedding of a sequence's last token, its anchor, row i that of
// draft i - 1, or of the mask where there are none yet. All are multiplied by `scale` and rounded.
struct DraftRowsParams {
  const int64_t* tokens;       // [batch, capacity]; the anchor is at length[b]
  const int64_t* length;       // [batch], clamped to 0 .. capacity - 1
  const int64_t* drafts;       // [batch, num_drafts] or null: masks
  const void* table;           // [vocab, hidden], strided; an id outside of it counts as the nearest
  const void* mask_embedding;  // [hidden] or null: the table's row mask_id
  void* embeds;                // [batch, rows, hidden]
  int64_t* anchor;             // [batch]
  int64_t* positions;          // [batch, num_drafts]: length[b] + 1, length[b] + 2, ...
  int64_t table_stride;
  int64_t batch;
  int64_t capacity;
  int64_t rows;  // at most num_drafts + 1
  int64_t num_drafts;
  int64_t vocab;
  int64_t hidden;
  int64_t mask_id;
  float scale;
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = DraftRowsParams;
    return std::tuple(&P::tokens, &P::length, &P::drafts, &P::table, &P::mask_embedding, &P::embeds,
                      &P::anchor, &P::positions, &P::table_stride, &P::batch, &P::capacity, &P::rows,
                      &P::num_drafts, &P::vocab, &P::hidden, &P::mask_id, &P::scale, &P::dtype);
  }
};

// out = silu(gate) * up, gate and up packed side by side.
struct SiluMulParams {
  const void* gate_up;  // [rows, 2 * width]: gate, then up
  void* out;            // [rows, width]
  int64_t rows;
  int64_t width;
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = SiluMulParams;
    return std::tuple(&P::gate_up, &P::out, &P::rows, &P::width, &P::dtype);
  }
};

// out = x * sigmoid(gate), as attention with an output gate has it per head.
struct SigmoidMulParams {
  const void* x;     // [rows, heads, width]
  const void* gate;  // [rows, heads, width], strided, the last dimension dense
  void* out;         // [rows, heads, width]; may be x
  int64_t gate_stride_row, gate_stride_head;
  int64_t rows;
  int64_t heads;
  int64_t width;
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = SigmoidMulParams;
    return std::tuple(&P::x, &P::gate, &P::out, &P::gate_stride_row, &P::gate_stride_head, &P::rows,
                      &P::heads, &P::width, &P::dtype);
  }
};

// Packed rows -> q heads (norm, RoPE) into q_out for the last q_rows rows, the block; k heads (norm, RoPE)
// and v heads of all rows into the cache. Row i of sequence b's block is in slot lengths[b] + i, at position
// lengths[b] + depth[b, i]. Row i in front of it is context, in slot and at position lengths[b] -
// num_context[b] + i, and off if it is at or past num_context[b]. A slot outside [0, capacity) appends
// nothing.
struct QkvNormRopeAppendParams {
  const void* qkv;  // [batch, rows, (num_heads + 2 * num_kv_heads) * head_dim]: q heads, k heads, v heads; if
                    // gated, each q head is followed by its gate, which is not read
  const int64_t* lengths;      // [batch], clamped to -q_rows .. 2 * capacity + q_rows
  const int64_t* num_context;  // [batch], clamped to 0 .. rows - q_rows; null if that is 0
  const int64_t* depth;        // [batch, q_rows], clamped to 0 .. q_rows; null: 0, 1, 2, ...
  const float* cos;            // [positions, half]; a position that it does not have takes the nearest
  const float* sin;            // [positions, half]
  const void* q_norm_weight;   // [head_dim] or null
  const void* k_norm_weight;   // [head_dim] or null
  void* q_out;                 // [batch, q_rows, num_heads, head_dim]
  void* k_cache;               // [batch, num_kv_heads, capacity, head_dim]
  void* v_cache;               // [batch, num_kv_heads, capacity, head_dim]
  int64_t batch;
  int64_t rows;
  int64_t q_rows;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t half;  // the first 2 * half dimensions of a head rotate
  int64_t positions;
  int64_t capacity;
  float eps;
  DType dtype;
  int32_t threads;
  int32_t device = 0;
  bool zero_centered = false;
  bool gated = false;
  bool prefetch = false;  // CUDA only: no kernel that may still run writes what is read, but for qkv

  static constexpr auto wire() {
    using P = QkvNormRopeAppendParams;
    return std::tuple(&P::qkv, &P::lengths, &P::num_context, &P::depth, &P::cos, &P::sin, &P::q_norm_weight,
                      &P::k_norm_weight, &P::q_out, &P::k_cache, &P::v_cache, &P::batch, &P::rows, &P::q_rows,
                      &P::num_heads, &P::num_kv_heads, &P::head_dim, &P::half, &P::positions, &P::capacity,
                      &P::eps, &P::zero_centered, &P::gated, &P::prefetch, &P::dtype);
  }
};

// The same for K and V only, for all layers.
struct AppendContextKvParams {
  const void* kv;             // [num_layers, batch, rows, 2 * num_kv_heads * head_dim]: k heads, v heads
  const int64_t* positions;   // [batch, rows]
  const float* cos;           // [batch, rows, half]
  const float* sin;           // [batch, rows, half]
  const void* k_norm_weight;  // [num_layers, head_dim] or null
  void* const* k_caches;      // [num_layers] pointers to [batch, num_kv_heads, capacity, head_dim]
  void* const* v_caches;      // [num_layers] pointers to [batch, num_kv_heads, capacity, head_dim]
  int64_t num_layers;
  int64_t batch;
  int64_t rows;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t half;
  int64_t capacity;
  float eps;
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = AppendContextKvParams;
    return std::tuple(&P::kv, &P::positions, &P::cos, &P::sin, &P::k_norm_weight, &P::k_caches, &P::v_caches,
                      &P::num_layers, &P::batch, &P::rows, &P::num_kv_heads, &P::head_dim, &P::half,
                      &P::capacity, &P::eps, &P::dtype);
  }
};

// cache[b, h, positions[b, r]] = new[b, h, r]; strides in elements, the last dimension dense.
struct AppendKvParams {
  const void* key;           // [batch, num_kv_heads, rows, head_dim], strided
  const void* value;         // [batch, num_kv_heads, rows, v_head_dim], strided
  const int64_t* positions;  // [batch, rows]
  void* k_cache;             // [batch, num_kv_heads, capacity, head_dim]
  void* v_cache;             // [batch, num_kv_heads, capacity, v_head_dim]
  int64_t k_stride_batch, k_stride_head, k_stride_row;
  int64_t v_stride_batch, v_stride_head, v_stride_row;
  int64_t batch;
  int64_t rows;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t v_head_dim;
  int64_t capacity;
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = AppendKvParams;
    return std::tuple(&P::key, &P::value, &P::positions, &P::k_cache, &P::v_cache, &P::k_stride_batch,
                      &P::k_stride_head, &P::k_stride_row, &P::v_stride_batch, &P::v_stride_head,
                      &P::v_stride_row, &P::batch, &P::rows, &P::num_kv_heads, &P::head_dim, &P::v_head_dim,
                      &P::capacity, &P::dtype);
  }
};

constexpr int64_t kMaxTreeRows = 128;  // of a block that is a tree, root included; also candidates per depth
constexpr int64_t kMaxCandidates = kMaxTreeRows;  // per slot of a walk

// softmax(scale * q k^T) v over the keys that each query sees; query i of sequence b is at position
// lengths[b] + i. With ancestors the block is a tree: row i is in slot lengths[b] + i, at position lengths[b]
// + its depth, the number of its ancestors. Bits are those of a chain: a row of the block is a key of the
// tile and chunk of its position. It is seen where its slot is in the cache and its position is not negative.
struct BlockAttentionParams {
  const void* q;           // [batch, rows, num_heads, head_dim], strided, the last dimension dense
  const void* k_cache;     // [batch, num_kv_heads, capacity, head_dim]
  const void* v_cache;     // [batch, num_kv_heads, capacity, v_head_dim]
  const int64_t* lengths;  // [batch], clamped to -rows .. 2 * capacity + rows; slots past lengths[b] + rows -
                           // 1 are never read
  const float* sinks;      // [num_heads] or null
  void* out;               // [batch, rows, num_heads, v_head_dim]
  int64_t q_stride_batch, q_stride_row, q_stride_head;
  int64_t batch;
  int64_t rows;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t v_head_dim;
  int64_t capacity;
  int64_t window;  // at most capacity + rows; 0: none
  float scale;
  float softcap;  // 0: none
  bool causal;
  DType dtype;
  int32_t threads;
  int32_t device = 0;
  // [batch, rows, ceil(rows / 64)] or null: the rows of its block that each row sees, itself among them; bits
  // at or past `rows` are ignored, and a row without a bit has depth 0. Only if causal.
  const int64_t* ancestors = nullptr;
  // CUDA only; block_attention_workspace() answers for them.
  // [batch, num_kv_heads, tiles, splits, floats of a stored state], then two int32 per tile
  float* workspace = nullptr;
  int64_t splits = 0;  // states per tile of rows: one per chunk of the capacity, 1, or 0 for the plain kernel
  // 0 or more: the kernel ahead is qkv_norm_rope_append, and writes no slot before lengths[b] - fresh
  int64_t fresh = -1;

  static constexpr auto wire() {
    using P = BlockAttentionParams;
    return std::tuple(&P::q, &P::k_cache, &P::v_cache, &P::lengths, &P::sinks, &P::ancestors, &P::out,
                      &P::q_stride_batch, &P::q_stride_row, &P::q_stride_head, &P::batch, &P::rows,
                      &P::num_heads, &P::num_kv_heads, &P::head_dim, &P::v_head_dim, &P::capacity, &P::window,
                      &P::scale, &P::softcap, &P::causal, &P::workspace, &P::splits, &P::fresh, &P::dtype);
  }
};

// ids = argmax(sharpness * filter(logits / temperature) + gumbel noise); -1 for a row that holds NaN.
struct SelectTokensParams {
  const void* logits;        // [batch, rows, vocab]
  const int64_t* positions;  // [batch, rows]; if consecutive [batch]: row i is at positions[b] + 1 + i
  const int64_t* seeds;      // [batch]
  const float* temperature;  // [batch], as if at most the largest float; 0, negative or NaN: plain argmax
  const int64_t* top_k;      // [batch]; 0: off
  const float* top_p;        // [batch]; 1: off
  const float* min_p;        // [batch]; 0: off
  const float* sharpness;    // [batch]; infinity: plain argmax; negative or NaN: as if 0
  int64_t* ids;              // [batch, rows]
  void* workspace;           // CUDA only, see select_tokens_workspace()
  int64_t batch;
  int64_t rows;
  int64_t vocab;
  bool consecutive;
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  // Of row `index` among those of all sequences, as the noise takes it; a sum that is too large wraps.
  DFLASH_ANYWHERE uint64_t position(int64_t index) const {
    if (!consecutive) return uint64_t(positions[index]);
    return uint64_t(positions[index / rows]) + 1 + uint64_t(index % rows);
  }

  static constexpr auto wire() {
    using P = SelectTokensParams;
    return std::tuple(&P::logits, &P::positions, &P::seeds, &P::temperature, &P::top_k, &P::top_p, &P::min_p,
                      &P::sharpness, &P::ids, &P::workspace, &P::batch, &P::rows, &P::vocab, &P::consecutive,
                      &P::dtype);
  }
};

// The best tokens at each depth of a draft by score: log softmax(z) where temperature <= 0 or is NaN, else
// log((1 - w) softmax(z) + w softmax(z / temperature + gumbel noise)) with w = noise_weight. Descending, ties
// to the lower id; then ids of -1 with a score of -inf.
struct TreeCandidatesParams {
  const void* logits;        // [batch, depths, vocab]
  const int64_t* positions;  // [batch, depths]
  const int64_t* seeds;      // [batch]
  const float* temperature;  // [batch], as if at most the largest float
  int64_t* ids;              // [batch, depths, count]
  float* scores;             // [batch, depths, count]
  void* workspace;           // CUDA only, see tree_candidates_workspace()
  int64_t batch;
  int64_t depths;
  int64_t vocab;
  int64_t count;  // 1 .. kMaxTreeRows
  float noise_weight;
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = TreeCandidatesParams;
    return std::tuple(&P::logits, &P::positions, &P::seeds, &P::temperature, &P::ids, &P::scores,
                      &P::workspace, &P::batch, &P::depths, &P::vocab, &P::count, &P::noise_weight,
                      &P::dtype);
  }
};

// The tokens with the best scores of each row: those of select_tokens without filters, per level of
// sharpness. Descending, ties to the lower id; then ids of -1 with a logit of -inf, as in all of a row that
// holds NaN.
struct TopCandidatesParams {
  const void* logits;        // [batch, rows, vocab]
  const int64_t* positions;  // [batch, rows]
  const int64_t* seeds;      // [batch]
  const float* temperature;  // [batch], as if at most the largest float; 0, negative or NaN: only logits
  const float* sharpness;    // [batch, levels]; infinity: only logits; negative or NaN: as if 0
  int64_t* ids;              // [batch, levels, rows, count]
  float* candidate_logits;   // [batch, levels, rows, count]
  void* workspace;           // CUDA only, see top_candidates_workspace()
  int64_t batch;
  int64_t levels;
  int64_t rows;
  int64_t vocab;
  int64_t count;  // 1 .. kMaxCandidates
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = TopCandidatesParams;
    return std::tuple(&P::logits, &P::positions, &P::seeds, &P::temperature, &P::sharpness, &P::ids,
                      &P::candidate_logits, &P::workspace, &P::batch, &P::levels, &P::rows, &P::vocab,
                      &P::count, &P::dtype);
  }
};

// A path through the candidates of each slot: slot j takes the argmax of sharpness * filter(S / temperature)
// + gumbel noise, with S(a, c) = logit(c) + sum over r of predecessors[a, r] hidden[j, r] successors[c, r]
// and a the token before. -1 from the first slot on that has no candidate, or a NaN score.
struct WalkCandidatesParams {
  const void* hidden;        // [batch, slots, rank]
  const void* predecessors;  // [codes, rank]
  const void* successors;    // [codes, rank]
  const int64_t* anchor;     // [batch], the token before slot 0; outside the codebook it adds nothing
  const int64_t* ids;        // [batch, sets, slots, count]; outside [0, codes): no candidate
  const float* logits;       // [batch, sets, slots, count]
  const int64_t* positions;  // [batch, slots]
  const int64_t* seeds;      // [batch]
  const float* temperature;  // [batch], as select_tokens has these four
  const int64_t* top_k;      // [batch]
  const float* top_p;        // [batch]
  const float* min_p;        // [batch]
  const float* sharpness;    // [batch, levels]
  int64_t* path;             // [batch, levels, slots]
  float* scores;             // [batch, levels, slots, count]: S / temperature, -inf where filtered
  int64_t batch;
  int64_t levels;
  int64_t sets;  // 1 (all levels have the same candidates) or levels
  int64_t slots;
  int64_t count;  // 1 .. kMaxCandidates
  int64_t codes;
  int64_t rank;
  int64_t stream;  // of the noise
  DType dtype;     // of hidden and both codebooks
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = WalkCandidatesParams;
    return std::tuple(&P::hidden, &P::predecessors, &P::successors, &P::anchor, &P::ids, &P::logits,
                      &P::positions, &P::seeds, &P::temperature, &P::top_k, &P::top_p, &P::min_p,
                      &P::sharpness, &P::path, &P::scores, &P::batch, &P::levels, &P::sets, &P::slots,
                      &P::count, &P::codes, &P::rank, &P::stream, &P::dtype);
  }
};

// The tree of the best prefixes, best first: by score (the sum of its tokens' scores), then the shallower,
// then the lower token id, then the lower parent row. Missing rows are pads.
struct BuildTreeParams {
  const int64_t* anchor;  // [batch]
  const int64_t* ids;     // [batch, depths, count]; a depth ends at its first negative id
  const float* scores;    // [batch, depths, count], descending; or at a score of -inf or NaN
  int64_t* tree_ids;      // [batch, rows]; pads: -1
  int64_t* parents;       // [batch, rows]; the root and pads: -1
  int64_t* depth;         // [batch, rows]; the root and pads: 0
  int64_t* ancestors;     // [batch, rows, ceil(rows / 64)]: bit j of row i: j is i or an ancestor
  float* tree_scores;     // [batch, rows]; the root: 0; pads: -inf
  int64_t batch;
  int64_t depths;
  int64_t count;
  int64_t rows;  // 1 .. kMaxTreeRows
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = BuildTreeParams;
    return std::tuple(&P::anchor, &P::ids, &P::scores, &P::tree_ids, &P::parents, &P::depth, &P::ancestors,
                      &P::tree_scores, &P::batch, &P::depths, &P::count, &P::rows);
  }
};

enum RowState : int64_t { kRunning = 0, kStop = 1, kLimit = 2, kInvalid = 3 };  // the values of done

// Emits the longest matching prefix and one more token: the state update of a step.
struct AcceptPrefixParams {
  const int64_t* block_ids;       // [batch, rows]: the anchor, then proposals; negative: none
  const int64_t* posterior;       // [batch, rows]: the target's choices; negative: its logits held NaN
  const int64_t* stop_token_ids;  // [batch, num_stop_tokens]
  const int64_t* limits;          // [batch]: tokens that the row may hold in all
  int64_t* tokens;                // [batch, capacity]; 0 .. length are emitted
  int64_t* length;                // [batch]; a row whose length is negative or at its limit has no room
  int64_t* num_context;           // [batch]
  int64_t* done;                  // [batch], RowState
  int64_t batch;
  int64_t rows;
  int64_t num_stop_tokens;
  int64_t capacity;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = AcceptPrefixParams;
    return std::tuple(&P::block_ids, &P::posterior, &P::stop_token_ids, &P::limits, &P::tokens, &P::length,
                      &P::num_context, &P::done, &P::batch, &P::rows, &P::num_stop_tokens, &P::capacity);
  }
};

// The same on a tree: from row 0, emits the choice of a row and goes on to the row's child that proposed it.
struct AcceptPathParams {
  const int64_t* ids;      // [batch, rows]: the anchor, then the nodes; negative: none
  const int64_t* parents;  // [batch, rows]: of each node a row before it; anything else: nobody's child
  const int64_t* choices;  // [batch, rows]: the target's choices; negative: its logits held NaN
  const int64_t* stop_token_ids;  // [batch, num_stop_tokens]
  const int64_t* limits;          // [batch]
  int64_t* tokens;                // [batch, capacity]
  int64_t* length;                // [batch]
  int64_t* num_context;           // [batch]
  int64_t* done;                  // [batch], RowState
  int64_t* path;                  // [batch, path_rows]: the rows of the emitted choices, then path[j] = j
  int64_t* chain_choices;         // [batch, path_rows]: the emitted choices, then -1
  int64_t* chain_ids;             // [batch, path_rows]: the anchor, then the drafts that equal them, then -1
  int64_t batch;
  int64_t rows;       // at most kMaxTreeRows
  int64_t path_rows;  // how many may be visited: columns of path, chain_choices and chain_ids
  int64_t num_stop_tokens;
  int64_t capacity;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = AcceptPathParams;
    return std::tuple(&P::ids, &P::parents, &P::choices, &P::stop_token_ids, &P::limits, &P::tokens,
                      &P::length, &P::num_context, &P::done, &P::path, &P::chain_choices, &P::chain_ids,
                      &P::batch, &P::rows, &P::path_rows, &P::num_stop_tokens, &P::capacity);
  }
};

// A list of numbers that the launching side reads.
struct Sizes {
  const int64_t* values;
  DFLASH_ANYWHERE int64_t operator[](int64_t i) const { return values[i]; }
};

// Slot first[b] + path[b, j] moves to slot first[b] + j where 1 <= j < counts[b] and path[b, j] > j, in the
// caches of all layers. Every row moves down, so moving in the order of j overwrites nothing that is still to
// move. Slots outside 0 .. capacity - 1 stay.
struct CompactKvParams {
  const int64_t* path;    // [batch, path_rows]
  const int64_t* counts;  // [batch]
  const int64_t* first;   // [batch]
  void* const* caches;    // [num_caches] pointers to [batch, heads[i], capacity, row_bytes[i] bytes]
  Sizes heads;            // [num_caches]
  Sizes row_bytes;        // [num_caches]
  int64_t num_caches;
  int64_t batch;
  int64_t path_rows;
  int64_t capacity;
  int32_t threads;
  int32_t device = 0;

  // Where the row that moves to first[b] + j comes from; -1: nothing moves there. Needs j < path_rows.
  DFLASH_ANYWHERE int64_t source(int64_t b, int64_t j) const {
    const int64_t bound = capacity + path_rows;  // clamped to it, a slot outside stays outside
    const int64_t row = path[b * path_rows + j], base = clamped(first[b], bound);
    const int64_t from = base + clamped(row, 2 * bound), to = base + j;
    const bool moves = j >= 1 && j < counts[b] && row > j && to >= 0 && from < capacity;
    return moves ? from : -1;
  }
  DFLASH_ANYWHERE int64_t target(int64_t b, int64_t j) const {
    return clamped(first[b], capacity + path_rows) + j;
  }

  static constexpr auto wire() {
    using P = CompactKvParams;
    return std::tuple(&P::path, &P::counts, &P::first, &P::caches, &P::heads, &P::row_bytes, &P::num_caches,
                      &P::batch, &P::path_rows, &P::capacity);
  }

 private:
  DFLASH_ANYWHERE static int64_t clamped(int64_t x, int64_t bound) {
    return x < -bound ? -bound : x > bound ? bound : x;
  }
};

// out[b, j] = x[b, path[b, j]], the index clamped to 0 .. rows - 1.
struct GatherRowsParams {
  const void* x;        // [batch, rows, row_bytes bytes]
  const int64_t* path;  // [batch, path_rows]
  void* out;            // [batch, out_rows, row_bytes bytes]; rows from path_rows on stay
  int64_t batch;
  int64_t rows;
  int64_t path_rows;
  int64_t out_rows;
  int64_t row_bytes;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = GatherRowsParams;
    return std::tuple(&P::x, &P::path, &P::out, &P::batch, &P::rows, &P::path_rows, &P::out_rows,
                      &P::row_bytes);
  }
};

constexpr int64_t kMaxRecurrentKeys = 256;  // per head, of the CUDA kernel

// One layer of a linear recurrence (gated delta rule, Mamba-2) over a block of rows, whose state stands at a
// position in front of the block. First the accepted rows of the last pass are applied from what it saved of
// them, then the rows run. Per head: S' = a S; d = beta (v - S'^T k), or v without beta; S = S' + k d^T;
// out = S^T q.
struct GatedRecurrenceParams {
  const float* q;          // [batch, rows, key_heads, key_dim]
  const float* k;          // [batch, rows, key_heads, key_dim]; a key head serves heads / key_heads heads
  const float* v;          // [batch, rows, heads, value_dim]
  const float* log_decay;  // [batch, rows, heads, decay_dim]: log a, per head or per key channel
  const float* beta;       // [batch, rows, heads] or null
  float* state;            // [batch, heads, key_dim, value_dim], moved to the row after the last that is kept
  float* saved_k;          // [batch, block, key_heads, key_dim]
  float* saved_d;          // [batch, block, heads, value_dim]
  float* saved_a;          // [batch, block, heads, decay_dim]
  const int64_t* pending;  // [batch], clamped to 0 .. block: how many saved rows to apply
  const int64_t* keep;     // [batch], clamped to 0 .. rows: how many rows the state takes up now
  float* out;              // [batch, rows, heads, value_dim]
  int64_t batch;
  int64_t rows;  // the first min(rows, block) are saved
  int64_t key_heads;
  int64_t heads;
  int64_t key_dim;
  int64_t value_dim;
  int64_t decay_dim;  // 1 or key_dim
  int64_t block;
  int32_t threads;
  int32_t device = 0;
  unsigned* counters = nullptr;  // CUDA only: [kNumCounters], zero before and after

  static constexpr auto wire() {
    using P = GatedRecurrenceParams;
    return std::tuple(&P::q, &P::k, &P::v, &P::log_decay, &P::beta, &P::state, &P::saved_k, &P::saved_d,
                      &P::saved_a, &P::pending, &P::keep, &P::out, &P::batch, &P::rows, &P::key_heads,
                      &P::heads, &P::key_dim, &P::value_dim, &P::decay_dim, &P::block, &P::counters);
  }
};

// A depthwise causal convolution over a block of rows. The window holds the inputs in front of the last pass'
// rows, then the first of these rows: the context of this pass starts at slot pending[b].
struct CausalConvParams {
  const void* x;           // [batch, rows, channels], strided, the last dimension dense
  const void* weight;      // [channels, width], the oldest input's first
  const void* bias;        // [channels] or null
  void* window;            // [batch, width - 1 + block, channels]
  const int64_t* pending;  // [batch], clamped to 0 .. block
  const int64_t* keep;     // [batch], clamped to 0 .. rows: the new context ends in front of this row
  void* out;               // [batch, rows, channels]
  int64_t x_stride_batch, x_stride_row;
  int64_t batch;
  int64_t rows;  // the first min(rows, block) are stored behind the new context
  int64_t channels;
  int64_t width;
  int64_t block;
  bool silu;  // out = y / (1 + exp(-y))
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = CausalConvParams;
    return std::tuple(&P::x, &P::weight, &P::bias, &P::window, &P::pending, &P::keep, &P::out,
                      &P::x_stride_batch, &P::x_stride_row, &P::batch, &P::rows, &P::channels, &P::width,
                      &P::block, &P::silu, &P::dtype);
  }
};

// What a Gated DeltaNet layer's recurrence reads, all float32: q and k with L2 norm 1, q then times
// key_dim^-1/2; log_decay = -exp(a_log) softplus(a + dt_bias); beta = sigmoid(b), rounded to the dtype.
struct DeltaNetInputsParams {
  const void* qkv;      // [rows, 2 * key_heads * key_dim + heads * value_dim]: q heads, k heads, v heads
  const void* b;        // [rows, heads], rows strided
  const void* a;        // [rows, heads], rows strided
  const void* a_log;    // [heads]
  const void* dt_bias;  // [heads]
  float* q;             // [rows, key_heads, key_dim]
  float* k;             // [rows, key_heads, key_dim]
  float* v;             // [rows, heads, value_dim]
  float* log_decay;     // [rows, heads]
  float* beta;          // [rows, heads]
  int64_t b_stride, a_stride;
  int64_t rows;
  int64_t key_heads;
  int64_t heads;
  int64_t key_dim;
  int64_t value_dim;
  float eps;  // added to the sum of squares
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = DeltaNetInputsParams;
    return std::tuple(&P::qkv, &P::b, &P::a, &P::a_log, &P::dt_bias, &P::q, &P::k, &P::v, &P::log_decay,
                      &P::beta, &P::b_stride, &P::a_stride, &P::rows, &P::key_heads, &P::heads, &P::key_dim,
                      &P::value_dim, &P::eps, &P::dtype);
  }
};

// out = rms_norm(x) * weight * silu(z), per head, rounded once.
struct GatedRmsNormParams {
  const float* x;      // [rows, heads, width]
  const void* z;       // [rows, heads, width], rows strided
  const void* weight;  // [width]
  void* out;           // [rows, heads, width]
  int64_t z_stride;
  int64_t rows;
  int64_t heads;
  int64_t width;
  float eps;
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = GatedRmsNormParams;
    return std::tuple(&P::x, &P::z, &P::weight, &P::out, &P::z_stride, &P::rows, &P::heads, &P::width,
                      &P::eps, &P::dtype);
  }
};

constexpr int kMaxLinearWeights = 4;
constexpr int64_t kMaxLinearRows = 256;  // of the CUDA kernel
// Rows up to which a pass through the CPU kernels is faster than torch's (measured by bench_first_token.py).
constexpr int64_t max_skinny_rows(DType dtype) { return dtype == DType::kFloat32 ? 512 : 64; }
constexpr int64_t kQuantGroup = 256;  // elements of a row that share a step where weights are int8

// A weight of a product as the CPU reads it. One with scales is int8: values[n][k] * scales[n].
struct LinearWeight {
  const void* values;   // [out, in]
  const float* scales;  // [out] or null: the values are of the storage type

  static constexpr auto wire() {
    using P = LinearWeight;
    return std::tuple(&P::values, &P::scales);
  }
};

// out = x weight^T + bias for a few rows, of several weights side by side. If gated, the weights are gate and
// up, without biases, and out = silu(x gate^T) * (x up^T), both products rounded first.
struct LinearParams {
  const void* x;  // [rows, in]
  int num_weights;
  const void* weights[kMaxLinearWeights];  // [features[i], in]
  const float* scales[kMaxLinearWeights];  // as in LinearWeight; CPU only
  const void* biases[kMaxLinearWeights];   // [features[i]] or null
  int64_t features[kMaxLinearWeights];
  void* out;  // [rows, out_features]
  int64_t rows;
  int64_t in;
  int64_t out_features;  // the sum of features, or of one of them if gated
  DType dtype;
  int32_t threads;
  int32_t device = 0;
  // CUDA only; linear_workspace() answers for the first three.
  float* workspace;    // [tiles, splits, 128 * rows padded to 16, 32 or 64] if splits > 1, where a tile is
  unsigned* counters;  // [tiles], zero before and after: 128 features of a weight, 64 of two, or the rest
  int64_t splits;      // slices of `in`, none empty
  bool prefetch;       // no kernel ahead writes a weight: they may be read before those have ended
  bool gated;

  static constexpr auto wire() {
    using P = LinearParams;
    return std::tuple(&P::x, &P::num_weights, &P::weights, &P::scales, &P::biases, &P::features, &P::out,
                      &P::rows, &P::in, &P::out_features, &P::workspace, &P::counters, &P::splits,
                      &P::prefetch, &P::gated, &P::dtype);
  }
};

// How an expert combines the two halves of its first product; each is x * sigmoid(s) times the other half.
enum class Gate : int32_t {
  kSilu = 0,  // gate * sigmoid(gate) * up
  kGeluTanh =
      1,  // gelu(gate) * up, by the approximation with tanh: s = sqrt(8 / pi) (gate + 0.044715 gate^3)
  kClampedSilu = 2,  // gate * sigmoid(alpha gate) * (up + 1), gate at most `limit`, up in -limit .. limit
};

// out[r] = the sum over slots of scores[r, slot] * down(gate(gate_up(x[r]))) of expert ids[r, slot], slots
// ascending, what goes into `down` rounded to the storage type. An id outside 0 .. num_experts - 1 adds
// nothing, whatever its score. A row's bits depend on the row, its ids and its scores only.
struct ExpertsParams {
  const void* x;             // [rows, hidden]
  const int64_t* ids;        // [rows, top_k]
  const void* scores;        // [rows, top_k], float if float_scores
  const void* gate_up;       // [num_experts, 2 * width, hidden], gate and then up; transposed: [num_experts,
                             // hidden, 2 * width], gate and up by turns
  const void* down;          // [num_experts, hidden, width]; transposed: [num_experts, width, hidden]
  const void* gate_up_bias;  // [num_experts, 2 * width], in the order of gate_up, or null
  const void* down_bias;     // [num_experts, hidden] or null
  void* out;                 // [rows, hidden]
  int64_t rows;
  int64_t top_k;
  int64_t num_experts;
  int64_t hidden;
  int64_t width;
  Gate gate;
  float alpha;
  float limit;
  bool transposed;
  bool float_scores;
  DType dtype;
  int32_t threads;
  int32_t device = 0;
  void* workspace = nullptr;  // CUDA only, see experts_workspace(): [rows, top_k, width] of the storage type,
                              // then [rows, top_k, hidden] float

  static constexpr auto wire() {
    using P = ExpertsParams;
    return std::tuple(&P::x, &P::ids, &P::scores, &P::gate_up, &P::down, &P::gate_up_bias, &P::down_bias,
                      &P::out, &P::workspace, &P::rows, &P::top_k, &P::num_experts, &P::hidden, &P::width,
                      &P::gate, &P::alpha, &P::limit, &P::transposed, &P::float_scores, &P::dtype);
  }
};

// The convolutions of a block's rows in front of a sublayer and after it, as in DynamicConvParams. `dynamic`
// is the sublayer's input times `projection`: [rows, 2, width, groups].
struct BlockConvWeights {
  const void* base;        // [2, width, hidden]; null: none
  const void* projection;  // [2 * width * groups, hidden]
  int64_t width;
  int64_t groups;

  static constexpr auto wire() {
    using P = BlockConvWeights;
    return std::tuple(&P::base, &P::projection, &P::width, &P::groups);
  }
};

// What a decoder layer reads, every weight [out, in]. Its mixer is attention or a Gated DeltaNet.
struct AttentionWeights {
  LinearWeight q, k, v;         // [heads * head_dim, hidden]; if gated, q [num_heads * 2 * head_dim, hidden]
  LinearWeight o;               // [hidden, num_heads * head_dim]
  const void *q_norm, *k_norm;  // [head_dim] or null
  const void *q_bias, *k_bias, *v_bias, *o_bias;  // [out] or null
  const float* sinks;                             // [num_heads] or null
  bool causal;                                    // as in BlockAttentionParams
  int64_t window;
  bool gated;  // q has a gate after each head: out * sigmoid(gate)

  static constexpr auto wire() {
    using P = AttentionWeights;
    return std::tuple(&P::q, &P::k, &P::v, &P::o, &P::q_norm, &P::k_norm, &P::q_bias, &P::k_bias, &P::v_bias,
                      &P::o_bias, &P::sinks, &P::causal, &P::window, &P::gated);
  }
};

struct DeltaNetWeights {
  LinearWeight qkv;  // [2 * key_heads * key_dim + heads * value_dim, hidden]: q heads, k heads, v heads
  LinearWeight z;    // [heads * value_dim, hidden]; null: qkv has per key head q, k, its v heads, their z
  LinearWeight b;    // [heads, hidden]
  LinearWeight a;    // [heads, hidden]; null: b has per key head the b, then the a, of its heads
  const void* conv;  // [2 * key_heads * key_dim + heads * value_dim, conv_width]
  const void *a_log, *dt_bias;  // [heads]
  const void* norm;             // [value_dim]
  LinearWeight out;             // [hidden, heads * value_dim]

  static constexpr auto wire() {
    using P = DeltaNetWeights;
    return std::tuple(&P::qkv, &P::z, &P::b, &P::a, &P::conv, &P::a_log, &P::dt_bias, &P::norm, &P::out);
  }
};

struct DecoderLayer {
  const void* input_norm;      // [hidden]
  const void* post_norm;       // [hidden]
  LinearWeight gate, up;       // [width, hidden]
  LinearWeight down;           // [hidden, width]
  AttentionWeights attention;  // one of the two
  DeltaNetWeights delta_net;
  BlockConvWeights attention_conv, mlp_conv;
  int64_t tap;  // where its output goes in taps, -1: nowhere

  static constexpr auto wire() {
    using P = DecoderLayer;
    return std::tuple(&P::input_norm, &P::post_norm, &P::gate, &P::up, &P::down, &P::attention, &P::delta_net,
                      &P::attention_conv, &P::mlp_conv, &P::tap);
  }
};

// The decoder layers of a model and its final norm over a block of rows, each sequence at its own length.
struct DecoderLayersParams {
  const DecoderLayer* layers;  // [num_layers]
  void* const* k_caches;  // per layer of attention a pointer to [batch, num_kv_heads, capacity, head_dim]
  void* const* v_caches;  // the same
  // Per recurrent layer a pointer to what its kernels take under these names, see GatedRecurrenceParams.
  void* const* windows;
  float* const* states;
  float* const* saved_k;
  float* const* saved_d;
  float* const* saved_a;
  const int64_t* pending;      // [batch] or null without recurrent layers
  const int64_t* keep;         // [batch] or null
  const void* hidden;          // [batch, rows, hidden]
  const void* context;         // [batch, context_rows, hidden] or null: rows that every layer takes K/V from
  const int64_t* num_context;  // [batch], clamped to 0 .. context_rows: live ones, ahead of lengths[b]
  const int64_t* lengths;    // [batch], the position of each sequence's first row, as in BlockAttentionParams
  const int64_t* ancestors;  // [batch, rows, ceil(rows / 64)] or null, as in BlockAttentionParams
  const float* cos;          // [positions, half]
  const float* sin;          // [positions, half]
  const void* norm;          // [hidden], the final norm
  void* out;                 // [batch, rows, hidden]
  void* taps;                // [batch, rows, num_taps, hidden], layer outputs; the last layer's is `out`
  int64_t num_layers;
  int64_t batch;
  int64_t rows;
  int64_t context_rows;
  int64_t hidden_size;
  int64_t width;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t half;
  int64_t positions;
  int64_t capacity;
  int64_t num_taps;
  int64_t key_heads, delta_heads, key_dim, value_dim;  // of the recurrent layers; 0 without
  int64_t conv_width;
  int64_t block;
  float scale;
  float eps;
  bool zero_centered;  // the norms over hidden states and heads add one to their weights
  DType dtype;
  int32_t threads;
  int32_t device = 0;

  static constexpr auto wire() {
    using P = DecoderLayersParams;
    return std::tuple(&P::layers, &P::k_caches, &P::v_caches, &P::windows, &P::states, &P::saved_k,
                      &P::saved_d, &P::saved_a, &P::pending, &P::keep, &P::hidden, &P::context,
                      &P::num_context, &P::lengths, &P::ancestors, &P::cos, &P::sin, &P::norm, &P::out,
                      &P::taps, &P::num_layers, &P::batch, &P::rows, &P::context_rows, &P::hidden_size,
                      &P::width, &P::num_heads, &P::num_kv_heads, &P::head_dim, &P::half, &P::positions,
                      &P::capacity, &P::num_taps, &P::key_heads, &P::delta_heads, &P::key_dim, &P::value_dim,
                      &P::conv_width, &P::block, &P::scale, &P::eps, &P::zero_centered, &P::dtype);
  }
};

}  // namespace dflash
