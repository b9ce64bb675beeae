"""Heads of layers that attend to all tokens where they are fewer and larger than those of layers with windows
(Gemma 4). Free of torch.

All layers have one layout in the cache, that of the others: each such head lies where the heads begin whose
place it takes, and leaves the rest of it empty. So a head's bytes lie in the same place of a block however
many ranks share the heads, and blocks move between them as those of any model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import ModelConfigError
from .config_values import positive_int
from .family_rules import Windows


@dataclass(frozen=True, slots=True)
class FullHeads:
    """keys_are_values: a head's value is its key before norm and rope, and has no weights of its own."""

    num_kv_heads: int
    head_dim: int
    keys_are_values: bool

    def of_rank(self, num_ranks: int) -> FullHeads:
        return replace(self, num_kv_heads=self.num_kv_heads // num_ranks)


def full_heads(config: dict[str, Any], windows: Windows, num_kv_heads: int, head_dim: int) -> FullHeads:
    """From ``global_head_dim`` and the keys beside it, or from ``per_layer_config`` (transformers 5). Raises
    ModelConfigError where the cache has no room for them."""
    same = bool(config.get("attention_k_eq_v"))
    given = {
        "head_dim": config.get("global_head_dim") or 512,
        "num_key_value_heads": (config.get("num_global_key_value_heads") if same else None) or num_kv_heads,
    }
    if (by_layer := config.get("per_layer_config")) is not None:
        full = [str(i) for i, window in enumerate(windows) if window is None]
        usual = {"head_dim": head_dim, "num_key_value_heads": num_kv_heads}
        found = [{**usual, **by_layer.get(i, {})} for i in full]
        if not set(by_layer) <= set(full) or any(of != found[0] for of in found):
            raise ModelConfigError(
                "config.json: per_layer_config must be of the layers of full attention, with the same values"
            )
        given = found[0] if found else usual
    heads = FullHeads(positive_int(given, "num_key_value_heads"), positive_int(given, "head_dim"), same)
    places = num_kv_heads / heads.num_kv_heads * head_dim / heads.head_dim
    if places < 1 or places % 1 or num_kv_heads % heads.num_kv_heads or heads.head_dim % 8:
        raise ModelConfigError(
            f"config.json: layers of full attention with {heads.num_kv_heads} key-value heads of "
            f"{heads.head_dim} numbers beside others with {num_kv_heads} of {head_dim} are not built"
        )
    return heads
