// The table of native CPU kernels. Each instruction set's source file fills one (isa_*.cpp); module.cpp picks one when it is imported.
//
// Pointers are raw and untyped where the element type is chosen at run time (Dtype). Rows are contiguous. Work that can be shared
// among threads is cut into items by the caller: a kernel runs items [first, last) and writes nothing that another item reads.
#pragma once
#include <cstddef>
#include <cstdint>

namespace splitserve {

extern int64_t asking_rows;  // products of fewer leave it to the CPU to fetch weights ahead; set before the first, see multiply_tile

enum Dtype : int { kFloat32 = 0, kBFloat16 = 1 };

enum Cache : int { kPlain = 0, kCacheFloat8 = 1, kCacheInt8 = 2 };  // what the pool holds: see kv_codes.h

constexpr int64_t CODED = -1, CODED_K = 64, CODED_BYTES = 64 + CODED_K * 48;  // of bfloat16 weights, see coded.h: a block's inputs and size

enum QuantisedKind : int64_t { kInt4 = 4, kFloat4 = 5, kInt8 = 8, kFloat8 = 9 };

struct QuantisedPart {       // some of a linear's outputs, 8-byte fields; see quantised.h
  const void* packed;        // panels, see pack_quantised
  const float* row_scales;   // [n, padded to panels] or null
  const int32_t* order;      // [k]: which of x's numbers is multiplied at each place, or null
  int64_t n;
  int64_t kind;
  int64_t block;             // of k, a multiple of 8; for whole numbers at most 128
  int64_t scale_bytes;       // of the scales within the panels: 4 (float32), 2 (float16), 1 (float4: e8m0; others: a signed multiple of the super-block's), 0 (none)
  int64_t has_offsets;
  int64_t x_bits;            // that x is rounded to for whole numbers: 16, or 8
  const uint8_t* supers;     // float16 [panel][super-block of k][scale, offset][PANEL], or null
  int64_t super_shift;       // a super-block has 1 << super_shift blocks
};

struct PackArgs {
  QuantisedPart part;
  const uint8_t* codes;      // [n, k], or [n, ceil(k / 2)] of 4 bits, the even k's low
  const float* scales;       // [n, ceil(k / group)] or null
  const float* offsets;      // the same, or null
  int64_t k, group;          // group: a multiple of block
};

struct PackedPart {          // some of a linear's outputs
  const void* weight;        // [rows, k]
  int64_t rows;
};

struct PackLinearArgs {
  const PackedPart* parts;   // one above the other [n, k]
  void* packed;              // [ceil(n / panel)] panels
  int64_t n, k;
  Dtype dtype;
  bool coded;                // see coded.h
};

struct LinearArgs {          // y[m][n] = sum_k x[m][k] w[n][k] + bias[n]
  const void* x;             // [m, k]
  const void* packed;        // [ceil(n / panel)] panels, see pack_linear; or QuantisedPart[num_parts]
  const void* bias;          // [n] or null
  void* y;                   // [m, n]
  int64_t m, n, k;
  Dtype dtype;               // of all of them
  int64_t num_parts = 0;     // 0: not quantised; CODED: neither, but coded
};

struct Matrix {              // a linear's weights, see LinearArgs
  const void* packed;
  int64_t num_parts;
  const void* bias;
};

struct LowRankSlot {         // an adapter's update of one linear, 8-byte fields; see low_rank.h
  const void* a;             // [vectors] panels of a vector of ranks each
  const void* b;             // the panels' steps of ranks, one behind the other
  const int32_t* firsts;     // [panels of n]: each one's first step
  const int32_t* starts;     // [panels of n + 1]: where in b its steps begin
  int64_t vectors;           // of ranks; 0: no adapter
};

struct LowRankTile {         // rows of one slot: rows[first .. first + count)
  int32_t slot, first, count;
};

struct LowRankArgs {         // y[row] += B A x[row], of the row's slot
  const LowRankSlot* slots;
  const void* x;             // [m, k]
  void* y;                   // [m, n]
  const int32_t* rows;       // ordered by slot
  void* h;                   // [as rows are ordered, h_row]
  int64_t h_row, n, k;
  Dtype dtype;               // of x, y, A and B
};

struct AttentionArgs {       // out = softmax(scale q k^T) v, causal; keys and values are read where they lie in the pool
  const void* q;             // [num_tokens, num_heads, head_dim], tokens q_stride apart
  const void* pool;          // from its first head on: [num_blocks, num_layers, planes, plane]; a head's run: [block_size, a row of head_dim: see kv_codes.h]
  void* out;                 // [num_tokens, num_heads, head_dim]
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* seq_lens;         // [num_seqs]
  const int32_t* block_tables;     // [num_seqs, table_stride]
  const float* sinks;        // [num_heads] or null: a score of each head that has no value (Xiao et al., StreamingLLM, 2023)
  int64_t q_stride, num_seqs, table_stride, num_layers, layer, block_size, num_heads, num_kv_heads, plane, head_dim;
  int64_t planes = 2;        // keys and values; 1: keys are the values, too. plane: its numbers in memory, also of heads and indexes that are not this caller's
  int64_t head_step = 1;     // runs in memory from one head of this caller to its next
  bool slots = false;        // the tables are of tokens: block * block_size + offset of each
  int64_t window;            // a token sees the window tokens that end with itself; INT32_MAX: all
  float scale;
  float softcap;             // scaled scores become softcap tanh(score / softcap); 0: they stay
  Dtype dtype;
  Cache cache = kPlain;
  const float* kv_scales = nullptr;  // of float8: [num_layers, 2, num_kv_heads]
  float* lse = nullptr;      // [num_tokens, num_heads] or null: to be written, log(sum of exp(scaled score)), sinks included
};

struct AttentionItem {       // query tokens [query, query + num_queries) of a sequence, one key-value head
  int32_t seq, query, num_queries, head;
};

struct IndexArgs {           // the tokens that sparse attention attends to; see index_scores.h
  AttentionArgs of;          // q: of the index, and its keys; one key-value head, one plane
  const float* weights;      // [num_tokens, num_heads]
  float* scores;             // [rows of items, row]
  int32_t* slots;            // [num_tokens, count]
  int64_t row, count;        // row: a multiple of 64
};

struct IndexItem {           // keys [first, last) of a query token, scored in a row; first: a multiple of 64
  int32_t seq, token, row;
  int64_t first, last;
};

struct RopeArgs {            // q and k are normalised (where asked) and rotated in place in qkv; k and v are copied to their slots
  void* qkv;                 // [num_tokens, num_heads + planes num_kv_heads, head_dim]
  void* pool;
  const float* cos_sin;      // [max_model_len, head_dim]: cosines, then sines
  const int32_t* positions;  // [num_tokens]
  const int64_t* slots;      // [num_tokens]; negative: k and v are not written
  const void* q_norm;        // [head_dim], or of all heads together, or of each head, or null
  const void* k_norm;
  bool norms_all_heads, norms_each_head = false;  // the latter: less the head's mean
  int64_t num_layers, layer, block_size, num_heads, num_kv_heads, plane, head_dim, planes = 2, head_step = 1;  // see AttentionArgs
  float eps;
  Dtype dtype;
  Cache cache = kPlain;
  const float* kv_scales = nullptr;
};

struct NormArgs {            // residual += x (where x is given); y = residual / sqrt(mean(residual^2) + eps) * weight, or residual
  const void* x;             // [m, n] or null
  void* residual;            // [m, n]
  const void* weight;        // [n] or null
  void* y;                   // [m, n]; may be residual where x is null
  int64_t n;
  float eps;
  Dtype dtype;
};

struct RouteArgs {           // a mixture's experts of each row, ascending, and their weights; see experts.h
  const void* logits;        // [m, num_experts], with one more column where gated: the shared expert's gate
  int32_t* experts;          // [m, chosen]
  float* weights;            // [m, chosen], with one more column where gated: sigmoid(gate)
  const float* correction;   // [num_experts] or null: added to the scores for the choice alone
  int64_t num_experts, chosen, num_groups, chosen_groups;
  bool normalized;           // a row's weights add up to 1, before factor
  bool sigmoid;              // scores are the logits' sigmoids
  float factor;              // of the weights
  bool gated;
  Dtype dtype;               // of logits
};

struct StateArgs {           // the states of a step's sequences, of one layer; see states.h and ../states.py
  void* pool;                // from its first head on, see AttentionArgs; here its bytes are float32
  const int32_t* query_start_loc;  // [num_seqs + 1]
  const int32_t* tables;     // [num_seqs, 3, table_stride]
  const int32_t* source;     // [num_seqs]
  const int32_t* marks;      // [num_seqs]
  int64_t num_seqs, table_stride, offset;  // offset: of this layer's state in a head's part, in floats
  int64_t num_layers, layer, planes, num_kv_heads, plane_heads, head_step, run_floats;  // run: a head's keys or values in a block
};

struct DeltaNetArgs : StateArgs {  // see delta_net.h and ../delta_net.py
  const void* projected;     // [num_tokens, q, k, v of all heads, z, b, a]; Mamba-2 has no b
  void* out;                 // [num_tokens, num_value_heads, value_dim]
  const void* conv;          // [channels, conv_size]
  const float* decay;        // [num_value_heads]
  const float* dt;           // [num_value_heads]
  const void* norm;          // [value_dim]
  const float* conv_bias;    // [channels] or null
  const float* skip;         // [num_value_heads]; null: the delta rule, else Mamba-2's
  int64_t num_key_heads, num_value_heads, key_dim, value_dim, conv_size;  // value_dim: a multiple of the vector width
  float eps, beta_scale;
  Dtype dtype, conv_dtype, norm_dtype;
};

struct ShortConvArgs : StateArgs {  // see short_conv.h and ../short_conv.py
  const void* projected;     // [num_tokens, b, c, x]
  void* out;                 // [num_tokens, channels]
  const float* conv;         // [conv_size, channels]
  const float* bias;         // [channels] or null
  int64_t channels, conv_size;  // channels of a key-value head: a multiple of the vector width
  Dtype dtype;
};

constexpr int64_t kReluSquared = 3;  // of `activation`: the one without a gate
inline int64_t num_inputs(int64_t activation) { return activation == kReluSquared ? 1 : 2; }

using GateMul = void(const void* gate_up, void* y, int64_t n, Dtype dtype, int64_t first_row, int64_t last_row);

struct Kernels {
  const char* name;
  int64_t vector_width;      // float32 lanes
  int64_t panel;             // columns of a packed panel
  bool codes;                // whether it knows coded weights
  bool (*pack_linear)(const PackLinearArgs&, int64_t first_panel, int64_t last_panel);
  void (*linear)(const LinearArgs&, int64_t first_panel, int64_t last_panel);
  void (*low_rank_down)(const LowRankArgs&, const LowRankTile&, int64_t first_vector, int64_t last_vector);  // h
  void (*low_rank_up)(const LowRankArgs&, const LowRankTile&, int64_t first_panel, int64_t last_panel);      // y
  void (*pack_quantised)(const PackArgs&, int64_t first_panel, int64_t last_panel);
  void (*quantised_linear)(const LinearArgs&, int64_t first_panel, int64_t last_panel);
  void (*attention)(const AttentionArgs&, const AttentionItem* items, int64_t first, int64_t last);
  void (*rope_and_store)(const RopeArgs&, int64_t first_token, int64_t last_token);
  void (*add_rms_norm)(const NormArgs&, int64_t first_row, int64_t last_row);
  GateMul* gate_mul[4];      // silu, gelu by tanh, clamped silu, relu squared
  void (*gumbel_argmax)(const float* logits, const int64_t* keys, int64_t* chosen, int64_t vocab_size, int64_t first_row, int64_t last_row);
  void (*route)(const RouteArgs&, int64_t first_row, int64_t last_row);
  void (*add_weighted)(const void* y, float weight, float* sum, int64_t n, Dtype dtype);
  void (*narrow_all)(const float* sum, void* y, int64_t n, Dtype dtype);
  void (*delta_net)(const DeltaNetArgs&, int64_t first_item, int64_t last_item);  // items: [num_seqs, num_value_heads]
  void (*short_conv)(const ShortConvArgs&, int64_t first_item, int64_t last_item);  // items: [num_seqs, num_kv_heads]
  void (*index_scores)(const IndexArgs&, const IndexItem* items, int64_t first, int64_t last);
};

extern const Kernels kGenericKernels;
#if defined(__x86_64__)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
extern const Kernels kAvx512Bf16Kernels;
void quantised_linear_vnni(const LinearArgs&, int64_t first_panel, int64_t last_panel);  // in the layout of AVX-512, with the same bits
#if defined(__clang__) || __GNUC__ >= 11
#define AMX_TILES 1
void linear_amx(const LinearArgs&, int64_t first_panel, int64_t last_panel);  // in the layout of AVX512-BF16
#endif
#endif

}  // namespace splitserve
