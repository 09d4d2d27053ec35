// One plain struct per op. Every pointer carries its shape; all tensors are contiguous and row-major unless a
// stride field says otherwise. Index tensors (positions, lengths, ids, counts) are int64. `threads` is how
// many a CPU kernel may use, `device` the CUDA device that holds the tensors; the binding sets both. This
// header is all that the kernels and the binding share.
#pragma once
#include <cstdint>

namespace dflash {

// Lists the fields of a record, by the names that Python has for them (fields.h): fields(visit) calls visit
// with all of them. DFLASH_PARAMS stands where the two that the binding sets are declared.
#define DFLASH_FIELDS(...)          \
  template <typename Visit>         \
  void fields(const Visit& visit) { \
    visit(__VA_ARGS__);             \
  }                                 \
  static constexpr const char* kNames = #__VA_ARGS__;
#define DFLASH_PARAMS(...)     \
  int32_t threads, device = 0; \
  DFLASH_FIELDS(__VA_ARGS__)

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };  // kFloat16: CUDA only

// What is added to the weight of a norm: one if the model stores it less one. Adding -0 changes no bit.
#ifdef __CUDACC__
#define DFLASH_ANYWHERE __host__ __device__
#else
#define DFLASH_ANYWHERE
#endif
DFLASH_ANYWHERE constexpr float norm_offset(bool zero_centered) { return zero_centered ? 1.0f : -0.0f; }

// h = x + residual; out = h / sqrt(mean(h^2) + eps) * weight, or times (1 + weight) if zero_centered; tap = h. With
// `front` each sequence of the result begins with rows of that tensor, as they are.
struct RmsNormParams {
  const void* x;          // [rows, hidden]
  const void* residual;   // [rows, hidden] or null
  const void* weight;     // [hidden]
  const int64_t* counts;  // [rows / rows_per_sequence] or null: rows past the count are written as zero, never read
  void* out;              // [rows, hidden]; [sequences, front_rows + rows_per_sequence, hidden]
  void* residual_out;     // [rows, hidden], x + residual; null without residual
  int64_t rows, hidden, rows_per_sequence;
  float eps;
  DType dtype;
  DFLASH_PARAMS(x, residual, weight, counts, front, out, residual_out, tap, tap_stride, rows, hidden, rows_per_sequence,
                sequences, front_rows, eps, zero_centered, dtype)
  void* tap = nullptr;     // [rows, hidden], strided, or null: x + residual once more
  int64_t tap_stride = 0;  // between its rows, in elements
  bool zero_centered = false;
  const void* front = nullptr;  // [sequences, front_rows, hidden] or null
  int64_t sequences = 0;        // with front
  int64_t front_rows = 0;
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
  int64_t hidden, width, groups;
  DType dtype;
  DFLASH_PARAMS(x, base, dynamic, front, out, dynamic_stride_block, dynamic_stride_row, rows, block_rows, hidden, width,
                groups, sequences, front_rows, dtype)
  const void* front = nullptr;  // [sequences, front_rows, hidden] or null
  int64_t sequences = 0;        // with front
  int64_t front_rows = 0;
};

// Dynamic convolution of x, rounded to the storage type, in front of RMSNorm with a residual.
struct ConvAddRmsNormParams {
  const void* x;             // [rows, hidden]
  const void* base;          // [width, hidden]
  const void* dynamic;       // [rows, width, groups], as above
  const void* residual;      // [rows, hidden]
  const void* weight;        // [hidden]
  void *out, *residual_out;  // [rows, hidden]
  void* tap;                 // [rows, hidden], strided, or null
  int64_t tap_stride, dynamic_stride_block, dynamic_stride_row, rows, block_rows, hidden, width, groups;
  float eps;
  bool zero_centered;
  DType dtype;
  DFLASH_PARAMS(x, base, dynamic, residual, weight, out, residual_out, tap, tap_stride, dynamic_stride_block,
                dynamic_stride_row, rows, block_rows, hidden, width, groups, eps, zero_centered, dtype)
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
  int64_t table_stride, batch, capacity;
  int64_t rows;  // at most num_drafts + 1
  int64_t num_drafts, vocab, hidden, mask_id;
  float scale;
  DType dtype;
  DFLASH_PARAMS(tokens, length, drafts, table, mask_embedding, embeds, anchor, positions, table_stride, batch, capacity,
                rows, num_drafts, vocab, hidden, mask_id, scale, dtype)
};

// How the two halves of a product are combined; each is x * sigmoid(s) times the other half.
enum class Gate : int32_t {
  kSilu = 0,         // gate * sigmoid(gate) * up
  kGeluTanh = 1,     // gelu(gate) * up, by the approximation with tanh: s = sqrt(8 / pi) (gate + 0.044715 gate^3)
  kClampedSilu = 2,  // gate * sigmoid(alpha gate) * (up + 1), gate at most `limit`, up in -limit .. limit
};

// out = silu(gate) * up, gate and up packed side by side.
struct SiluMulParams {
  const void* gate_up;  // [rows, 2 * width]: gate, then up
  void* out;            // [rows, width]
  int64_t rows, width;
  Gate gate;  // kSilu or kGeluTanh
  DType dtype;
  DFLASH_PARAMS(gate_up, out, rows, width, gate, dtype)
};

// out = x * sigmoid(gate), as attention with an output gate has it per head.
struct SigmoidMulParams {
  const void* x;     // [rows, heads, width]
  const void* gate;  // [rows, heads, width], strided, the last dimension dense
  void* out;         // [rows, heads, width]; may be x
  int64_t gate_stride_row, gate_stride_head, rows, heads, width;
  DType dtype;
  DFLASH_PARAMS(x, gate, out, gate_stride_row, gate_stride_head, rows, heads, width, dtype)
};

