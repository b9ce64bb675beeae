"""A model's rotary parameters, as config.json gives them. Free of torch: what may be served is checked before
a worker starts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..errors import ModelConfigError

MOST = 1e12
LONGEST = 1 << 24  # tokens
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotary parameters of one model. Fields that a type does not use keep their defaults."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float = 1.0  # yarn: multiplies cosines and sines


def rope_config(config: dict[str, Any]) -> RopeConfig:
    """From config.json: ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (older
    files)."""
    parameters: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelConfigError("config.json: partial_rotary_factor other than 1.0 is not supported")
    theta = _positive("rope_theta", parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind not in ROPE_TYPES:
        raise ModelConfigError(
            f"config.json: rope type {kind!r} is not supported (supported: {', '.join(ROPE_TYPES)})"
        )
    if kind == "default":
        return RopeConfig(theta=theta)
    if "factor" not in parameters:
        raise ModelConfigError(f"config.json: rope type {kind!r} needs 'factor' among its rope parameters")
    factor = _positive("factor", parameters["factor"])
    original = int(parameters.get("original_max_position_embeddings") or config["max_position_embeddings"])
    return RopeConfig(
        type=kind,
        theta=theta,
        factor=factor,
        original_max_position_embeddings=original,
        low_freq_factor=float(parameters.get("low_freq_factor", 1.0)),
        high_freq_factor=float(parameters.get("high_freq_factor", 4.0)),
        beta_fast=float(parameters.get("beta_fast") or 32.0),
        beta_slow=float(parameters.get("beta_slow") or 1.0),
        attention_factor=_yarn_attention_factor(parameters, factor) if kind == "yarn" else 1.0,
    )


def _positive(name: str, value: Any) -> float:
    if not isinstance(value, int | float) or not 0 < value < MOST:
        raise ModelConfigError(
            f"config.json: {name!r} of the rope parameters must be above 0 and below {MOST:g}, found "
            f"{value!r:.100}"
        )
    return float(value)


def rope_max_model_len(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The longest sequence the rotary parameters are good for.

    ``dynamic`` changes the frequencies once a sequence outgrows the trained length, and with them the keys
    that are already cached (and shared between requests): it is served up to the trained length only.
    """
    if rope.type == "yarn":
        return min(
            LONGEST, max(max_position_embeddings, int(rope.factor * rope.original_max_position_embeddings))
        )
    return max_position_embeddings


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    """YaRN section 3.4: 0.1 ln(factor) + 1, unless the file gives it."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    if parameters.get("mscale") or parameters.get("mscale_all_dim") or not parameters.get("truncate", True):
        raise ModelConfigError(
            "config.json: yarn with mscale, mscale_all_dim or truncate=false is not supported"
        )
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
