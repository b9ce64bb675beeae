"""Seeded inputs for the kernels, poisoned where they must not look, and one measure of error: shared by their
tests and gpu_check."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ...kernels.interface import AttentionInputs
from ...kernels.mixture_shape import MixtureShape, num_inputs
from ...kernels.mixture_weights import ExpertWeights, MixtureWeights
from ...kernels.quantised import QuantisedWeight
from ...kernels.reference import quantize_e4m3

NUM_LAYERS = 2
LAYER = 1
NO_BLOCK = -(1 << 30)


def randn(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of ``expected``; not finite if ``found`` is not."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} is not {tuple(expected.shape)}"
    difference, size = (found.double() - expected.double()).norm(), expected.double().norm()
    return float(difference / size) if size > 0 else float(difference)


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """One call of ``paged_attention``. ``exact``: the reference's answer in float64 [num_tokens, num_heads *
    head_dim]."""

    q: Tensor
    pool: Tensor
    inputs: AttentionInputs
    exact: Tensor


def attention_case(
    lengths: Sequence[int],
    queries: Sequence[int],
    *,
    group: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    window: int | None = None,
    softcap: float = 0.0,
    sinks: bool = False,
    fp8: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> AttentionCase:
    """Sequences of ``lengths`` cached tokens whose last ``queries`` tokens ask. Slots of no token and the
    guard blocks are NaN, table entries past a sequence's end are nonsense, q is a slice of a wider row as in
    qkv."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + 2
    order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(seed))
    exact_pool = torch.full(
        (num_blocks, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim), torch.nan, dtype=torch.float32
    )
    tables = torch.full((len(lengths), max([*counts, 1])), NO_BLOCK, dtype=torch.int32)
    taken = 0
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = order[taken : taken + count]
        tables[row, :count] = own.int()
        tokens = randn(length, 2, num_kv_heads, head_dim, seed=seed * 1000 + row + 1)
        for j, block in enumerate(own.tolist()):
            part = tokens[j * block_size : (j + 1) * block_size].permute(1, 2, 0, 3)
            exact_pool[block, LAYER, :, :, : part.shape[2]] = part
        taken += count
    scales = None
    if fp8:
        scales = torch.full((NUM_LAYERS, 2, num_kv_heads), torch.nan)
        scales[LAYER] = 0.01 + 0.02 * torch.rand(
            (2, num_kv_heads), generator=torch.Generator().manual_seed(seed)
        )
        by_token = exact_pool.transpose(3, 4)
        pool = torch.stack([quantize_e4m3(by_token[:, :, i], scales[LAYER, i]) for i in (0, 1)], dim=2)
        pool = pool.transpose(3, 4).contiguous()
    else:
        pool = exact_pool.to(dtype)
    starts = torch.tensor([0, *queries]).cumsum(0).int()
    wide = randn(max(1, int(starts[-1])), (group * num_kv_heads + 3), head_dim, dtype=dtype, seed=seed + 7)
    q = wide[: int(starts[-1]), : group * num_kv_heads]
    lens = torch.tensor(lengths, dtype=torch.int32)
    inputs = AttentionInputs(
        starts.to(device),
        lens.to(device),
        tables.to(device),
        scale=head_dim**-0.5,
        sliding_window=window,
        softcap=softcap,
        kv_scales=None if scales is None else scales.to(device),
        sinks=randn(group * num_kv_heads, device=device, seed=seed + 9) * 3 if sinks else None,
    )
    exact = exact_attention(q, pool, starts, lens, tables, inputs, scales)
    return AttentionCase(wide.to(device)[: len(q), : group * num_kv_heads], pool.to(device), inputs, exact)