// n = x / sqrt(mean(x^2) + eps) * weight per head; (a, b) = halves of n's first 2 * half dimensions; out = (a cos - b
// sin, b cos + a sin, rest of n), rounded once. Packed rows -> q heads (norm, RoPE) into q_out for the last q_rows
// rows, the block; k heads (norm, RoPE) and v heads of all rows into the cache. Row i of sequence b's block is in slot
// lengths[b] + i, at position lengths[b] + depth[b, i]. Row i in front of it is context, in slot and at position
// lengths[b] - num_context[b] + i, and off if it is at or past num_context[b]. A slot outside [0, capacity) appends
// nothing. With an origin, these positions count from it.
struct QkvNormRopeAppendParams {
  const void* qkv;         // [batch, rows, (num_heads + 2 * num_kv_heads) * head_dim]: q heads, k heads, v heads; if
                           // gated, each q head is followed by its gate, which is not read
  const int64_t* lengths;  // [batch], clamped to -q_rows .. 2 * capacity + q_rows
  const int64_t* num_context;                 // [batch], clamped to 0 .. rows - q_rows; null if that is 0
  const int64_t* depth;                       // [batch, q_rows], clamped to 0 .. q_rows; null: 0, 1, 2, ...
  const int64_t* origin;                      // [batch], the position of slot 0, clamped to 0 .. positions; null: 0
  const float *cos, *sin;                     // [positions, half]; a position that they do not have takes the nearest
  const void *q_norm_weight, *k_norm_weight;  // [head_dim] or null
  void* q_out;                                // [batch, q_rows, num_heads, head_dim]
  void *k_cache, *v_cache;                    // [batch, num_kv_heads, capacity, head_dim]
  int64_t batch, rows, q_rows, num_heads, num_kv_heads, head_dim;
  int64_t half;  // the first 2 * half dimensions of a head rotate
  int64_t positions, capacity;
  float eps;
  DType dtype;
  DFLASH_PARAMS(qkv, lengths, num_context, depth, origin, cos, sin, q_norm_weight, k_norm_weight, q_out, k_cache,
                v_cache, batch, rows, q_rows, num_heads, num_kv_heads, head_dim, half, positions, capacity, eps,
                zero_centered, gated, prefetch, dtype)
  bool zero_centered = false;
  bool gated = false;
  bool prefetch = false;  // CUDA only: no kernel that may still run writes what is read, but for qkv
};

// The same for K and V only, for all layers.
struct AppendContextKvParams {
  const void* kv;                           // [num_layers, batch, rows, 2 * num_kv_heads * head_dim]: k heads, v heads
  const int64_t* positions;                 // [batch, rows]
  const float *cos, *sin;                   // [batch, rows, half]
  const void* k_norm_weight;                // [num_layers, head_dim] or null
  void *const *k_caches, *const *v_caches;  // [num_layers] pointers to [batch, num_kv_heads, capacity, head_dim]
  int64_t num_layers, batch, rows, num_kv_heads, head_dim, half, capacity;
  float eps;
  DType dtype;
  DFLASH_PARAMS(kv, positions, cos, sin, k_norm_weight, k_caches, v_caches, num_layers, batch, rows, num_kv_heads,
                head_dim, half, capacity, eps, dtype)
};

// cache[b, h, positions[b, r]] = new[b, h, r]; strides in elements, the last dimension dense.
struct AppendKvParams {
  const void* key;           // [batch, num_kv_heads, rows, head_dim], strided
  const void* value;         // [batch, num_kv_heads, rows, v_head_dim], strided
  const int64_t* positions;  // [batch, rows]
  void* k_cache;             // [batch, num_kv_heads, capacity, head_dim]
  void* v_cache;             // [batch, num_kv_heads, capacity, v_head_dim]
  int64_t k_stride_batch, k_stride_head, k_stride_row, v_stride_batch, v_stride_head, v_stride_row, batch, rows,
      num_kv_heads, head_dim, v_head_dim, capacity;
  DType dtype;
  DFLASH_PARAMS(key, value, positions, k_cache, v_cache, k_stride_batch, k_stride_head, k_stride_row, v_stride_batch,
                v_stride_head, v_stride_row, batch, rows, num_kv_heads, head_dim, v_head_dim, capacity, dtype)
};

constexpr int64_t kMaxTreeRows = 128;             // of a block that is a tree, root included; also candidates per depth
constexpr int64_t kMaxCandidates = kMaxTreeRows;  // per slot of a walk

