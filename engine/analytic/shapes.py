"""A model's shape, from the fields of its ``config.json``: how many weights a step reads, how many FLOPs a
token costs, and how many bytes it leaves in the KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..model.mixture_config import usual_terms
from ..model.sparse_config import index_config


@dataclass(frozen=True, slots=True)
class Shape:
    """Numbers of one layer are means over all layers.

    ``dense``: weights of a layer that every token uses, attention included; ``expert``: weights of one routed
    expert; ``experts``: routed experts of a layer; ``active``: those that a token uses; ``head``: weights of
    the output head; ``pair_flops``: FLOPs of a layer's attention for a pair of a new token and one that it
    attends to; ``token_kv``: elements that a token leaves in a layer's KV cache, on ``kv_heads`` shards at
    most; ``attended``: share of the layers that attend to all tokens, without a window; ``expert_bits``: bits
    of an expert's weight, 0 where they are as the others; ``chosen``: tokens that sparse attention attends
    to, 0: to all; ``index_flops``, ``index_kv``: as ``pair_flops`` and ``token_kv``, of its index alone;
    ``indexed``: share of the layers that have one; ``exchanges``: between ranks in a
    layer, beside the two sums."""

    layers: int
    hidden: int
    dense: float
    expert: float
    experts: int
    active: int
    head: float
    embedding: float
    pair_flops: float
    token_kv: int
    kv_heads: int
    attended: float
    max_model_len: int
    expert_bits: float = 0.0
    chosen: int = 0
    index_flops: float = 0.0
    index_kv: int = 0
    indexed: float = 0.0
    exchanges: int = 0

    @property
    def weights(self) -> float:
        """All weights, embeddings included."""
        return self.layers * (self.dense + self.experts * self.expert) + self.head + self.embedding

    def expert_share(self, tokens: float) -> float:
        """Expected number of distinct experts of a layer that ``tokens`` tokens use, over all of them."""
        return 1.0 - (1.0 - self.active / self.experts) ** tokens if self.experts else 0.0


RECURRENT = ("linear_num_value_heads", "conv_L_cache", "attn_layer_indices", "hybrid_override_pattern")
"""Keys of models with recurrent layers; some have their kinds instead."""


def shape_of(config: Mapping[str, Any]) -> Shape:
    """Read the shape from ``config.json``. Raises KeyError where a field is missing, ValueError where layers
    keep a state in place of keys and values."""
    config, whole = config.get("text_config", config), config
    kinds = config.get("layer_types") or config.get("layers_block_type") or ()
    if any(map(config.get, RECURRENT)) or {"linear_attention", "conv", "mamba"} & {*kinds}:
        raise ValueError(
            "a model with recurrent layers cannot be planned for yet: the planner knows no memory that a "
            "sequence takes however long it is"
        )
    layers, hidden, heads = (config[n] for n in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    config = usual_terms(config, layers)
    dense_mlp = (3 if config.get("gated", True) else 2) * hidden * config.get("intermediate_size", 0)
    experts = (
        config.get("num_local_experts") or config.get("num_experts") or config.get("n_routed_experts") or 0
    )
    width = config.get("moe_intermediate_size") or config.get("intermediate_size", 0)
    expert = 3 * hidden * width if experts else 0
    step = config.get("decoder_sparse_step", 1)
    without = config.get("mlp_only_layers") or range(config.get("first_k_dense_replace", 0))
    moe_layers = sum((i + 1) % step == 0 and i not in without for i in range(layers)) if experts else 0
    shared = (config.get("n_shared_experts") or 0) * expert
    shared_widths = ("shared_expert_intermediate_size", "shared_intermediate_size")
    shared += 3 * hidden * sum(config.get(key) or 0 for key in shared_widths)
    every_token = moe_layers * (shared + experts * hidden)
    beside = bool(config.get("enable_moe_block"))  # Gemma 4: layers with experts have a dense MLP, too
    every_token += (layers if beside else layers - moe_layers) * dense_mlp
    attention, pair_flops, token_kv, kv_heads = _attention(config, hidden, heads)
    tied = bool(config.get("tie_word_embeddings") or whole.get("tie_word_embeddings"))
    table = config["vocab_size"] * hidden
    kinds = config.get("layer_types") or ["full_attention"]
    attended = sum(kind in ("full_attention", "indexed_attention") for kind in kinds) / len(kinds)
    index = index_config({**config})
    indexed = 0.0 if index is None else sum(index.layers) / layers
    if index is not None:
        attention += indexed * sum(math.prod(of) for of in index.matrices(hidden, config["q_lora_rank"]))
        token_kv += index.head_dim
    bits = 4.25 if config.get("quantization_config", {}).get("quant_method") == "mxfp4" else 0.0
    return Shape(
        layers=layers,
        hidden=hidden,
        dense=attention + every_token / layers,
        expert=expert * moe_layers / layers,
        experts=experts,
        active=config.get("num_experts_per_tok", config.get("experts_per_token", 0)) if experts else 0,
        head=table,
        embedding=0 if tied else table,
        pair_flops=pair_flops,
        token_kv=token_kv,
        kv_heads=kv_heads if index is None else 1,  # every rank has all blocks, to choose among them
        attended=attended,
        max_model_len=config.get("max_position_embeddings", 4096),
        expert_bits=bits,
        chosen=0 if index is None else index.chosen,
        index_flops=0 if index is None else 2 * index.num_heads * index.head_dim,
        index_kv=0 if index is None else index.head_dim,
        indexed=indexed,
        exchanges=2 if config.get("kv_lora_rank") and index is None else 0,  # queries and sums
    )


def _attention(config: Mapping[str, Any], hidden: int, heads: int) -> tuple[float, float, int, int]:
    """Return a layer's weights of attention, FLOPs of a pair, cached elements of a token, and the number of
    ranks that can share these."""
    if latent := config.get("kv_lora_rank"):
        rope, nope, value = (config[n] for n in ("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"))
        query = config.get("q_lora_rank")
        queries = heads * (nope + rope)
        weights = hidden * query + query * queries if query else hidden * queries
        weights += hidden * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden
        return weights, 2 * heads * (nope + rope + value), latent + rope, heads
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    return 2 * hidden * (heads + kv_heads) * size, 4 * heads * size, 2 * kv_heads * size, kv_heads
