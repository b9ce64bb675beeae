"""Rotary position embedding: its parameters and its table of cosines and sines.

angle(position, i) = position * inverse_frequency[i], i < head_dim / 2. The pair (x[i], x[i + head_dim / 2])
is turned by that angle ("half-split" layout, as in Hugging Face checkpoints). Su et al., RoFormer, 2021.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .rope_config import RopeConfig


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
    angles = torch.outer(
        torch.arange(max_model_len, dtype=torch.float32), inverse_frequencies(rope, head_dim)
    )
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_factor


def _llama3(frequencies: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1: long wavelengths are stretched by ``factor``, short ones kept, those between
    interpolated."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position_embeddings / wavelengths
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn(rope: RopeConfig, head_dim: int, wavelength_units: Tensor) -> Tensor:
    """Peng et al., YaRN, 2023, section 3.2: interpolate the dimensions that turn fewer than ``beta_slow``
    times."""

    def dimension_with_turns(turns: float) -> float:
        length = rope.original_max_position_embeddings
        return head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(dimension_with_turns(rope.beta_fast)), 0)
    high = min(math.ceil(dimension_with_turns(rope.beta_slow)), head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0.0, 1.0)
    return interpolated / (rope.factor * wavelength_units) + (1 - interpolated) / wavelength_units