// o_i = sum_j p_ij v_j / (sum_j p_ij + exp(sink - top)), p_ij = exp(s_ij - top), s_ij = cap(scale * q_i . k_j), over
// the keys that each query sees; query i of sequence b is at position lengths[b] + i. With ancestors the block is a
// tree: row i is in slot lengths[b] + i, at position lengths[b] + its depth, the number of its ancestors. Bits are
// those of a chain: a row of the block is a key of the tile and chunk of its position. It is seen where its slot is in
// the cache and its position is not negative.
struct BlockAttentionParams {
  const void* q;           // [batch, rows, num_heads, head_dim], strided, the last dimension dense
  const void* k_cache;     // [batch, num_kv_heads, capacity, head_dim]
  const void* v_cache;     // [batch, num_kv_heads, capacity, v_head_dim]
  const int64_t* lengths;  // [batch], clamped to -rows .. 2 * capacity + rows; slots past lengths[b] + rows -
                           // 1 are never read
  const float* sinks;      // [num_heads] or null
  void* out;               // [batch, rows, num_heads, v_head_dim]
  int64_t q_stride_batch, q_stride_row, q_stride_head, batch, rows, num_heads, num_kv_heads, head_dim, v_head_dim,
      capacity;
  int64_t window;  // at most capacity + rows; 0: none
  float scale;
  float softcap;  // 0: none
  bool causal;
  DType dtype;
  DFLASH_PARAMS(q, k_cache, v_cache, lengths, sinks, ancestors, out, q_stride_batch, q_stride_row, q_stride_head, batch,
                rows, num_heads, num_kv_heads, head_dim, v_head_dim, capacity, window, scale, softcap, causal,
                workspace, splits, fresh, dtype)
  // [batch, rows, ceil(rows / 64)] or null: the rows of its block that each row sees, itself among them; bits
  // at or past `rows` are ignored, and a row without a bit has depth 0. Only if causal.
  const int64_t* ancestors = nullptr;
  // In decoder_layers only: [batch], where each sequence's keys are in the caches; null: in order.
  const int64_t* sequences = nullptr;
  // CUDA only; block_attention_workspace() answers for them.
  // [batch, num_kv_heads, tiles, splits, floats of a stored state], then two int32 per tile
  float* workspace = nullptr;
  int64_t splits = 0;  // states per tile of rows: one per chunk of the capacity, 1, or 0 for the plain kernel
  // 0 or more: the kernel ahead is qkv_norm_rope_append, and writes no slot before lengths[b] - fresh
  int64_t fresh = -1;
};

// ids = argmax(sharpness * filter(logits / temperature) + gumbel(seed, position, id)), ties to the lowest id; -1 for a
// row that holds NaN.
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
  int64_t batch, rows, vocab;
  bool consecutive;
  DType dtype;
  DFLASH_PARAMS(logits, positions, seeds, temperature, top_k, top_p, min_p, sharpness, ids, workspace, batch, rows,
                vocab, consecutive, dtype)

  // Of row `index` among those of all sequences, as the noise takes it; a sum that is too large wraps.
  DFLASH_ANYWHERE uint64_t position(int64_t index) const {
    if (!consecutive) return uint64_t(positions[index]);
    return uint64_t(positions[index / rows]) + 1 + uint64_t(index % rows);
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
  void* workspace;           // CUDA only, see candidates_workspace()
  int64_t batch, depths, vocab;
  int64_t count;  // 1 .. kMaxTreeRows
  float noise_weight;
  DType dtype;
  DFLASH_PARAMS(logits, positions, seeds, temperature, ids, scores, workspace, batch, depths, vocab, count,
                noise_weight, dtype)
};

// The tokens with the best scores of each row: those of select_tokens without filters.
// Descending, ties to the lower id; then ids of -1 with a logit of -inf, as in all of a row that
// holds NaN.
struct TopCandidatesParams {
  const void* logits;        // [batch, rows, vocab]
  const int64_t* positions;  // [batch, rows]
  const int64_t* seeds;      // [batch]
  const float* temperature;  // [batch], as if at most the largest float; 0, negative or NaN: only logits
  const float* sharpness;    // [batch]; infinity: only logits; negative or NaN: as if 0
  int64_t* ids;              // [batch, rows, count]
  float* candidate_logits;   // [batch, rows, count]
  void* workspace;           // CUDA only, see candidates_workspace()
  int64_t batch, rows, vocab;
  int64_t count;  // 1 .. kMaxCandidates
  DType dtype;
  DFLASH_PARAMS(logits, positions, seeds, temperature, sharpness, ids, candidate_logits, workspace, batch, rows, vocab,
                count, dtype)
};

// ln of the sum of exp(logits) of each row; NaN for a row that holds NaN.
struct LogSumExpParams {
  const void* logits;  // [rows, vocab]
  float* out;          // [rows]
  int64_t rows, vocab;
  DType dtype;
  DFLASH_PARAMS(logits, out, rows, vocab, dtype)
};

// A path through the candidates of each slot: slot j takes the argmax of sharpness * filter(S / temperature)
// + gumbel noise, with S(a, c) = logit(c) + sum over r of predecessors[a, r] hidden[j, r] successors[c, r]
// and a the token before. -1 from the first slot on that has no candidate, or a NaN score.
struct WalkCandidatesParams {
  const void* hidden;                     // [batch, slots, rank]
  const void *predecessors, *successors;  // [codes, rank]
  const int64_t* anchor;                  // [batch], the token before slot 0; outside the codebook it adds nothing
  const int64_t* ids;                     // [batch, slots, count]; outside [0, codes): no candidate
  const float* logits;                    // [batch, slots, count]
  const int64_t* positions;               // [batch, slots]
  const int64_t* seeds;                   // [batch]
  const float* temperature;               // [batch], as select_tokens has these five
  const int64_t* top_k;                   // [batch]
  const float* top_p;                     // [batch]
  const float* min_p;                     // [batch]
  const float* sharpness;                 // [batch]
  int64_t* path;                          // [batch, slots]
  float* scores;                          // [batch, slots, count]: S / temperature, -inf where filtered
  int64_t batch, slots;
  int64_t count;  // 1 .. kMaxCandidates
  int64_t codes, rank;
  int64_t stream;  // of the noise
  DType dtype;     // of hidden and both codebooks
  DFLASH_PARAMS(hidden, predecessors, successors, anchor, ids, logits, positions, seeds, temperature, top_k, top_p,
                min_p, sharpness, path, scores, batch, slots, count, codes, rank, stream, dtype)
};

