"""What the GPU's kernels compute, against float64 and torch: on a GPU in sizes that fill it, without one in
Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...engine.step.batch import SamplingState
from ...engine.step.device_sampler import DeviceSampler
from ...engine.step.sampler import SampledRows, Sampler
from ...kernels.cuda import CudaKernels
from ...kernels.gpu.attention_tiles import TileShape
from ...kernels.gpu.block_checksum import block_checksums
from ...kernels.gpu.block_copy import pack_blocks, unpack_blocks
from ...kernels.gpu.decode_attention import decode_attention, decode_tile
from ...kernels.gpu.decode_plan import MAX_PARTIALS, plan_decode
from ...kernels.gpu.elementwise import embedding, gate_mul
from ...kernels.gpu.exact_linear import ExactLinear
from ...kernels.gpu.fp8_linear import Fp8Linear
from ...kernels.gpu.gumbel_argmax import gumbel_argmax
from ...kernels.gpu.norm import add_rms_norm
from ...kernels.gpu.prefill_attention import exact_tile, plan_prefill, prefill_attention, prefill_tile
from ...kernels.gpu.quantised_linear import QuantisedLinear
from ...kernels.gpu.rope_store import rope_and_store
from ...kernels.gumbel_noise import noise_key
from ...kernels.interface import RopeInputs
from ...kernels.mixture_shape import MixtureShape
from ...kernels.reference import TorchKernels
from ...transport.messages.messages import SamplingParams
from .attention_variants import Attention, covering
from .kernel_inputs import (
    LAYER,
    QUANTISED,
    AttentionCase,
    attention_case,
    mixture_weights,
    quantised_weight,
    quarters,
    randn,
    relative_error,
)

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
ALLOWED = {FLOAT32: 2e-6, BFLOAT16: 5e-3, FLOAT16: 6e-4}
REFERENCE = TorchKernels()


@dataclass(frozen=True, slots=True)
class Check:
    """``run(device)`` gives an error that should not exceed ``allowed``; bits that must be equal: 0 or 1."""

    name: str
    allowed: float
    run: Callable[[str], float]


def decode(
    case: AttentionCase,
    max_partials: int = MAX_PARTIALS,
    programs: int = 0,
    tile: TileShape | None = None,
    exact: bool = False,
) -> Tensor:
    (n, num_heads, head_dim), pool = case.q.shape, case.pool
    plan = plan_decode(case.inputs, num_heads, pool.shape[3], head_dim, pool.shape[4], max_partials)
    out = torch.empty((n, num_heads * head_dim), dtype=case.q.dtype, device=case.q.device)
    programs = programs or (264 if case.q.is_cuda else 3)
    tile = tile or decode_tile(
        head_dim, num_heads // pool.shape[3], case.q.itemsize, fp8=pool.dtype.itemsize == 1
    )
    decode_attention(out, case.q, pool, LAYER, case.inputs, plan, programs, tile, exact)
    return out


def prefill(case: AttentionCase, tile: TileShape | None = None, split_folds: bool = False) -> Tensor:
    (n, num_heads, head_dim), pool = case.q.shape, case.pool
    tile = tile or (prefill_tile(head_dim, case.q.itemsize) if case.q.is_cuda else TileShape(32, 32, 4, 3))
    plan = plan_prefill(case.inputs, n, num_heads // pool.shape[3], tile, singles=True)
    out = torch.empty((n, num_heads * head_dim), dtype=case.q.dtype, device=case.q.device)
    prefill_attention(out, case.q, pool, LAYER, case.inputs, plan, split_folds)
    return out


def one(case: AttentionCase, row: int) -> AttentionCase:
    """One sequence of a decode batch, alone."""
    i, device = case.inputs, case.q.device
    starts = torch.tensor([0, 1], dtype=torch.int32, device=device)
    inputs = replace(
        i,
        query_start_loc=starts,
        seq_lens=i.seq_lens[row : row + 1],
        block_tables=i.block_tables[row : row + 1],
        plans={},
    )
    return AttentionCase(case.q[row : row + 1], case.pool, inputs, case.exact[row : row + 1])


def checks(big: bool) -> Iterator[Check]:
    """``big``: sizes for a GPU; else such that the interpreter is done in a minute."""
    lengths = [1, 17, 300, 4000, 256, 1023, 8191, 64] if big else [1, 17, 300, 600]
    chunks = [(0, 700), (1000, 333), (5000, 64), (3, 1)] if big else [(0, 40), (70, 9)]
    plain: dict[str, object] = {"block_size": 64, "dtype": BFLOAT16}
    variants: dict[str, dict[str, object]] = {
        "bfloat16": {},
        "float16": {"dtype": FLOAT16},
        "float32": {"dtype": FLOAT32},
        "window": {"window": 200},
        "softcap": {"softcap": 0.7, "window": 200},
        "fp8": {"fp8": True},
        "sinks": {"sinks": True},
        "blocks of 16": {"block_size": 16},
        **{f"head dim {head_dim}": {"head_dim": head_dim} for head_dim in (96, 128, 256)},
        **{
            f"group of {group}": {"group": group, "num_kv_heads": 1, "head_dim": 128}
            for group in (1, 7, 8, 20)
        },
    }
    for name, own in variants.items():
        options = plain | own
        dtype = options["dtype"]
        assert isinstance(dtype, torch.dtype)
        yield Check(f"decode attention, {name}", ALLOWED[dtype], partial(_decode_error, lengths, options))
        if big or name in ("bfloat16", "softcap", "sinks", "window", "fp8"):
            yield Check(
                f"prefill attention, {name}", ALLOWED[dtype], partial(_prefill_error, chunks, options)
            )
            yield Check(
                f"prefill attention with split folds, {name}",
                ALLOWED[dtype],
                partial(_prefill_error, chunks, options, True),
            )
    yield Check("decode attention: bits alone and in a batch", 0, partial(_decode_alone, lengths))
    yield Check("decode attention: bits with few partial results", 0, partial(_decode_room, lengths))
    for head_dim in (64, 128, 256) if big else (64,):
        yield Check(
            f"bits prefilled, chunked and decoded, head dim {head_dim}",
            0,
            partial(_prefilled_or_decoded, head_dim, big),
        )
    rows, hidden = (300, 4096) if big else (3, 300)
    for dtype in (BFLOAT16, FLOAT16, FLOAT32):
        yield Check(f"norm, {dtype}", ALLOWED[dtype], partial(_norm, rows, hidden, dtype))
        yield Check(f"gate, {dtype}", ALLOWED[dtype], partial(_gate, rows, hidden, dtype))
        yield Check(
            f"rope and store, {dtype}", ALLOWED[dtype], partial(_rope, 40 if big else 4, dtype, False)
        )
    yield Check("rope and store, fp8", 0.02, partial(_rope, 40 if big else 4, BFLOAT16, True))
    yield Check("embedding", 0, _embedding)
    yield Check("exact linear", ALLOWED[BFLOAT16], partial(_exact_linear, big))
    yield Check("exact linear: bits of a row in any batch", 0, partial(_exact_rows, big))
    for dtype in (FLOAT16, BFLOAT16, FLOAT32) if big else (FLOAT16, FLOAT32):
        yield Check(f"experts, {dtype}", 4 * ALLOWED[dtype], partial(_mixture, big, dtype))
    if big:
        yield Check("float8 linear, a scale a channel", 0.06, partial(_fp8_linear, True))
    yield Check("float8 linear, one scale", 0.06, partial(_fp8_linear, False))
    for form in QUANTISED:
        for rows in (1, 17, 300, 1000) if big else (3,):
            yield Check(
                f"quantised linear, {form}, {rows} rows",
                ALLOWED[BFLOAT16],
                partial(_quantised_linear, form, rows, big),
            )
        yield Check(f"quantised linear, {form}: bits of a row", 0, partial(_quantised_rows, form, big))
    yield Check("blocks packed and unpacked", 0, _copies)
    yield Check("checksums are xxh3", 0, _checksums)
    yield Check("gumbel_argmax", 0, partial(_gumbel, 32 if big else 3, 151936 if big else 5000))
    yield Check("sampling as on a CPU", 0, partial(_sampling, 151936 if big else 300))
    for variant in covering():
        if big or variant.head_dim == 64:
            yield Check(
                f"attention, {variant}",
                ALLOWED[variant.dtype],
                partial(_variant_error, variant, lengths, chunks),
            )


def _decode_error(lengths: list[int], options: dict[str, object], device: str) -> float:
    case = attention_case(lengths, [1] * len(lengths), device=device, **options)  # type: ignore[arg-type]
    return relative_error(decode(case).cpu(), case.exact)


def _prefill_error(
    chunks: list[tuple[int, int]], options: dict[str, object], split_folds: bool = False, device: str = "cpu"
) -> float:
    lengths, new = [sum(chunk) for chunk in chunks], [chunk[1] for chunk in chunks]
    case = attention_case(lengths, new, device=device, **options)  # type: ignore[arg-type]
    tile = (
        exact_tile(case.q.shape[2], case.q.itemsize, fp8=case.pool.dtype.itemsize == 1)
        if split_folds and case.q.is_cuda
        else None
    )
    return relative_error(prefill(case, tile, split_folds).cpu(), case.exact)


def _variant_error(
    variant: Attention, lengths: list[int], chunks: list[tuple[int, int]], device: str
) -> float:
    options: dict[str, object] = {
        "group": variant.group, "head_dim": variant.head_dim, "block_size": variant.block_size,
        "dtype": variant.dtype, "fp8": variant.fp8,
        "window": 200 if variant.window else None,
        "device": device,
    }  # fmt: skip
    if variant.family == "decode":
        case = attention_case(lengths, [1] * len(lengths), **options)  # type: ignore[arg-type]
        return relative_error(decode(case, tile=variant.tile, exact=variant.exact).cpu(), case.exact)
    lengths, new = [sum(chunk) for chunk in chunks], [chunk[1] for chunk in chunks]
    case = attention_case(lengths, new, **options)  # type: ignore[arg-type]
    return relative_error(prefill(case, variant.tile, variant.exact).cpu(), case.exact)


def _decode_alone(lengths: list[int], device: str) -> float:
    case = attention_case(lengths, [1] * len(lengths), head_dim=128, block_size=64, device=device)
    together = decode(case)
    for row in range(len(lengths)):
        if not torch.equal(decode(one(case, row), programs=5)[0], together[row]):
            return 1
    return 0


def _decode_room(lengths: list[int], device: str) -> float:
    case = attention_case(lengths, [1] * len(lengths), head_dim=128, block_size=64, device=device)
    return float(not torch.equal(decode(case, max_partials=3), decode(case)))


def _prefilled_or_decoded(head_dim: int, big: bool, device: str) -> float:
    tile = exact_tile(head_dim) if big else TileShape(16, 32, 4, 3)
    length, new = (1500, 700) if big else (300, 70)
    case = attention_case([length], [new], head_dim=head_dim, block_size=64, device=device)
    whole, first = prefill(case, tile, split_folds=True), length - new
    for start, stop in ((0, 7), (7, new // 2), (new // 2, new)):
        lens = torch.tensor([first + stop], dtype=torch.int32, device=device)
        starts = torch.tensor([0, stop - start], dtype=torch.int32, device=device)
        chunk = replace(
            case, q=case.q[start:stop], inputs=replace(case.inputs, query_start_loc=starts, seq_lens=lens)
        )
        if not torch.equal(prefill(chunk, tile, split_folds=True), whole[start:stop]):
            return 1
    rows = list(range(0, new, 13 if big else 23))
    lens = torch.tensor(rows, dtype=torch.int32, device=device) + first + 1
    starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=device)
    inputs = replace(
        case.inputs,
        query_start_loc=starts,
        seq_lens=lens,
        block_tables=case.inputs.block_tables.expand(len(rows), -1),
    )
    return float(
        not torch.equal(
            decode(replace(case, q=case.q[rows], inputs=inputs), tile=tile, exact=True), whole[rows]
        )
    )


def _norm(rows: int, hidden: int, dtype: torch.dtype, device: str) -> float:
    x, residual = (randn(rows, hidden, dtype=dtype, device=device, seed=seed) for seed in (0, 1))
    weight = randn(hidden, dtype=dtype, device=device, seed=2)
    expected_residual = residual.clone()
    expected = REFERENCE.add_rms_norm(x, expected_residual, weight, 1e-5)
    found = add_rms_norm(x, residual, weight, 1e-5)
    return max(relative_error(found, expected), relative_error(residual, expected_residual))


def _gate(rows: int, hidden: int, dtype: torch.dtype, device: str) -> float:
    gate_up = randn(rows, 2 * hidden, dtype=dtype, device=device) * 5
    return relative_error(gate_mul(gate_up, "silu"), REFERENCE.gate_mul(gate_up.float(), "silu"))


def _rope(rows: int, dtype: torch.dtype, fp8: bool, device: str) -> float:
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


def _embedding(device: str) -> float:
    table = randn(100, 1500, dtype=BFLOAT16, device=device)
    ids = torch.tensor([5, 99, 0, -1], dtype=torch.int32, device=device)
    expected = table[ids.clamp(min=0).long()]
    expected[3] = 0
    return float(not torch.equal(embedding(table, ids, BFLOAT16), expected))


def _exact_linear(big: bool, device: str) -> float:
    worst = 0.0
    for m, n, k in ((1, 4096, 4096), (70, 6144, 1000), (900, 1024, 4096)) if big else ((3, 40, 100),):
        x, weight = (
            randn(m, k, dtype=BFLOAT16, device=device),
            randn(n, k, dtype=BFLOAT16, device=device, seed=1),
        )
        worst = max(worst, relative_error(ExactLinear(weight, None)(x), x.double() @ weight.double().t()))
    return worst


def _exact_rows(big: bool, device: str) -> float:
    rows, n, k = (700, 4096, 4096) if big else (130, 40, 128)
    x, linear = (
        randn(rows, k, dtype=BFLOAT16, device=device),
        ExactLinear(randn(n, k, dtype=BFLOAT16, device=device, seed=1), None),
    )
    together = linear(x)
    parts = (slice(0, 1), slice(5, 69), slice(60, 125), slice(64, rows - 1))
    return float(not all(torch.equal(linear(x[part]), together[part]) for part in parts))


def _mixture(big: bool, dtype: torch.dtype, device: str) -> float:
    experts, sizes, rows = ((128, 8), (2048, 768), 300) if big else ((5, 2), (72, 40), 9)
    shape = MixtureShape(*experts, *sizes, normalized=True, activation="silu", shared_size=40)
    weights = mixture_weights(shape, dtype, device=device)
    x = quarters(rows, sizes[0], dtype=dtype).to(device)
    return relative_error(CudaKernels(1).mixture(weights)(x), REFERENCE.mixture(weights)(x))


def _quantised_linear(form: str, rows: int, big: bool, device: str) -> float:
    n, k = (4096, 4096 + 64) if big else (70, 200)
    weight = quantised_weight(n, k, **QUANTISED[form], device=device)
    x, bias = randn(rows, k, dtype=BFLOAT16, device=device), randn(n, dtype=BFLOAT16, device=device, seed=1)
    expected = REFERENCE.linear(weight, bias)(x.float())
    return relative_error(QuantisedLinear(weight, bias, num_sms=132 if big else 8)(x), expected)


def _quantised_rows(form: str, big: bool, device: str) -> float:
    """Exact: alone and among others."""
    (n, k), rows = ((4096, 4096), 700) if big else ((70, 256), 70)
    weight = quantised_weight(n, k, **QUANTISED[form], device=device)
    x = randn(rows, k, dtype=BFLOAT16, device=device)
    linear = QuantisedLinear(weight, None, exact=True)
    together, parts = linear(x), (slice(0, 1), slice(5, 25), slice(3, 68))
    return float(not all(torch.equal(linear(x[part]), together[part]) for part in parts))


def _fp8_linear(per_channel: bool, device: str) -> float:
    x, weight = (
        randn(64, 512, dtype=BFLOAT16, device=device),
        randn(256, 512, dtype=BFLOAT16, device=device, seed=1),
    )
    return relative_error(Fp8Linear(weight, None, per_channel)(x), x.double() @ weight.double().t())


def _random_blocks(device: str) -> Tensor:
    return torch.randint(
        0, 256, (6, 20480), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    ).to(device)


def _copies(device: str) -> float:
    pool, blocks = _random_blocks(device), torch.tensor([4, 0, 5], device=device)
    packed = torch.empty((3, 8192), dtype=torch.uint8, device=device)
    pack_blocks(pool, blocks, packed, 4096)
    other = torch.zeros_like(pool)
    unpack_blocks(packed, blocks, other, 4096)
    expected = torch.zeros_like(pool)
    expected[blocks, 4096:12288] = pool[blocks, 4096:12288]
    return float(not torch.equal(other, expected))


def _checksums(device: str) -> float:
    from xxhash import xxh3_64_intdigest

    pool = _random_blocks(device)
    found = block_checksums(pool, torch.tensor([3, 1, 3], device=device)).tolist()
    return float(
        [value & 0xFFFFFFFFFFFFFFFF for value in found]
        != [xxh3_64_intdigest(pool[i].cpu().numpy().data) for i in (3, 1, 3)]
    )


def _gumbel(rows: int, vocab_size: int, device: str) -> float:
    logits = randn(rows, vocab_size, device=device) * 2
    keys = torch.tensor([noise_key(7, row) for row in range(rows)], device=device)
    return float(not torch.equal(gumbel_argmax(logits, keys), REFERENCE.gumbel_argmax(logits, keys)))


def _sampling(vocab_size: int, device: str) -> float:
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
    expected, _ = Sampler(REFERENCE, (3,)).sample(logits.cpu().clone(), SampledRows.booked(states))
    return float(
        DeviceSampler((3,)).sample(logits, SampledRows.booked(states, device))[0].tolist()
        != expected.tolist()
    )
