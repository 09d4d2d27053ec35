// One plain struct per op. Every pointer carries its shape; all tensors are contiguous and row-major unless a
// stride field says otherwise. Index tensors (positions, lengths, ids, counts) are int64. `threads` is how
// many a CPU kernel may use, `device` the CUDA device that holds the tensors. This header is all that the
// kernels and the binding share.
#pragma once
#include <cstdint>

namespace dflash {

enum class DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };  // kFloat16: CUDA alone

// RMSNorm, with an optional residual added first and an optional count of live rows per sequence.
struct RmsNormParams {
  const void* x;         // [rows, hidden]
  const void* residual;  // [rows, hidden] or null
  const void* weight;    // [hidden]
  const int64_t*
      counts;  // [rows / rows_per_sequence] or null: rows past the count are written as zero, never read
  void* out;   // [rows, hidden]
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
};

// Packed rows -> q heads (norm, RoPE) into q_out for the last q_rows rows; k heads (norm, RoPE) and v heads
// into the cache at the rows' positions. A position outside [0, capacity) appends nothing.
struct QkvNormRopeAppendParams {
  const void* qkv;  // [batch, rows, (num_heads + 2 * num_kv_heads) * head_dim]: q heads, k heads, v heads
  const int64_t* positions;   // [batch, rows]
  const float* cos;           // [batch, rows, half]
  const float* sin;           // [batch, rows, half]
  const void* q_norm_weight;  // [head_dim] or null
  const void* k_norm_weight;  // [head_dim] or null
  void* q_out;                // [batch, q_rows, num_heads, head_dim]
  void* k_cache;              // [batch, num_kv_heads, capacity, head_dim]
  void* v_cache;              // [batch, num_kv_heads, capacity, head_dim]
  int64_t batch;
  int64_t rows;
  int64_t q_rows;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t half;  // the first 2 * half dimensions of a head rotate
  int64_t capacity;
  float eps;
  DType dtype;
  int32_t threads;
  int32_t device = 0;
};

// The same for K/V alone, for all layers.
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
};

// softmax(scale * q k^T) v over the keys that each query sees; query i of sequence b is at position
// lengths[b] + i.
struct BlockAttentionParams {
  const void* q;        // [batch, rows, num_heads, head_dim], strided, the last dimension dense
  const void* k_cache;  // [batch, num_kv_heads, capacity, head_dim]
  const void* v_cache;  // [batch, num_kv_heads, capacity, v_head_dim]
  const int64_t*
      lengths;         // [batch]; slots 0 .. lengths[b] + rows - 1 are valid, those after them are never read
  const float* sinks;  // [num_heads] or null
  void* out;           // [batch, rows, num_heads, v_head_dim]
  int64_t q_stride_batch, q_stride_row, q_stride_head;
  int64_t batch;
  int64_t rows;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t v_head_dim;
  int64_t capacity;
  int64_t window;  // 0: none
  float scale;
  float softcap;  // 0: none
  bool causal;
  DType dtype;
  int32_t threads;
  int32_t device = 0;
  // CUDA alone.
  const int64_t* ancestors;  // [rows, ceil(rows / 64)] or null: the rows of its block that a query sees
  float* workspace;          // [batch, num_kv_heads, tiles, splits, floats of a stored state], see ops.py
  unsigned* counters;        // [batch, num_kv_heads, tiles], zero before and after
  int64_t splits;  // blocks to a tile of rows: one a chunk of the capacity, 1, or 0 for the plain kernel
};

constexpr int64_t kSelectSlice = 8192;  // tokens a block of the CUDA kernel takes; ops.py knows it too

// ids = argmax(sharpness * filter(logits / temperature) + gumbel noise); -1 for a row that holds NaN.
struct SelectTokensParams {
  const void* logits;        // [batch, rows, vocab]
  const int64_t* positions;  // [batch, rows]
  const int64_t* seeds;      // [batch]
  const float* temperature;  // [batch]; 0: plain argmax
  const int64_t* top_k;      // [batch]; 0: off
  const float* top_p;        // [batch]; 1: off
  const float* min_p;        // [batch]; 0: off
  const float* sharpness;    // [batch]; infinity: plain argmax
  int64_t* ids;              // [batch, rows]
  void* partial;             // CUDA: 16 bytes for each [batch, rows, ceil(vocab / kSelectSlice)]
  int64_t batch;
  int64_t rows;
  int64_t vocab;
  DType dtype;
  int32_t threads;
  int32_t device = 0;
};

