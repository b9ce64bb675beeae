"""Rotary position embedding: its parameters and its table of cosines and sines.

angle(position, i) = position * inverse_frequency[i], i < head_dim / 2. The pair (x[i], x[i + head_dim / 2])
is turned by that angle. Su et al., RoFormer, 2021. Where a checkpoint pairs other numbers, or rotates a part
of a head only, the rows of its q and k are put in that order as they are loaded (``head_order``): attention
sums over a head, in whatever order, and pairs that are not rotated have the angle 0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .ranks import ALONE, Rank
from .rope_config import RopeConfig


def head_order(rope: RopeConfig, head_dim: int) -> list[int]:
    """Return which of the checkpoint's numbers of a head is at each place of ours."""
    rotated, rest = rope.rotary_dim // 2, (head_dim - rope.rotary_dim) // 2
    first, second = range(rotated), range(rotated, 2 * rotated)
    if rope.interleaved:
        first, second = range(0, 2 * rotated, 2), range(1, 2 * rotated, 2)
    left = range(2 * rotated, head_dim)
    return [*first, *left[:rest], *second, *left[rest:]]


def rows_of_qkv(
    rope: RopeConfig,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    rank: Rank = ALONE,
    keys_are_values: bool = False,
    gated: bool = False,
) -> Tensor | None:
    """Return which row of the checkpoint's q, k and v is at each place of ours: int64 [outputs]; None: all in
    order. ``keys_are_values``: the checkpoint has no rows of v. ``gated``: behind the rows of each head of q
    it has as many of the gate, which are not among ours."""
    order = head_order(rope, head_dim)
    if order == sorted(order) and rank.size == 1 and not (keys_are_values or gated):
        return None
    rows = torch.arange(((1 + gated) * num_heads + 2 * num_kv_heads) * head_dim).view(-1, head_dim)
    if gated:
        rows = torch.cat((rows[: 2 * num_heads : 2], rows[2 * num_heads :]))
    if keys_are_values:
        rows[num_heads + num_kv_heads :] = rows[num_heads : num_heads + num_kv_heads]
    rows[: num_heads + num_kv_heads] = rows[: num_heads + num_kv_heads, order]
    own, k, v = rank.kv_heads(num_kv_heads), rows[num_heads:], rows[num_heads + num_kv_heads :]
    return torch.cat((rows[rank.part(num_heads)], k[own], v[own])).flatten()


def rows_of_gates(head_dim: int, num_heads: int, rank: Rank) -> Tensor:
    """Return which rows of the checkpoint's q are those of the gates: int64 [outputs]."""
    rows = torch.arange(2 * num_heads * head_dim).view(num_heads, 2, head_dim)
    return rows[rank.part(num_heads), 1].flatten()


def rows_side_by_side(head_dim: int, num_heads: int, num_kv_heads: int) -> Tensor:
    """Return which of transformers' rows of q, k and v, which are an adapter's, is at each place of a GGUF
    file in which the two numbers lie side by side that transformers has half a head apart: int64."""
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim).view(-1, head_dim)
    turned = rows[: num_heads + num_kv_heads]
    turned.copy_(turned.view(-1, 2, head_dim // 2).transpose(1, 2).flatten(1).clone())
    return rows.flatten()


def inverse_frequencies(rope: RopeConfig) -> Tensor:
    """float32 [rotary_dim / 2]."""
    head_dim = rope.rotary_dim
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.type == "proportional":
        frequencies[rope.turned :] = 0.0
    if rope.type in ("linear", "proportional"):
        return frequencies / rope.factor
    if rope.type == "llama3":
        return _llama3(frequencies, rope)
    if rope.type == "longrope":
        return frequencies / torch.tensor(rope.long_factors)
    if rope.type == "yarn":
        return _yarn(rope, head_dim, rope.theta**exponents)
    return frequencies


def cos_sin_table(rope: RopeConfig, head_dim: int, max_model_len: int) -> Tensor:
    """float32 [max_model_len, head_dim]: the cosines of a position's angles, then their sines."""
    cos, sin = torch.ones(max_model_len, head_dim // 2), torch.zeros(max_model_len, head_dim // 2)
    if rotated := rope.rotary_dim // 2:
        positions = torch.arange(max_model_len, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope))
        cos[:, :rotated] = angles.cos() * rope.attention_factor
        sin[:, :rotated] = angles.sin() * rope.attention_factor
    return torch.cat((cos, sin), dim=1)


def rows_of_axes(table: Tensor, rope: RopeConfig, positions: Tensor) -> Tensor:
    """float32 [n, head_dim]: ``cos_sin_table``'s row of each token, each pair's angle by the position on its
    axis. ``positions`` int32 [3, n]: see ``rope_positions``."""
    rows = table[positions[0]]
    half = table.shape[1] // 2
    axes = torch.tensor(rope.axes + (0,) * (half - len(rope.axes)), device=table.device).repeat(2)
    for axis in (1, 2):
        rows = torch.where(axes == axis, table[positions[axis]], rows)
    return rows


def query_factors(rope: RopeConfig, max_model_len: int) -> Tensor | None:
    """float32 [max_model_len], by position: 1 + beta ln(1 + floor(position / original length)); None: all
    are 1."""
    if not rope.query_beta or max_model_len <= rope.original_max_position_embeddings:
        return None
    lengths = torch.arange(max_model_len) // rope.original_max_position_embeddings
    return 1 + rope.query_beta * torch.log1p(lengths.float())


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

    low, high = dimension_with_turns(rope.beta_fast), dimension_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    interpolated = ramp.clamp(0.0, 1.0)
    return interpolated / (rope.factor * wavelength_units) + (1 - interpolated) / wavelength_units
