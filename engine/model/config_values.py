"""Numbers of a config.json, checked. Free of torch."""

from __future__ import annotations

from typing import Any

from ..errors import ModelConfigError

LARGEST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "num_hidden_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 1024,
    "max_position_embeddings": 1 << 24,
    "sliding_window": 1 << 24,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "num_experts_per_tok": 1 << 10,
    "n_routed_experts": 1 << 14,
    "n_group": 1 << 14,
    "topk_group": 1 << 14,
    "moe_intermediate_size": 1 << 22,
    "shared_expert_intermediate_size": 1 << 22,
    "decoder_sparse_step": 1024,
    "q_lora_rank": 1 << 17,
    "kv_lora_rank": 1 << 13,
    "qk_nope_head_dim": 1024,
    "qk_rope_head_dim": 1024,
    "v_head_dim": 1024,
}
"""Several times those of any model: what a config.json claims is believed no further, before its weights bear
it out."""


def positive_int(config: dict[str, Any], key: str, default: int | None = None) -> int:
    """Raises ModelConfigError where the value is no whole number from 1 to ``LARGEST``. ``default``: where
    there is none."""
    value = config.get(key) if default is None else config.get(key) or default
    if type(value) is not int or value < 1:
        raise ModelConfigError(f"config.json: {key!r} must be a positive whole number, found {value!r:.100}")
    if value > LARGEST[key]:
        raise ModelConfigError(
            f"config.json: {key!r} is {value}; the largest that is served is {LARGEST[key]}"
        )
    return value
