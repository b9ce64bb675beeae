"""The model families that are served: one entry each, by the architecture that config.json names.

An entry describes how its config.json is read and how its checkpoint names the tensors. Families share the
decoder (``decoder.py``) and differ in these fields only. To add one, add an entry, and a small model of it to
the comparison with transformers in tests/engine/model/test_transformers_parity.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ModelConfigError

Windows = tuple[int | None, ...]
"""By layer, in tokens; None: full attention."""


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names in the checkpoint, without ``.weight`` and ``.bias``. The layer's are within ``layer``."""

    embed: str = "model.embed_tokens"
    layer: str = "model.layers.{}"
    input_norm: str = "input_layernorm"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    post_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    norm: str = "model.norm"
    head: str = "lm_head"
    kv_scales: tuple[str, str] = ("self_attn.k_scale", "self_attn.v_scale")  # of a float8 KV cache
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)  # endings; computed from the configuration instead


def full_attention(config: dict[str, Any], num_layers: int) -> Windows:
    return (None,) * num_layers


def same_window(config: dict[str, Any], num_layers: int) -> Windows:
    """Every layer has the window ``sliding_window`` (4096 where config.json lacks it; null: none)."""
    return (int(config.get("sliding_window", 4096) or 0) or None,) * num_layers


def windows_by_layer(config: dict[str, Any], num_layers: int) -> Windows:
    """Where ``use_sliding_window`` is set: the layers that ``layer_types`` names; in older files, those from
    ``max_window_layers`` up."""
    if not config.get("sliding_window") or not config.get("use_sliding_window", False):
        return (None,) * num_layers
    window = int(config["sliding_window"])
    kinds = config.get("layer_types")
    if kinds is None:
        first = int(config.get("max_window_layers", 28))
        return tuple(window if i >= first else None for i in range(num_layers))
    unknown = set(kinds) - {"full_attention", "sliding_attention"}
    if unknown or len(kinds) != num_layers:
        raise ModelConfigError(
            f"config.json: layer_types must name {num_layers} layers, each full_attention or "
            f"sliding_attention; found {len(kinds)} with {', '.join(sorted(set(kinds)))}"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


@dataclass(frozen=True, slots=True)
class Family:
    """A bias is there always (True), never (False), or where config.json sets the key that is named."""

    qkv_bias: bool | str = "attention_bias"
    o_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    head_dim: int | None = None  # where config.json has none; None: hidden_size / num_attention_heads
    windows: Callable[[dict[str, Any], int], Windows] = full_attention
    tensors: TensorNames = TensorNames()


FAMILIES = {
    "LlamaForCausalLM": Family(o_bias="attention_bias", mlp_bias="mlp_bias"),
    "MistralForCausalLM": Family(windows=same_window),
    "Qwen2ForCausalLM": Family(qkv_bias=True, windows=windows_by_layer),
    "Qwen3ForCausalLM": Family(o_bias="attention_bias", qk_norm=True, head_dim=128, windows=windows_by_layer),
}