// The candidates of each slot after each candidate of the slot before (slot 0: after the anchor), best first:
//   links = score(c) + sum over r of predecessors[a, r] hidden[j, r] successors[c, r] - ln(rest + sum over c of exp),
// where rest is the probability that the scores leave to other tokens.
struct LinkCandidatesParams {
  const void* hidden;                     // [batch, slots, rank]
  const void *predecessors, *successors;  // [codes, rank]
  const int64_t* anchor;                  // [batch]; outside the codebook it adds nothing
  const int64_t* ids;                     // [batch, slots, count]; outside [0, codes): no candidate
  const float* scores;                    // [batch, slots, count]: log probabilities; -inf or NaN: no candidate
  float* links;                           // [batch, slots, count, count], descending; -inf: not after this token
  uint8_t* order;                         // [batch, slots, count, count]: the candidates' places in `ids`
  int64_t batch, slots;
  int64_t count;  // 1 .. kMaxCandidates
  int64_t codes, rank;
  DType dtype;  // of hidden and both codebooks
  DFLASH_PARAMS(hidden, predecessors, successors, anchor, ids, scores, links, order, batch, slots, count, codes, rank,
                dtype)
};

// The tree of the best prefixes, best first: by score (the sum of its tokens' scores), then the shallower,
// then the lower token id, then the lower parent row. Missing rows are pads.
struct BuildTreeParams {
  const int64_t* anchor;  // [batch]
  const int64_t* ids;     // [batch, depths, count]; a depth ends at its first negative id
  const float* scores;    // [batch, depths, count], descending; or at a score of -inf or NaN
  const uint8_t* order;   // null, or places in `ids` like scores, which are [batch, depths, count, count] then: those
                          // of depth j after each candidate of depth j - 1, of depth 0 in the first list
  int64_t* tree_ids;      // [batch, rows]; pads: -1
  int64_t* parents;       // [batch, rows]; the root and pads: -1
  int64_t* depth;         // [batch, rows]; the root and pads: 0
  int64_t* ancestors;     // [batch, rows, ceil(rows / 64)]: bit j of row i: j is i or an ancestor
  float* tree_scores;     // [batch, rows]; the root: 0; pads: -inf
  int64_t batch, depths, count;
  int64_t rows;  // 1 .. kMaxTreeRows
  DFLASH_PARAMS(anchor, ids, scores, order, tree_ids, parents, depth, ancestors, tree_scores, batch, depths, count,
                rows)
};

enum RowState : int64_t { kRunning = 0, kStop = 1, kLimit = 2, kInvalid = 3 };  // the values of done

// Where a step's tokens go.
struct Emission {
  const int64_t* stop_token_ids;  // [batch, num_stop_tokens]
  const int64_t* limits;          // [batch]: tokens that the row may hold in all
  int64_t* tokens;                // [batch, capacity]; 0 .. length are emitted
  int64_t* length;                // [batch]; a row whose length is negative or at its limit has no room
  int64_t* num_context;           // [batch]
  int64_t* done;                  // [batch], RowState
  int64_t batch, num_stop_tokens, capacity;

  DFLASH_ANYWHERE bool stops(int64_t b, int64_t token) const {
    for (int64_t i = 0; i < num_stop_tokens; ++i)
      if (stop_token_ids[b * num_stop_tokens + i] == token) return true;
    return false;
  }
};

// Emits the longest matching prefix and one more token, the state update of a step: with m = 1 + |longest prefix with
// block_ids[j + 1] == posterior[j]|, tokens[length + 1 ..] = posterior[0 .. m), length += m and num_context = m.
struct AcceptPrefixParams : Emission {
  const int64_t* block_ids;  // [batch, rows]: the anchor, then proposals; negative: none
  const int64_t* posterior;  // [batch, rows]: the target's choices; negative: its logits held NaN
  int64_t rows;
  DFLASH_PARAMS(block_ids, posterior, stop_token_ids, limits, tokens, length, num_context, done, batch, rows,
                num_stop_tokens, capacity)
};

// The same on a tree: from row 0, emits the choice of a row and goes on to the row's child that proposed it.
struct AcceptPathParams : Emission {
  const int64_t* ids;      // [batch, rows]: the anchor, then the nodes; negative: none
  const int64_t* parents;  // [batch, rows]: of each node a row before it; anything else: nobody's child
  const int64_t* choices;  // [batch, rows]: the target's choices; negative: its logits held NaN
  int64_t* path;           // [batch, path_rows]: the rows of the emitted choices, then path[j] = j
  int64_t* chain_choices;  // [batch, path_rows]: the emitted choices, then -1
  int64_t* chain_ids;      // [batch, path_rows]: the anchor, then the drafts that equal them, then -1
  int64_t rows;            // at most kMaxTreeRows
  int64_t path_rows;       // how many may be visited: columns of path, chain_choices and chain_ids
  DFLASH_PARAMS(ids, parents, choices, stop_token_ids, limits, tokens, length, num_context, done, path, chain_choices,
                chain_ids, batch, rows, path_rows, num_stop_tokens, capacity)
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
  const int64_t* path;            // [batch, path_rows]
  const int64_t *counts, *first;  // [batch]
  void* const* caches;            // [num_caches] pointers to [batch, heads[i], capacity, row_bytes[i] bytes]
  Sizes heads, row_bytes;         // [num_caches]
  int64_t num_caches, batch, path_rows, capacity;
  DFLASH_PARAMS(path, counts, first, caches, heads, row_bytes, num_caches, batch, path_rows, capacity)

