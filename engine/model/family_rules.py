"""How families read windows and factors out of config.json (``families.py``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..errors import ModelConfigError
from .config_values import positive_int
from .rope_config import yarn_factor

Windows = tuple[int | None, ...]
"""By layer, in tokens; None: full attention."""
FULL, SLIDING = "full_attention", "sliding_attention"


def full_attention(config: dict[str, Any], num_layers: int) -> Windows:
    """No layer has a window, or those that ``layer_types`` names."""
    return _windows_of(config, num_layers, [FULL] * num_layers)


def indexed_attention(config: dict[str, Any], num_layers: int) -> Windows:
    """As ``full_attention``: transformers has another name for layers whose attention is sparse."""
    kinds = [FULL if kind == "indexed_attention" else kind for kind in config.get("layer_types") or ()]
    return full_attention({**config, "layer_types": kinds}, num_layers)


def no_windows(config: dict[str, Any], num_layers: int) -> Windows:
    """Raises ModelConfigError where there are some."""
    if config.get("use_sliding_window"):
        raise ModelConfigError("config.json: windows of this family (use_sliding_window) are not built")
    return (None,) * num_layers


def same_window(config: dict[str, Any], num_layers: int) -> Windows:
    """Every layer has the window ``sliding_window``, or those that ``layer_types`` names; or none."""
    kind = SLIDING if config.get("sliding_window") else FULL
    return _windows_of(config, num_layers, [kind] * num_layers)


def window_if_used(config: dict[str, Any], num_layers: int) -> Windows:
    """Every layer has the window ``sliding_window`` where ``use_sliding_window`` is set."""
    used = config.get("use_sliding_window", False)
    return same_window(config, num_layers) if used else (None,) * num_layers


def windows_by_pattern(config: dict[str, Any], num_layers: int) -> Windows:
    """The layers that ``layer_types`` names; in older files, all but each ``sliding_window_pattern``-th."""
    pattern = 1 if config.get("layer_types") else int(config["sliding_window_pattern"])
    kinds = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(num_layers)]
    return _windows_of(config, num_layers, kinds)


def windows_before_last(config: dict[str, Any], num_layers: int) -> Windows:
    """As ``windows_by_pattern``, but the last layer attends to all tokens, whatever it is called."""
    return (*windows_by_pattern(config, num_layers)[:-1], None)


def windows_by_pattern_if_any(config: dict[str, Any], num_layers: int) -> Windows:
    """As ``windows_by_pattern``, or none where ``sliding_window`` is null; a pattern in letters is not read:
    ``layer_types`` stands beside it."""
    if not config.get("sliding_window"):
        return (None,) * num_layers
    if config.get("layer_types"):
        return _windows_of(config, num_layers, [])
    return windows_by_pattern(config, num_layers)


def windows_behind_full(config: dict[str, Any], num_layers: int) -> Windows:
    """The layers that ``layer_types`` names; else all but each first of four."""
    return _windows_of(config, num_layers, [SLIDING if i % 4 else FULL for i in range(num_layers)])


def windows_by_layer(config: dict[str, Any], num_layers: int) -> Windows:
    """Where ``use_sliding_window`` is set: the layers that ``layer_types`` names; in older files, those from
    ``max_window_layers`` up."""
    if not config.get("sliding_window") or not config.get("use_sliding_window", False):
        return (None,) * num_layers
    first = int(config.get("max_window_layers", 28))
    return _windows_of(config, num_layers, [SLIDING if i >= first else FULL for i in range(num_layers)])


def recurrent_layers(config: dict[str, Any], num_layers: int, kind: str) -> tuple[bool, ...]:
    """Which layers are of this kind in ``layer_types``; else all but each ``full_attention_interval``-th.
    Raises ModelConfigError where there is another kind, or no layer with attention."""
    every = positive_int(config, "full_attention_interval", 4)
    kinds = config.get("layer_types") or [FULL if (i + 1) % every == 0 else kind for i in range(num_layers)]
    if len(kinds) != num_layers or not {FULL} <= set(kinds) <= {FULL, kind}:
        raise ModelConfigError(
            f"config.json: layer_types must name {num_layers} layers, each {kind} or {FULL}, and one or more "
            f"{FULL}, where the states of the others are kept; found {len(kinds)} with "
            f"{', '.join(sorted(map(str, set(kinds))))}"
        )
    return tuple(each == kind for each in kinds)


def _windows_of(config: dict[str, Any], num_layers: int, kinds: list[str]) -> Windows:
    """``kinds``: of the layers, where ``layer_types`` does not name them."""
    kinds = config.get("layer_types") or kinds
    unknown = set(kinds) - {FULL, SLIDING}
    if unknown or len(kinds) != num_layers:
        raise ModelConfigError(
            f"config.json: layer_types must name {num_layers} layers, each full_attention or "
            f"sliding_attention; found {len(kinds)} with {', '.join(sorted(set(kinds)))}"
        )
    window = positive_int(config, "sliding_window") if SLIDING in kinds else None
    return tuple(window if kind == SLIDING else None for kind in kinds)


@dataclass(frozen=True, slots=True)
class Scales:
    """Factors beside the weights.

    residual          of the outputs of attention and MLP, before they are added to the residual
    rounds_embedding  the embedding's factor is rounded to the model's dtype first
    """

    attention: float
    embedding: float = 1.0
    residual: float = 1.0
    logits: float = 1.0
    rounds_embedding: bool = False


def plain_scales(config: dict[str, Any], head_dim: int) -> Scales:
    return Scales(head_dim**-0.5)


def granite_scales(config: dict[str, Any], head_dim: int) -> Scales:
    """Raises ModelConfigError where a factor is 0 or null."""
    for name in ("attention_multiplier", "residual_multiplier", "logits_scaling"):
        if not config.get(name, 1.0):
            raise ModelConfigError(f"config.json: {name!r} must be a number above 0, found {config[name]}")
    return Scales(
        attention=float(config.get("attention_multiplier", 1.0)),
        embedding=float(config.get("embedding_multiplier", 1.0)),
        residual=float(config.get("residual_multiplier", 1.0)),
        logits=1.0 / float(config.get("logits_scaling", 1.0)),
    )


def hyperclovax_scales(config: dict[str, Any], head_dim: int) -> Scales:
    """Granite's, but the logits are multiplied, and ``attention_multiplier`` may be left out or null."""
    attention, logits = config.get("attention_multiplier"), float(config.get("logits_scaling", 1.0))
    given = {**config, "attention_multiplier": head_dim**-0.5 if attention is None else attention}
    return replace(granite_scales(given, head_dim), logits=logits)


def cohere_scales(config: dict[str, Any], head_dim: int) -> Scales:
    return Scales(head_dim**-0.5, logits=float(config["logit_scale"]))


def deepseek_scales(config: dict[str, Any], head_dim: int) -> Scales:
    """YaRN's factor of the scores is squared: one for queries, one for keys."""
    rope = {**(config.get("rope_parameters") or {}), **(config.get("rope_scaling") or {})}
    size, share = (
        int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"]),
        rope.get("mscale_all_dim"),
    )
    return Scales(size**-0.5 * (yarn_factor(float(rope["factor"]), float(share)) ** 2 if share else 1.0))


def gemma_4_scales(config: dict[str, Any], head_dim: int) -> Scales:
    return Scales(1.0, embedding=float(config["hidden_size"]) ** 0.5, rounds_embedding=True)


def gemma_scales(config: dict[str, Any], head_dim: int) -> Scales:
    return Scales(
        attention=float(config["query_pre_attn_scalar"]) ** -0.5,
        embedding=float(config["hidden_size"]) ** 0.5,
        rounds_embedding=True,
    )
