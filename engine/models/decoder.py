"""The Llama family's decoder: Llama 2/3/3.1, Mistral, Qwen2/2.5 and Qwen3 differ in ``ModelConfig`` only.

    h = embed(tokens)
    each layer:  h += o(attention(rope(qkv(norm(h)))));  h += down(silu(gate(n)) * up(n)), n = norm(h)
    logits = head(norm(h))

T: num_tokens of the step, E: hidden_size, H: num_heads, KVH: num_kv_heads, D: head_dim, F: intermediate_size, V: vocab_size.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ...kernels.interface import AttentionInputs, RopeInputs
from ..attention_metadata import AttentionMetadata
from ..config import ModelConfig
from ..layers import LayerLoader
from ..rope import cos_sin_table

IGNORED_TENSORS = (".rotary_emb.inv_freq",)  # in old checkpoints; computed from the configuration instead


class DecoderLayer:
    def __init__(self, config: ModelConfig, index: int, load: LayerLoader) -> None:
        name = f"model.layers.{index}"
        self._index = index
        self._kernels = load.kernels
        self._eps = config.rms_norm_eps
        self._sliding_window = config.sliding_windows[index]
        self._input_norm = load.norm(f"{name}.input_layernorm")
        self._qkv = load.column([f"{name}.self_attn.{p}_proj" for p in "qkv"], config.qkv_bias)
        self._q_norm = load.norm(f"{name}.self_attn.q_norm") if config.qk_norm else None
        self._k_norm = load.norm(f"{name}.self_attn.k_norm") if config.qk_norm else None
        self._o = load.row(f"{name}.self_attn.o_proj", config.o_bias)
        self._post_norm = load.norm(f"{name}.post_attention_layernorm")
        self._gate_up = load.column([f"{name}.mlp.gate_proj", f"{name}.mlp.up_proj"], config.mlp_bias)
        self._down = load.row(f"{name}.mlp.down_proj", config.mlp_bias)

    def forward(self, hidden: Tensor, residual: Tensor, pool: Tensor, rope: RopeInputs, attention: AttentionInputs) -> Tensor:
        """``hidden`` [T, E] is the last block's output, not yet added to ``residual`` [T, E]; returns this layer's."""
        k = self._kernels
        qkv = self._qkv(k.add_rms_norm(hidden, residual, self._input_norm, self._eps))  # [T, (H + 2 KVH) D]
        if self._q_norm is not None:
            rope = replace(rope, q_norm=self._q_norm, k_norm=self._k_norm)
        if self._sliding_window is not None:
            attention = replace(attention, sliding_window=self._sliding_window)
        q = k.rope_and_store(qkv, pool, self._index, rope)  # [T, H, D]
        hidden = self._o(k.paged_attention(q, pool, self._index, attention))  # [T, E]
        gate_up = self._gate_up(k.add_rms_norm(hidden, residual, self._post_norm, self._eps))  # [T, 2 F]
        return self._down(k.silu_mul(gate_up))


class DecoderModel:
    def __init__(self, config: ModelConfig, load: LayerLoader, max_model_len: int) -> None:
        load.checkpoint.check(expected_tensors(config), ignored_tensors(config))
        self._config = config
        self._kernels = load.kernels
        self._embed = load.vocabulary_embedding("model.embed_tokens")
        self._layers = [DecoderLayer(config, i, load) for i in range(config.num_layers)]
        self._norm = load.norm("model.norm")
        self._head = load.vocabulary_head("model.embed_tokens" if config.tie_word_embeddings else "lm_head")
        self._cos_sin = cos_sin_table(config.rope, config.head_dim, max_model_len).to(load.device)

    def forward(self, token_ids: Tensor, metadata: AttentionMetadata, pool: Tensor, rows: Tensor | None) -> Tensor:
        """Runs the batch, writing its keys and values to ``pool``; final hidden states of the token rows ``rows`` (int64; None: all)."""
        residual = self._embed(token_ids)
        hidden = residual.new_zeros(residual.shape)
        rope, attention = self._inputs(metadata)
        for layer in self._layers:
            hidden = layer.forward(hidden, residual, pool, rope, attention)
        if rows is not None:
            hidden, residual = hidden[rows], residual[rows]
        return self._kernels.add_rms_norm(hidden, residual, self._norm, self._config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Final hidden states [n, E] -> float32 [n, V]."""
        return self._head(hidden).float()

    def _inputs(self, metadata: AttentionMetadata) -> tuple[RopeInputs, AttentionInputs]:
        c = self._config
        rope = RopeInputs(
            metadata.positions, metadata.slot_mapping, self._cos_sin, c.num_heads, c.num_kv_heads, c.head_dim, norm_eps=c.rms_norm_eps
        )
        attention = AttentionInputs(metadata.query_start_loc, metadata.seq_lens, metadata.block_tables, scale=c.head_dim**-0.5)
        return rope, attention


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor of the checkpoint with its shape."""
    c = config
    expected: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (c.vocab_size, c.hidden_size),
        "model.norm.weight": (c.hidden_size,),
    }
    if not c.tie_word_embeddings:
        expected["lm_head.weight"] = (c.vocab_size, c.hidden_size)
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    projections = (
        ("self_attn.q_proj", q_size, c.hidden_size, c.qkv_bias),
        ("self_attn.k_proj", kv_size, c.hidden_size, c.qkv_bias),
        ("self_attn.v_proj", kv_size, c.hidden_size, c.qkv_bias),
        ("self_attn.o_proj", c.hidden_size, q_size, c.o_bias),
        ("mlp.gate_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
        ("mlp.up_proj", c.intermediate_size, c.hidden_size, c.mlp_bias),
        ("mlp.down_proj", c.hidden_size, c.intermediate_size, c.mlp_bias),
    )
    norms = [("input_layernorm", c.hidden_size), ("post_attention_layernorm", c.hidden_size)]
    if c.qk_norm:
        norms += [("self_attn.q_norm", c.head_dim), ("self_attn.k_norm", c.head_dim)]
    for i in range(c.num_layers):
        expected |= {f"model.layers.{i}.{name}.weight": (size,) for name, size in norms}
        expected |= {f"model.layers.{i}.{name}.weight": (rows, columns) for name, rows, columns, _ in projections}
        expected |= {f"model.layers.{i}.{name}.bias": (rows,) for name, rows, _, bias in projections if bias}
    return expected


def ignored_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Names that a checkpoint may hold beside the expected ones."""
    return (*IGNORED_TENSORS, "lm_head.weight") if config.tie_word_embeddings else IGNORED_TENSORS