  // Where the row that moves to first[b] + j comes from; -1: nothing moves there. Needs j < path_rows.
  DFLASH_ANYWHERE int64_t source(int64_t b, int64_t j) const {
    const int64_t bound = capacity + path_rows;  // clamped to it, a slot outside stays outside
    const int64_t row = path[b * path_rows + j], base = clamped(first[b], bound);
    const int64_t from = base + clamped(row, 2 * bound), to = base + j;
    const bool moves = j >= 1 && j < counts[b] && row > j && to >= 0 && from < capacity;
    return moves ? from : -1;
  }
  DFLASH_ANYWHERE int64_t target(int64_t b, int64_t j) const { return clamped(first[b], capacity + path_rows) + j; }

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
  int64_t batch, rows, path_rows, out_rows, row_bytes;
  DFLASH_PARAMS(x, path, out, batch, rows, path_rows, out_rows, row_bytes)
};

constexpr int64_t kMaxRecurrentKeys = 256;  // per head, of the CUDA kernel

// One layer of a linear recurrence (gated delta rule, Mamba-2) over a block of rows, whose state stands at a position
// in front of the block. First the accepted rows of the last pass are applied from what it saved of them, then the rows
// run. Per head: S' = a S; d = beta (v - S'^T k), or v without beta; S = S' + k d^T; out = S^T q.
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
  int64_t key_heads, heads, key_dim, value_dim;
  int64_t decay_dim;  // 1 or key_dim
  int64_t block;
  DFLASH_PARAMS(q, k, v, log_decay, beta, state, saved_k, saved_d, saved_a, pending, keep, out, batch, rows, key_heads,
                heads, key_dim, value_dim, decay_dim, block, counters)
  unsigned* counters = nullptr;  // CUDA only: [kNumCounters], zero before and after
};

// A depthwise causal convolution over a block of rows: y[t] = bias + sum of weight[j] * input[t - width + 1 + j], taps
// in this order; then the window moves. The window holds the inputs in front of the last pass' rows, then the first of
// these rows: the context of this pass starts at slot pending[b].
struct CausalConvParams {
  const void* x;           // [batch, rows, channels], strided, the last dimension dense
  const void* weight;      // [channels, width], the oldest input's first
  const void* bias;        // [channels] or null
  void* window;            // [batch, width - 1 + block, channels]
  const int64_t* pending;  // [batch], clamped to 0 .. block
  const int64_t* keep;     // [batch], clamped to 0 .. rows: the new context ends in front of this row
  void* out;               // [batch, rows, channels]
  int64_t x_stride_batch, x_stride_row, batch;
  int64_t rows;  // the first min(rows, block) are stored behind the new context
  int64_t channels, width, block;
  bool silu;  // out = y / (1 + exp(-y))
  DType dtype;
  DFLASH_PARAMS(x, weight, bias, window, pending, keep, out, x_stride_batch, x_stride_row, batch, rows, channels, width,
                block, silu, dtype)
};

constexpr float kL2Eps = 1e-6f;  // in the root of the L2 norm, as in flash-linear-attention and transformers

// What a Gated DeltaNet layer's recurrence reads, all float32: q and k with L2 norm 1, q then times
// key_dim^-1/2; log_decay = -exp(a_log) softplus(a + dt_bias); beta = sigmoid(b), rounded to the dtype.
struct DeltaNetInputsParams {
  const void* qkv;              // [rows, 2 * key_heads * key_dim + heads * value_dim]: q heads, k heads, v heads
  const void *b, *a;            // [rows, heads], rows strided
  const void *a_log, *dt_bias;  // [heads]
  float *q, *k;                 // [rows, key_heads, key_dim]
  float* v;                     // [rows, heads, value_dim]
  float *log_decay, *beta;      // [rows, heads]
  int64_t b_stride, a_stride, rows, key_heads, heads, key_dim, value_dim;
  DType dtype;
  DFLASH_PARAMS(qkv, b, a, a_log, dt_bias, q, k, v, log_decay, beta, b_stride, a_stride, rows, key_heads, heads,
                key_dim, value_dim, dtype)
};

// out = rms_norm(x) * weight * silu(z), per head, rounded once.
struct GatedRmsNormParams {
  const float* x;      // [rows, heads, width]
  const void* z;       // [rows, heads, width], rows strided
  const void* weight;  // [width]
  void* out;           // [rows, heads, width]
  int64_t z_stride, rows, heads, width;
  float eps;
  DType dtype;
  DFLASH_PARAMS(x, z, weight, out, z_stride, rows, heads, width, eps, dtype)
};

constexpr int kMaxLinearWeights = 4;
constexpr int64_t kMaxLinearRows = 256;  // of the CUDA kernel
constexpr int64_t kQuantGroup = 64;      // elements of a row that share a step where they are rounded to 8 bits

// How a weight [out, in] lies in memory. What each format stands for, and whose kernels read it, is in the table
// FORMATS of ops/formats.py. All but kDense have bytes for values. kW8A8 and kW8A16 stand for these times scales[n];
// the others have their scales among the bytes: of groups of columns as GPUs read them (cuda/linear/groups.cuh), or of
// blocks as files have them (cpu/linear/blocks.h).
enum class Format : int32_t {
  kDense,
  kW8A8,
  kW8A16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kIQ4_NL,
  kIQ4_XS,
  kMXFP4,
  kW4G32,
  kW4G128,
  kW8G32,
  kW8G128,
  kW4G32M,
  kW4G64M,
  kW8G32M,
  kW8G64M,
  kW4A16G32,
  kW4A16G128,
  kW8A16G32,
  kW8A16G128,
  kW4A16G32M,
  kW8A16G32M,
  kW4A16G32K,
  kW8A16G32K,
  kW8A16G16K,
};
constexpr int kFirstBlocks = int(Format::kQ4_0), kFirstGroups = int(Format::kW4A16G32);

