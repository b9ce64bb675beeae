"""The tensors that a checkpoint of the Llama family has, by its config.json. Free of torch."""

from __future__ import annotations

import math

from .config import ModelConfig

IGNORED_TENSORS = (".rotary_emb.inv_freq", ".self_attn.k_scale", ".self_attn.v_scale")
"""The first is in old checkpoints, and computed from the configuration instead; the others are for a float8
KV cache alone."""


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
        expected |= {
            f"model.layers.{i}.{name}.weight": (rows, columns) for name, rows, columns, _ in projections
        }
        expected |= {f"model.layers.{i}.{name}.bias": (rows,) for name, rows, _, bias in projections if bias}
    return expected


def ignored_tensors(config: ModelConfig) -> tuple[str, ...]:
    """Names that a checkpoint may hold beside the expected ones."""
    return (*IGNORED_TENSORS, "lm_head.weight") if config.tie_word_embeddings else IGNORED_TENSORS


def weight_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of all weights, at ``itemsize`` bytes an element."""
    return itemsize * sum(math.prod(shape) for shape in expected_tensors(config).values())
