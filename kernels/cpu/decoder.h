// A decoder's layers in one call: the kernels that a caller would call one by one, in the same order and with the same bits, without what
// lies between two calls. Each layer: residual += hidden; hidden = o(attention(rope(qkv(norm(residual))))); residual += hidden;
// hidden = down(act(gate) * up), of norm(residual), or a mixture of such. Where it has out norms, hidden is normed before it is added.
#pragma once
#include "mixture.h"

namespace {

struct LayerWeights {  // 8-byte fields, as the caller's table has them; a bias or norm that is not there is null
  const void *input_norm;
  Matrix qkv;
  const void *q_norm, *k_norm;
  int64_t norms_all_heads;
  const float* cos_sin;
  Matrix o;
  const void *attention_out_norm, *post_norm;
  Matrix gate_up;
  int64_t activation;
  Matrix down;
  const MixtureWeights* mixture;  // in place of gate_up and down, or null
  const void* mlp_out_norm;
  int64_t window;
  const float* sinks;
  const LowRankSlot *qkv_updates, *o_updates, *gate_up_updates, *down_updates;  // or null
};

struct DecoderArgs {
  const LayerWeights* layers;
  int64_t first, last;
  void* hidden;    // [num_tokens, hidden_size]: the layer before's output, not yet added; of no meaning before layer 0
  void* residual;  // [num_tokens, hidden_size]
  int64_t num_tokens, hidden_size, intermediate_size;
  RopeArgs rope;            // what is the same in all layers
  AttentionArgs attention;
  float eps;
  Dtype dtype;
  const int32_t* adapters;  // [num_tokens]: the slot of each, or negative; null: none has one
  int64_t num_slots;
};

void run_layers(DecoderArgs& g) {
  static thread_local Bytes normed_buffer, qkv_buffer, attended_buffer, gate_up_buffer, activated_buffer;  // one step at a time
  const int64_t m = g.num_tokens, e = g.hidden_size, f = g.intermediate_size, item = g.dtype == kFloat32 ? 4 : 2;
  const int64_t q_size = g.rope.num_heads * g.rope.head_dim, qkv_size = q_size + 2 * g.rope.num_kv_heads * g.rope.head_dim;
  void *normed = normed_buffer.reserve(m * e * item), *qkv = qkv_buffer.reserve(m * qkv_size * item);
  void *attended = attended_buffer.reserve(m * q_size * item), *gate_up = gate_up_buffer.reserve(m * 2 * f * item);
  void* activated = activated_buffer.reserve(m * f * item);
  const AttentionItems items(g.attention);
  g.rope.qkv = qkv;
  g.attention.q = qkv;
  g.attention.q_stride = qkv_size;
  g.attention.out = attended;
  const auto multiply = [&](const void* x, const Matrix& w, const LowRankSlot* updates, void* y, int64_t n, int64_t k) {
    call(LinearArgs{x, w.packed, w.bias, y, m, n, k, g.dtype, w.num_parts});
    if (g.adapters && updates) call(LowRankArgs{updates, x, y, nullptr, nullptr, 0, n, k, g.dtype}, g.adapters, g.num_slots, m);
  };
  for (int64_t i = g.first; i < g.last; ++i) {
    const LayerWeights& w = g.layers[i];
    g.rope.layer = g.attention.layer = i;
    g.rope.q_norm = w.q_norm;
    g.rope.k_norm = w.k_norm;
    g.rope.norms_all_heads = w.norms_all_heads;
    g.rope.cos_sin = w.cos_sin;
    g.attention.window = w.window;
    g.attention.sinks = w.sinks;
    call(NormArgs{i ? g.hidden : nullptr, g.residual, w.input_norm, normed, e, g.eps, g.dtype}, m);
    multiply(normed, w.qkv, w.qkv_updates, qkv, qkv_size, e);
    call(g.rope, m);
    call(g.attention, items);
    multiply(attended, w.o, w.o_updates, g.hidden, e, q_size);
    if (w.attention_out_norm) call(NormArgs{nullptr, g.hidden, w.attention_out_norm, g.hidden, e, g.eps, g.dtype}, m);
    call(NormArgs{g.hidden, g.residual, w.post_norm, normed, e, g.eps, g.dtype}, m);
    if (w.mixture) {
      run_mixture(*w.mixture, normed, g.hidden, m, g.dtype);
    } else {
      multiply(normed, w.gate_up, w.gate_up_updates, gate_up, 2 * f, e);
      call_gate_mul(active->gate_mul[w.activation], gate_up, activated, m, f, g.dtype);
      multiply(activated, w.down, w.down_updates, g.hidden, e, f);
    }
    if (w.mlp_out_norm) call(NormArgs{nullptr, g.hidden, w.mlp_out_norm, g.hidden, e, g.eps, g.dtype}, m);
  }
}
}  // namespace