// Formats with groups of columns, whose codes share a scale: a word of its own, a word with a minimum (m), or a byte
// that multiplies a half number of 256 columns (k).
constexpr const char* kGroupFormats[] = {"w4a16g32",  "w4a16g128", "w8a16g32",  "w8a16g128", "w4a16g32m",
                                         "w8a16g32m", "w4a16g32k", "w8a16g32k", "w8a16g16k"};
constexpr bool has_groups(Format format) { return int(format) >= kFirstGroups; }
constexpr bool has_float_groups(Format format) { return format >= Format::kW4A16G32M; }
DFLASH_ANYWHERE constexpr bool has_super_groups(Format format) { return format >= Format::kW4A16G32K; }
DFLASH_ANYWHERE constexpr int bits_of_groups(Format format) {
  return format < Format::kW8A16G32 || format == Format::kW4A16G32M || format == Format::kW4A16G32K ? 4 : 8;
}
DFLASH_ANYWHERE constexpr int log2_of_group(Format format) {
  return format == Format::kW4A16G128 || format == Format::kW8A16G128 ? 7 : format == Format::kW8A16G16K ? 4 : 5;
}

// What scales the columns of a block.
enum class Scales : int32_t {
  kHalf,      // half-precision numbers
  kSuper,     // integers of 8 bits, with a sign unless there are minima, times a half-precision number of 256 columns
  kExponent,  // bytes that stand for 2^(byte - 128)
  kFloat,     // floats. Unless there are minima, 32 columns have a zero point of 8 bits, which is taken off their codes
};
constexpr const char* kScaleNames[] = {"half", "super", "exponent", "float"};

// Codes of 4 bits stand for these less the offset: IQ4_NL and IQ4_XS of llama.cpp, and twice the values of E2M1.
constexpr uint8_t kNonlinear[] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kE2M1[] = {16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4};

// A format with blocks. A column is scale * (code - offset), plus a minimum.
struct BlockFormat {
  const char* name;
  int64_t columns, bytes;  // of a feature that lie together, scales included
  int bits, offset;        // of a code; an offset of 1 is multiplied by the zero point
  Scales scales;
  bool has_minima;
  int scale_columns;               // that share a scale
  const uint8_t* table = nullptr;  // of 16 codes
};
constexpr BlockFormat kBlockFormats[] = {
    {"q4_0", 64, 36, 4, 8, Scales::kHalf, false, 32},
    {"q4_1", 64, 40, 4, 0, Scales::kHalf, true, 32},
    {"q5_0", 64, 44, 5, 16, Scales::kHalf, false, 32},
    {"q5_1", 64, 48, 5, 0, Scales::kHalf, true, 32},
    {"q8_0", 64, 68, 8, 128, Scales::kHalf, false, 32},
    {"q4_k", 256, 148, 4, 0, Scales::kSuper, true, 32},
    {"q5_k", 256, 180, 5, 0, Scales::kSuper, true, 32},
    {"q6_k", 256, 212, 6, 32, Scales::kSuper, false, 16},
    {"iq4_nl", 64, 36, 4, 128, Scales::kHalf, false, 32, kNonlinear},
    {"iq4_xs", 256, 140, 4, 128, Scales::kSuper, false, 32, kNonlinear},
    {"mxfp4", 128, 68, 4, 16, Scales::kExponent, false, 32, kE2M1},
    {"w4g32", 128, 84, 4, 1, Scales::kFloat, false, 32},
    {"w4g128", 128, 72, 4, 1, Scales::kFloat, false, 128},
    {"w8g32", 128, 148, 8, 1, Scales::kFloat, false, 32},
    {"w8g128", 128, 136, 8, 1, Scales::kFloat, false, 128},
    {"w4g32m", 128, 96, 4, 0, Scales::kFloat, true, 32},
    {"w4g64m", 128, 80, 4, 0, Scales::kFloat, true, 64},
    {"w8g32m", 128, 160, 8, 0, Scales::kFloat, true, 32},
    {"w8g64m", 128, 144, 8, 0, Scales::kFloat, true, 64},
};
static_assert(sizeof(kBlockFormats) / sizeof(BlockFormat) == kFirstGroups - kFirstBlocks, "a row per format");
constexpr bool has_blocks(Format format) { return kFirstBlocks <= int(format) && int(format) < kFirstGroups; }
constexpr const BlockFormat& blocks_of(Format format) { return kBlockFormats[int(format) - kFirstBlocks]; }

// Of a row of a weight in 8 bits: whole groups of 64 columns.
DFLASH_ANYWHERE constexpr int64_t int8_row_size(int64_t in) { return (in + 63) / 64 * 64; }

// Of a row of a weight with groups: the codes of whole 64 columns, and with them a word of four bytes per group, or two
// bytes per 32 columns and a word per 256.
DFLASH_ANYWHERE constexpr int64_t codes_size(Format format, int64_t in) {
  return (in + 63) / 64 * 8 * bits_of_groups(format);
}
DFLASH_ANYWHERE constexpr int64_t groups_row_size(Format format, int64_t in) {
  const int64_t last = (in + 63) / 64 * 64 - 1;
  if (has_super_groups(format)) return codes_size(format, in) + (last + 1) / 16 + ((last >> 8) + 1) * 4;
  return codes_size(format, in) + ((last >> log2_of_group(format)) + 1) * 4;
}

// Of a row of a weight: elements if dense, else bytes.
constexpr int64_t row_size(Format format, int64_t in) {
  if (has_groups(format)) return groups_row_size(format, in);
  if (!has_blocks(format)) return format == Format::kDense ? in : int8_row_size(in);
  return (in + blocks_of(format).columns - 1) / blocks_of(format).columns * blocks_of(format).bytes;
}
constexpr bool cpu_reads(Format format) { return format != Format::kW8A16 && !has_groups(format); }