enum RowState : int64_t { kRunning = 0, kStop = 1, kLimit = 2, kInvalid = 3 };  // the values of done

// The longest matching prefix and one token more are emitted; the whole state update of a step.
struct AcceptPrefixParams {
  const int64_t* block_ids;       // [batch, rows]: the anchor, then proposals; negative: none
  const int64_t* posterior;       // [batch, rows]: the target's choices; negative: its logits held NaN
  const int64_t* stop_token_ids;  // [num_stop_tokens]
  const int64_t* limits;          // [batch]: tokens that the row may hold in all
  int64_t* tokens;                // [batch, capacity]; 0 .. length are emitted
  int64_t* length;                // [batch]
  int64_t* num_context;           // [batch]
  int64_t* done;                  // [batch], RowState
  int64_t batch;
  int64_t rows;
  int64_t num_stop_tokens;
  int64_t capacity;
  int32_t threads;
  int32_t device = 0;
};

constexpr int kMaxLinearWeights = 4;  // ops.py knows it too

// out = x weight^T + bias for a few rows, of several weights side by side.
struct LinearParams {
  const void* x;  // [rows, in]
  int num_weights;
  const void* weights[kMaxLinearWeights];  // [features[i], in]
  const void* biases[kMaxLinearWeights];   // [features[i]] or null
  int64_t features[kMaxLinearWeights];
  void* out;  // [rows, out_features]
  int64_t rows;
  int64_t in;
  int64_t out_features;  // the sum of features
  DType dtype;
  int32_t threads;
  int32_t device = 0;
  // CUDA alone: up to 64 rows, 16-bit types, `in` a multiple of 8.
  float* workspace;    // [tiles, splits, 128 * rows padded to 16, 32 or 64] if splits > 1, where
  unsigned* counters;  // [tiles], zero before and after; a tile is 128 features of one weight, or its rest
  int64_t splits;      // slices of `in`, none empty
  bool prefetch;       // no kernel ahead writes a weight: they may be read before those have ended
};

// What one decoder layer reads and where it appends; every weight is [out, in].
struct DecoderLayer {
  const void* input_norm;                         // [hidden]
  const void *q, *k, *v;                          // [heads * head_dim, hidden]
  const void* o;                                  // [hidden, num_heads * head_dim]
  const void* post_norm;                          // [hidden]
  const void *gate, *up;                          // [width, hidden]
  const void* down;                               // [hidden, width]
  const void *q_norm, *k_norm;                    // [head_dim] or null
  const void *q_bias, *k_bias, *v_bias, *o_bias;  // [out] or null
  const float* sinks;                             // [num_heads] or null
  void *k_cache, *v_cache;                        // [batch, num_kv_heads, capacity, head_dim]
  int64_t causal, window;                         // as in BlockAttentionParams
  int64_t tap;                                    // where its output goes in taps, -1: nowhere
};

// The decoder layers of a model and its final norm over a block of rows, each sequence at its own length.
struct DecoderLayersParams {
  const DecoderLayer* layers;  // [num_layers]
  const void* hidden;          // [batch, rows, hidden]
  const void* context;         // [batch, context_rows, hidden] or null: rows that every layer takes K/V from
  const int64_t* num_context;  // [batch], live context rows, at the positions before lengths[b]
  const int64_t* lengths;      // [batch], the position of each sequence's first row
  const float* cos;            // [positions, half]
  const float* sin;            // [positions, half]
  const void* norm;            // [hidden], the final norm
  void* out;                   // [batch, rows, hidden]
  void* taps;                  // [batch, rows, num_taps, hidden], layer outputs; the last layer's is `out`
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
  float scale;
  float eps;
  DType dtype;
  int32_t threads;
  int32_t device = 0;
};

}  // namespace dflash
