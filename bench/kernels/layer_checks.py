"""What the GPU's kernels beside attention compute: each function returns the error of one case."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...engine.step.batch import SamplingState
from ...engine.step.device_sampler import DeviceSampler
from ...engine.step.sampler import Sampler
from ...kernels.cuda import CudaKernels
from ...kernels.gpu.elementwise import embedding, gate_mul
from ...kernels.gpu.exact_linear import ExactLinear
from ...kernels.gpu.fp8_linear import Fp8Linear
from ...kernels.gpu.kv_blocks import block_checksums, pack_blocks, unpack_blocks
from ...kernels.gpu.norm import add_rms_norm
from ...kernels.gpu.quantised_linear import QuantisedLinear
from ...kernels.gpu.rope_store import rope_and_store
from ...kernels.interface import RopeInputs
from ...kernels.low_rank import LowRank
from ...kernels.mixture_shape import MixtureShape
from ...kernels.reference import TorchKernels
from ...transport.messages.messages import SamplingParams
from .kernel_inputs import (
    LAYER,
    QUANTISED,
    mixture_weights,
    quantised_weight,
    quarters,
    randn,
    relative_error,
)
from .sampled_rows import booked, drawn

BFLOAT16, REFERENCE = torch.bfloat16, TorchKernels()


def norm_error(rows: int, hidden: int, dtype: torch.dtype, device: str) -> float:
    x, residual = (randn(rows, hidden, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = randn(hidden, dtype=dtype, device=device, seed=2)
    expected_residual = residual.clone()
    expected = REFERENCE.add_rms_norm(x, expected_residual, weight, 1e-5)
    found = add_rms_norm(x, residual, weight, 1e-5)
    return max(relative_error(found, expected), relative_error(residual, expected_residual))


def gate_error(rows: int, hidden: int, dtype: torch.dtype, device: str) -> float:
    gate_up = randn(rows, 2 * hidden, dtype=dtype, device=device) * 5
    return relative_error(gate_mul(gate_up, "silu"), REFERENCE.gate_mul(gate_up.float(), "silu"))


def rope_error(rows: int, dtype: torch.dtype, fp8: bool, device: str) -> float:
    num_heads, num_kv_heads, head_dim = 6, 2, 128
    qkv = randn(rows, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
    expected_pool = torch.full((3, 2, 2, num_kv_heads, 64, head_dim), torch.nan).to(
        torch.float8_e4m3fn if fp8 else dtype
    )
    pool = expected_pool.to(device, copy=True)
    slots = torch.randperm(3 * 64, generator=torch.Generator().manual_seed(1))[:rows]
    slots[0] = -1
    q_norm, k_norm = (randn(head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    scales = torch.full((2, 2, num_kv_heads), 0.02) if fp8 else None
    positions, cos_sin = torch.arange(rows, dtype=torch.int32), randn(rows, head_dim)
    rope = RopeInputs(
        positions, slots, cos_sin, num_heads, num_kv_heads, head_dim, q_norm, k_norm, 1e-6, scales
    )
    there = replace(
        rope, positions=positions.to(device), slot_mapping=slots.to(device), cos_sin=cos_sin.to(device),
        q_norm=q_norm.to(device), k_norm=k_norm.to(device),
        kv_scales=None if scales is None else scales.to(device),
    )  # fmt: skip
    found = rope_and_store(qkv.to(device, copy=True), pool, LAYER, there)
    expected = REFERENCE.rope_and_store(qkv, expected_pool, LAYER, rope)
    stored, expected_stored = pool.cpu().float(), expected_pool.float()
    if not torch.equal(stored.isnan(), expected_stored.isnan()):
        return 1
    return max(
        relative_error(found.cpu(), expected),
        relative_error(stored.nan_to_num(), expected_stored.nan_to_num()),
    )


def embedding_error(device: str) -> float:
    table = randn(100, 1500, dtype=BFLOAT16, device=device)
    ids = torch.tensor([5, 99, 0, -1], dtype=torch.int32, device=device)
    expected = table[ids.clamp(min=0).long()]
    expected[3] = 0
    return float(not torch.equal(embedding(table, ids, BFLOAT16), expected))


def exact_linear_error(big: bool, device: str) -> float:
    worst = 0.0
    for m, n, k in ((1, 4096, 4096), (70, 6144, 1000), (900, 1024, 4096)) if big else ((3, 40, 100),):
        x, weight = (
            randn(m, k, dtype=BFLOAT16, device=device),
            randn(n, k, dtype=BFLOAT16, device=device, seed=1),
        )
        worst = max(worst, relative_error(ExactLinear(weight, None)(x), x.double() @ weight.double().t()))
    return worst


def exact_rows_error(big: bool, device: str) -> float:
    rows, n, k = (700, 4096, 4096) if big else (130, 40, 128)
    x, linear = (
        randn(rows, k, dtype=BFLOAT16, device=device),
        ExactLinear(randn(n, k, dtype=BFLOAT16, device=device, seed=1), None),
    )
    together = linear(x)
    parts = (slice(0, 1), slice(5, 69), slice(60, 125), slice(64, rows - 1))
    return float(not all(torch.equal(linear(x[part]), together[part]) for part in parts))


def low_rank_inputs(big: bool, dtype: torch.dtype, device: str) -> tuple[LowRank, LowRank, list[Tensor]]:
    """Updates, the same in plain torch, and the arguments of ``LowRank.add``."""
    rows, n, k = (300, 6144, 4096) if big else (40, 200, 1100)
    updates, expected = (
        kernels.low_rank(k, n, 64, 5, dtype, torch.device(device)) for kernels in (CudaKernels(1), REFERENCE)
    )
    for slot, rank in enumerate((1, 8, 16, 64)):
        a, b = randn(rank, k, dtype=dtype, seed=slot) / k**0.5, randn(n, rank, dtype=dtype, seed=9 + slot)
        updates.put(slot, a.to(device), b.to(device))
        expected.put(slot, a.to(device), b.to(device))
    slots = [*range(-1, 5)] * 4 + [3] * (rows - 24)
    inputs = [randn(rows, size, dtype=dtype, device=device, seed=size) for size in (n, k)]
    return updates, expected, [*inputs, torch.tensor(slots, dtype=torch.int32, device=device)]


def low_rank_error(big: bool, dtype: torch.dtype, device: str) -> float:
    updates, expected, (out, x, slots) = low_rank_inputs(big, dtype, device)
    wide = out.float()
    expected.add(wide, x.float(), slots)
    updates.add(out, x, slots)
    return relative_error(out, wide)


def low_rank_rows_error(big: bool, device: str) -> float:
    updates, _, (out, x, slots) = low_rank_inputs(big, BFLOAT16, device)
    together = out.clone()
    updates.add(together, x, slots)
    for rows in (slice(0, 1), slice(3, 4), slice(7, 39), slice(20, None)):
        part = out[rows].clone()
        updates.add(part, x[rows], slots[rows])
        if not torch.equal(part, together[rows]):
            return 1
    return 0


def mixture_error(big: bool, dtype: torch.dtype, device: str, part: bool = False) -> float:
    """``part``: of a rank that has some experts whole."""
    experts, sizes, rows = ((128, 8), (2048, 768), 300) if big else ((5, 2), (72, 40), 9)
    shape = MixtureShape(*experts, *sizes, normalized=True, activation="silu", shared_size=40)
    if part:
        shape = replace(shape, own=range(experts[0] // 4, experts[0] // 2))
    weights = mixture_weights(shape, dtype, device=device)
    x = quarters(rows, sizes[0], dtype=dtype).to(device)
    return relative_error(CudaKernels(1).mixture(weights)(x), REFERENCE.mixture(weights)(x))


def quantised_linear_error(form: str, rows: int, big: bool, device: str) -> float:
    n, k = (4096, 4096 + 64) if big else (70, 200)
    weight = quantised_weight(n, k, **QUANTISED[form], device=device)
    x, bias = randn(rows, k, dtype=BFLOAT16, device=device), randn(n, dtype=BFLOAT16, device=device, seed=1)
    expected = REFERENCE.linear(weight, bias)(x.float())
    return relative_error(QuantisedLinear(weight, bias, num_sms=132 if big else 8)(x), expected)


def quantised_rows_error(form: str, big: bool, device: str) -> float:
    """Exact: alone and among others, of numbers so unlike that no sum of them is without rounding."""
    (n, k), rows = ((4096, 4096), 700) if big else ((70, 256), 70)
    weight = quantised_weight(n, k, **QUANTISED[form], device=device)
    x = (randn(rows, k) * (4 * randn(rows, k, seed=1)).exp()).to(BFLOAT16).to(device)
    linear = QuantisedLinear(weight, None, exact=True)
    together, parts = linear(x), (slice(0, 1), slice(5, 25), slice(3, 68))
    return float(not all(torch.equal(linear(x[part]), together[part]) for part in parts))


def fp8_linear_error(device: str) -> float:
    x, weight = (
        randn(64, 512, dtype=BFLOAT16, device=device),
        randn(256, 512, dtype=BFLOAT16, device=device, seed=1),
    )
    return relative_error(Fp8Linear(weight, None)(x), x.double() @ weight.double().t())


def _random_blocks(device: str) -> Tensor:
    return torch.randint(
        0, 256, (6, 20480), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    ).to(device)


def copies_error(device: str) -> float:
    pool, blocks = _random_blocks(device), torch.tensor([4, 0, 5], device=device)
    packed = torch.empty((3, 8192), dtype=torch.uint8, device=device)
    pack_blocks(pool, blocks, packed, 4096)
    other = torch.zeros_like(pool)
    unpack_blocks(packed, blocks, other, 4096)
    expected = torch.zeros_like(pool)
    expected[blocks, 4096:12288] = pool[blocks, 4096:12288]
    return float(not torch.equal(other, expected))


def checksums_error(device: str) -> float:
    from xxhash import xxh3_64_intdigest

    pool = _random_blocks(device)
    found = block_checksums(pool, torch.tensor([3, 1, 3], device=device)).tolist()
    return float(
        [value & 0xFFFFFFFFFFFFFFFF for value in found]
        != [xxh3_64_intdigest(pool[i].cpu().numpy().data) for i in (3, 1, 3)]
    )


def sampling_error(vocab_size: int, device: str) -> float:
    own: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 50},
        {"top_k": 20, "top_p": 0.8, "temperature": 0.7}, {"min_p": 0.05},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3}, {"top_p": 0.999},
    ]  # fmt: skip
    states = [
        SamplingState(SamplingParams(max_tokens=9, seed=i, logit_bias={i: 2.0}, **params), [1, 2], [i, 5])
        for i, params in enumerate(own * 4)
    ]
    logits = randn(len(states), vocab_size, device=device) * 3
    expected, _ = Sampler(REFERENCE, (3,)).sample(logits.cpu().clone(), booked(states))
    return float(drawn(DeviceSampler((3,)), logits, booked(states, device))[0].tolist() != expected.tolist())
