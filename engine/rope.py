"""Rotary position embedding: its parameters and its table of cosines and sines.

angle(position, i) = position * inverse_frequency[i], i < head_dim / 2. The pair (x[i], x[i + head_dim / 2]) is turned by
that angle ("half-split" layout, as in Hugging Face checkpoints). Su et al., RoFormer, 2021.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import ModelConfigError

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
    """From config.json: ``rope_parameters`` (transformers 5), or ``rope_theta`` and ``rope_scaling`` (older files)."""
    parameters: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if config.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelConfigError("config.json: partial_rotary_factor other than 1.0 is not supported")
    theta = float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = str(parameters.get("rope_type", parameters.get("type", "default")))
    if kind not in ROPE_TYPES:
        raise ModelConfigError(f"config.json: rope type {kind!r} is not supported (supported: {', '.join(ROPE_TYPES)})")
    if kind == "default":
        return RopeConfig(theta=theta)
    if "factor" not in parameters:
        raise ModelConfigError(f"config.json: rope type {kind!r} needs 'factor' among its rope parameters")
    factor = float(parameters["factor"])
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


def rope_max_model_len(rope: RopeConfig, max_position_embeddings: int) -> int:
    """The longest sequence the rotary parameters are good for.

    ``dynamic`` changes the frequencies once a sequence outgrows the trained length, and with them the keys that are
    already cached (and shared between requests): it is served up to the trained length only.
    """
    if rope.type == "yarn":
        return max(max_position_embeddings, int(rope.factor * rope.original_max_position_embeddings))
    return max_position_embeddings


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "linear":
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "yarn":
        return _yarn(rope, head_dim, rope.theta**exponents)
    return frequencies


def cos_sin_table(rope: RopeConfig, head_dim: int, max_model_len: int) -> Tensor:
    """float32 [max_model_len, head_dim]: the cosines of a position's angles, then their sines."""
    angles = torch.outer(torch.arange(max_model_len, dtype=torch.float32), inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_factor


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelengths
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: RopeConfig, head_dim: int, wavelength_units: Tensor) -> Tensor:
    """Peng et al., YaRN, 2023, section 3.2: interpolate the dimensions that turn fewer than ``beta_slow`` times."""

    def dimension_with_turns(turns: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_with_turns(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_with_turns(rope.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0.0, 1.0)
    return interpolated / (rope.factor * wavelength_units) + (1 - interpolated) / wavelength_units


def _yarn_attention_factor(parameters: dict[str, Any], factor: float) -> float:
    """YaRN section 3.4: 0.1 ln(factor) + 1, unless the file gives it."""
    given = parameters.get("attention_factor")
    if given is not None:
        return float(given)
    if parameters.get("mscale") or parameters.get("mscale_all_dim") or not parameters.get("truncate", True):
        raise ModelConfigError("config.json: yarn with mscale, mscale_all_dim or truncate=false is not supported")
    return 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