struct LinearWeight {
  const void* values;   // [out, row_size]
  const float* scales;  // [out]; null if dense
  Format format;

  DFLASH_FIELDS(values, scales, format)
};

// out = x weight^T + bias for a few rows, of several weights side by side. If gated, the weights are gate and
// up, without biases, and out = silu(x gate^T) * (x up^T), both products rounded first.
struct LinearParams {
  const void* x;  // [rows, in]
  int num_weights;
  const void* weights[kMaxLinearWeights];  // [features[i], row_size], all of one format
  const float* scales[kMaxLinearWeights];  // [features[i]]; null if dense
  const void* biases[kMaxLinearWeights];   // [features[i]] or null
  int64_t features[kMaxLinearWeights];
  void* out;  // [rows, out_features]
  int64_t rows, in;
  int64_t out_features;  // the sum of features, or of one of them if gated
  DType dtype;
  Format format;
  DFLASH_PARAMS(x, num_weights, weights, scales, biases, features, out, rows, in, out_features, workspace, counters,
                splits, prefetch, gated, dtype, format)
  // CUDA only; linear_workspace() answers for the first three.
  float* workspace;    // [tiles, blocks, what a block sums] if splits > 1; a block of over 16 rows takes two slices
  unsigned* counters;  // [tiles], zero before and after
  int64_t splits;      // slices of `in`, none empty
  bool prefetch;       // no kernel ahead writes a weight: they may be read before those have ended
  bool gated;
};

// packed = the blocks of a GGUF file's tensor, as tiles. Of a block of several columns of a feature it takes the
// integers and the scales as they are.
struct PackBlocksParams {
  const void* blocks;  // [features, columns], as the file has them
  void* packed;        // [features, row_size]
  int64_t features, columns;
  Format format;
  DFLASH_PARAMS(blocks, packed, features, columns, format)
};

// out = rows of a weight in blocks, in float: scale * (code - offset) + minimum, the last sum rounded.
struct UnpackBlocksParams {
  const void* packed;  // [features, row_size]
  const int64_t* ids;  // [rows], each clamped to the features
  float* out;          // [rows, columns]
  int64_t rows, features, columns;
  Format format;
  DFLASH_PARAMS(packed, ids, out, rows, features, columns, format)
};

// out[r] = the sum over slots of scores[r, slot] * down(gate(gate_up(x[r]))) of expert ids[r, slot], slots
// ascending, what goes into `down` rounded to the storage type. An id outside 0 .. num_experts - 1 adds
// nothing, whatever its score. A row's bits depend on the row, its ids and its scores only.
struct ExpertsParams {
  const void* x;                // [rows, hidden]
  const int64_t* ids;           // [rows, top_k]
  const void* scores;           // [rows, top_k], float if float_scores
  const void* gate_up;          // [num_experts, 2 * width, hidden], gate and then up; transposed: [num_experts,
                                // hidden, 2 * width], gate and up by turns
  const void* down;             // [num_experts, hidden, width]; transposed: [num_experts, width, hidden]
  const float* gate_up_scales;  // [num_experts, 2 * width]; null if dense, as all transposed weights are
  const float* down_scales;     // [num_experts, hidden]
  const void* gate_up_bias;     // [num_experts, 2 * width], in the order of gate_up, or null
  const void* down_bias;        // [num_experts, hidden] or null
  void* out;                    // [rows, hidden]
  int64_t rows, top_k, num_experts, hidden, width;
  Gate gate;
  Format format, down_format;  // of gate_up and of down
  float alpha, limit;
  bool transposed, float_scores;
  DType dtype;
  DFLASH_PARAMS(x, ids, scores, gate_up, down, gate_up_scales, down_scales, gate_up_bias, down_bias, out, workspace,
                rows, top_k, num_experts, hidden, width, gate, format, down_format, alpha, limit, transposed,
                float_scores, dtype)
  void* workspace = nullptr;  // CUDA only, see experts_workspace(): [rows, top_k, width] of the storage type,
                              // then [rows, top_k, hidden] float
};

// The convolutions of a block's rows in front of a sublayer and after it, as in DynamicConvParams. `dynamic`
// is the sublayer's input times `projection`: [rows, 2, width, groups].
struct BlockConvWeights {
  const void* base;        // [2, width, hidden]; null: none
  const void* projection;  // [2 * width * groups, hidden]
  int64_t width, groups;

  DFLASH_FIELDS(base, projection, width, groups)
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

  DFLASH_FIELDS(q, k, v, o, q_norm, k_norm, q_bias, k_bias, v_bias, o_bias, sinks, causal, window, gated)
};

struct DeltaNetWeights {
  LinearWeight qkv;             // [2 * key_heads * key_dim + heads * value_dim, hidden]: q heads, k heads, v heads
  LinearWeight z;               // [heads * value_dim, hidden]; null: qkv has per key head q, k, its v heads, their z
  LinearWeight b;               // [heads, hidden]
  LinearWeight a;               // [heads, hidden]; null: b has per key head the b, then the a, of its heads
  const void* conv;             // [2 * key_heads * key_dim + heads * value_dim, conv_width]
  const void *a_log, *dt_bias;  // [heads]
  const void* norm;             // [value_dim]
  LinearWeight out;             // [hidden, heads * value_dim]

  DFLASH_FIELDS(qkv, z, b, a, conv, a_log, dt_bias, norm, out)
};