def exact_attention(
    q: Tensor,
    pool: Tensor,
    starts: Tensor,
    lens: Tensor,
    tables: Tensor,
    inputs: AttentionInputs,
    scales: Tensor | None,
) -> Tensor:
    """In float64, written for clarity: an independent check of the reference too."""
    num_heads, head_dim = q.shape[1:]
    out = torch.zeros((len(q), num_heads, head_dim), dtype=torch.float64)
    for row, length in enumerate(lens.tolist()):
        first, last = int(starts[row]), int(starts[row + 1])
        cache = (
            pool[tables[row, : -(-length // pool.shape[4])].long(), LAYER]
            .double()
            .permute(1, 2, 0, 3, 4)
            .flatten(2, 3)[:, :, :length]
        )
        if scales is not None:
            cache = cache * scales[LAYER].double()[:, :, None, None]
        keys, values = cache.repeat_interleave(num_heads // pool.shape[3], dim=1)
        scores = torch.einsum("qhd,hkd->hqk", q[first:last].double(), keys) * inputs.scale
        if inputs.softcap:
            scores = inputs.softcap * torch.tanh(scores / inputs.softcap)
        distance = torch.arange(length - (last - first), length)[:, None] - torch.arange(length)
        window = length if inputs.sliding_window is None else inputs.sliding_window
        scores = scores.masked_fill((distance < 0) | (distance >= window), -torch.inf)
        if inputs.sinks is not None:
            sinks = inputs.sinks.double().cpu()[:, None, None].expand(-1, last - first, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        out[first:last] = torch.einsum("hqk,hkd->qhd", weights, values)
    return out.flatten(1)


def quarters(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Products of such add up without rounding: logits, and what is chosen by them, are the same anywhere."""
    return (randn(*shape, seed=seed) * 4).round().to(dtype) / 4


def mixture_weights(
    shape: MixtureShape, dtype: torch.dtype, biases: bool = False, device: str = "cpu"
) -> MixtureWeights:
    hidden, count, inputs = shape.hidden_size, shape.num_experts, num_inputs(shape.activation)

    def expert(i: int) -> ExpertWeights:
        size = shape.intermediate_size if i < count else shape.shared_size
        gate, up, down = (
            (randn(*sizes, seed=3 * i + j) * sizes[1] ** -0.5).to(dtype).to(device)
            for j, sizes in enumerate([(size, hidden), (size, hidden), (hidden, size)])
        )
        return ExpertWeights([gate, up][-inputs:], down)

    router = quarters(count + (shape.shared_size > 0), hidden, dtype=dtype, seed=99).to(device)
    if not biases:
        return MixtureWeights(shape, router, expert)
    sizes = (count, inputs * shape.intermediate_size), (count, hidden)
    own = (randn(*size, dtype=dtype, device=device, seed=7) for size in sizes)
    return MixtureWeights(shape, router, expert, quarters(count, dtype=dtype).to(device), *own)


QUANTISED: dict[str, dict[str, Any]] = {
    "int8": {"bits": 8},
    "int4": {"bits": 4, "group": 32},
    "GPTQ of 4 bits": {"bits": 4, "group": 128, "zeros": True, "order": True},
    "GPTQ of 8 bits": {"bits": 8, "group": 64, "zeros": True},
    "AWQ": {"bits": 4, "group": 64, "zeros": True},
    "float8 in blocks": {"bits": 8, "group": 128, "float8": True},
    "Q4_K": {"bits": 4, "group": 32, "minimums": True},
    "Q6_K": {"bits": 8, "group": 16},
    "W8A8": {"bits": 8, "rounds_x": True},
    "MXFP4": {"bits": 4, "group": 32, "float4": True},
}
"""Forms of quantised weights; ``group``: inputs that share a scale, all of a row where it is left out."""


def quantised_weight(
    rows: int,
    columns: int,
    bits: Literal[4, 8],
    group: int = 0,
    zeros: bool = False,
    order: bool = False,
    float8: bool = False,
    rounds_x: bool = False,
    minimums: bool = False,
    float4: bool = False,
    device: str = "cpu",
    seed: int = 0,
) -> QuantisedWeight:
    """Random codes, float16 scales and zeros."""
    random, group = torch.Generator().manual_seed(seed), group or columns
    groups = -(-columns // group)
    codes = torch.randint(0, 256, (rows, columns if bits == 8 else -(-columns // 2)), generator=random).byte()
    if float8:
        codes = randn(rows, columns, dtype=torch.float8_e4m3fn, seed=seed)
    scales = (torch.rand(rows, groups, generator=random) * 0.05 + 0.01).half().float().to(device)
    offsets = torch.randint(0, 2**bits + 1, (rows, groups), generator=random).float().to(device)
    inputs = torch.randperm(columns, generator=random).to(device)
    return QuantisedWeight(
        codes.to(device), scales, columns, group, bits, offsets if zeros else None, inputs if order else None,
        rounds_x, scales * 3 if minimums else None, float4=float4,
    )  # fmt: skip