struct DecoderLayer {
  const void *input_norm, *post_norm;             // [hidden]
  const void *attention_out_norm, *mlp_out_norm;  // [hidden] or null: of what the sublayers add
  LinearWeight gate, up;                          // [width, hidden]
  LinearWeight down;                              // [hidden, width]
  Gate gate_kind;                                 // kSilu or kGeluTanh
  AttentionWeights attention;                     // one of the two
  DeltaNetWeights delta_net;
  BlockConvWeights attention_conv, mlp_conv;
  int64_t tap;  // where its output goes in taps, -1: nowhere

  DFLASH_FIELDS(input_norm, post_norm, attention_out_norm, mlp_out_norm, gate, up, down, gate_kind, attention,
                delta_net, attention_conv, mlp_conv, tap)
};

// The decoder layers of a model and its final norm over a block of rows, each sequence at its own length.
struct DecoderLayersParams {
  const DecoderLayer* layers;  // [num_layers]
  // Per layer of attention a pointer to [held, num_kv_heads, capacity, head_dim].
  void *const *k_caches, *const *v_caches;
  // Per recurrent layer a pointer to what its kernels take under these names, see GatedRecurrenceParams.
  void* const* windows;
  float *const *states, *const *saved_k, *const *saved_d, *const *saved_a;
  const int64_t* pending;      // [batch] or null without recurrent layers
  const int64_t* keep;         // [batch] or null
  const void* hidden;          // [batch, rows, hidden]
  const void* context;         // [batch, context_rows, hidden] or null: rows that every layer takes K/V from
  const int64_t* num_context;  // [batch], clamped to 0 .. context_rows: live ones, ahead of lengths[b]
  const int64_t* lengths;      // [batch], the slot of each sequence's first row, as in BlockAttentionParams
  const int64_t* origin;       // [batch] or null, as in QkvNormRopeAppendParams
  const int64_t* ancestors;    // [batch, rows, ceil(rows / 64)] or null, as in BlockAttentionParams
  const int64_t* sequences;    // [batch], the place of each in the caches, clamped to 0 .. held - 1; null: in order
  const float *cos, *sin;      // [positions, half]
  const float *local_cos, *local_sin;  // likewise, of layers with a window; null: the same
  const void* norm;                    // [hidden], the final norm
  void* out;                           // [batch, rows, hidden]
  void* taps;                          // [batch, rows, num_taps, hidden], layer outputs; the last layer's is `out`
  int64_t num_layers, batch, held, rows, context_rows, hidden_size, width, num_heads, num_kv_heads, head_dim, half,
      positions, capacity, num_taps;
  int64_t key_heads, delta_heads, key_dim, value_dim;  // of the recurrent layers; 0 without
  int64_t conv_width, block;
  float scale, eps;
  bool zero_centered;  // the norms over hidden states and heads add one to their weights
  DType dtype;
  DFLASH_PARAMS(layers, k_caches, v_caches, windows, states, saved_k, saved_d, saved_a, pending, keep, hidden, context,
                num_context, lengths, origin, ancestors, sequences, cos, sin, local_cos, local_sin, norm, out, taps,
                num_layers, batch, held, rows, context_rows, hidden_size, width, num_heads, num_kv_heads, head_dim,
                half, positions, capacity, num_taps, key_heads, delta_heads, key_dim, value_dim, conv_width, block,
                scale, eps, zero_centered, dtype)
};

// The kernels and their params. Those with products, and those of the CPU alone, are compiled again for an instruction
// set that differs from another only in products (cpu/base/kernels.h; CMake reads their names here).
#define DFLASH_KERNELS(KERNEL, PRODUCT_KERNEL, CPU_KERNEL) \
  KERNEL(rms_norm, RmsNormParams)                          \
  KERNEL(dynamic_conv, DynamicConvParams)                  \
  KERNEL(conv_add_rms_norm, ConvAddRmsNormParams)          \
  KERNEL(draft_rows, DraftRowsParams)                      \
  KERNEL(silu_mul, SiluMulParams)                          \
  KERNEL(sigmoid_mul, SigmoidMulParams)                    \
  KERNEL(qkv_norm_rope_append, QkvNormRopeAppendParams)    \
  KERNEL(append_context_kv, AppendContextKvParams)         \
  KERNEL(append_kv, AppendKvParams)                        \
  PRODUCT_KERNEL(block_attention, BlockAttentionParams)    \
  PRODUCT_KERNEL(linear, LinearParams)                     \
  PRODUCT_KERNEL(experts, ExpertsParams)                   \
  KERNEL(delta_net_inputs, DeltaNetInputsParams)           \
  KERNEL(gated_rms_norm, GatedRmsNormParams)               \
  KERNEL(select_tokens, SelectTokensParams)                \
  KERNEL(accept_prefix, AcceptPrefixParams)                \
  KERNEL(accept_path, AcceptPathParams)                    \
  KERNEL(compact_kv, CompactKvParams)                      \
  KERNEL(gather_rows, GatherRowsParams)                    \
  KERNEL(tree_candidates, TreeCandidatesParams)            \
  KERNEL(build_tree, BuildTreeParams)                      \
  KERNEL(top_candidates, TopCandidatesParams)              \
  KERNEL(walk_candidates, WalkCandidatesParams)            \
  KERNEL(link_candidates, LinkCandidatesParams)            \
  KERNEL(gated_recurrence, GatedRecurrenceParams)          \
  KERNEL(causal_conv, CausalConvParams)                    \
  CPU_KERNEL(log_sum_exp, LogSumExpParams)                 \
  CPU_KERNEL(pack_blocks, PackBlocksParams)                \
  CPU_KERNEL(unpack_blocks, UnpackBlocksParams)            \
  CPU_KERNEL(decoder_layers, DecoderLayersParams)
#define DFLASH_NOTHING(name, Params)

}  // namespace dflash
