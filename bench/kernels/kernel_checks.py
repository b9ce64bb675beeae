"""What the GPU's kernels compute, against float64 and torch: on a GPU in sizes that fill it, without one in
Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ...kernels.gpu.attention_tiles import TileShape
from ...kernels.gpu.decode_attention import decode_attention, decode_tile
from ...kernels.gpu.decode_plan import MAX_PARTIALS, plan_decode
from ...kernels.gpu.prefill_attention import exact_tile, plan_prefill, prefill_attention, prefill_tile
from . import layer_checks, state_checks
from .attention_variants import Attention, covering
from .kernel_inputs import LAYER, QUANTISED, AttentionCase, attention_case, relative_error

BFLOAT16, FLOAT16, FLOAT32 = torch.bfloat16, torch.float16, torch.float32
ALLOWED = {FLOAT32: 2e-6, BFLOAT16: 5e-3, FLOAT16: 6e-4}


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
    dtype: torch.dtype | None = None,
) -> Tensor:
    """``dtype``: of the result, if not that of the queries."""
    (n, num_heads, head_dim), pool = case.q.shape, case.pool
    sizes = num_heads, pool.shape[3], head_dim, pool.shape[4]
    plan = plan_decode(case.inputs, *sizes, max_partials, one_group=exact)
    out = torch.empty((n, num_heads * head_dim), dtype=dtype or case.q.dtype, device=case.q.device)
    programs = programs or (264 if case.q.is_cuda else 3)
    tile = tile or decode_tile(
        head_dim, num_heads // pool.shape[3], case.q.itemsize, fp8=pool.dtype.itemsize == 1
    )
    decode_attention(out, case.q, pool, LAYER, case.inputs, plan, programs, tile)
    return out


def prefill(
    case: AttentionCase,
    tile: TileShape | None = None,
    split_folds: bool = False,
    dtype: torch.dtype | None = None,
) -> Tensor:
    (n, num_heads, head_dim), pool = case.q.shape, case.pool
    usual = prefill_tile(head_dim, case.q.itemsize, fp8=pool.dtype.itemsize == 1)
    tile = tile or (usual if case.q.is_cuda else TileShape(32, 32, 4, 3))
    plan = plan_prefill(case.inputs, n, num_heads // pool.shape[3], tile, singles=True)
    out = torch.empty((n, num_heads * head_dim), dtype=dtype or case.q.dtype, device=case.q.device)
    prefill_attention(out, case.q, pool, LAYER, case.inputs, plan, split_folds)
    return out


def one(case: AttentionCase, row: int) -> AttentionCase:
    """One sequence of a decode batch, alone."""
    i, only = case.inputs, slice(row, row + 1)
    starts = torch.tensor([0, 1], dtype=torch.int32, device=case.q.device)
    lens, tables = i.seq_lens[only], i.block_tables[only]
    inputs = replace(i, query_start_loc=starts, seq_lens=lens, block_tables=tables, plans={})
    return AttentionCase(case.q[only], case.pool, inputs, case.exact[only])


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
                partial(_prefill_error, chunks, options, split_folds=True),
            )
    yield Check("decode attention: bits alone and in a batch", 0, partial(_decode_alone, lengths))
    yield Check("decode attention: bits with few partial results", 0, partial(_decode_room, lengths))
    for head_dim, fp8 in product((64, 128, 256), (False, True)) if big else ((64, False),):
        yield Check(
            f"bits prefilled, chunked and decoded, head dim {head_dim}{', fp8' if fp8 else ''}",
            0,
            partial(_prefilled_or_decoded, head_dim, fp8, big),
        )
    rows, hidden = (300, 4096) if big else (3, 300)
    for dtype in (BFLOAT16, FLOAT16, FLOAT32):
        yield Check(f"norm, {dtype}", ALLOWED[dtype], partial(layer_checks.norm_error, rows, hidden, dtype))
        yield Check(f"gate, {dtype}", ALLOWED[dtype], partial(layer_checks.gate_error, rows, hidden, dtype))
        yield Check(
            f"rope and store, {dtype}",
            ALLOWED[dtype],
            partial(layer_checks.rope_error, 40 if big else 4, dtype, False),
        )
    yield Check(
        "rope and store, fp8", 0.02, partial(layer_checks.rope_error, 40 if big else 4, BFLOAT16, True)
    )
    yield Check("embedding", 0, layer_checks.embedding_error)
    yield Check("exact linear", ALLOWED[BFLOAT16], partial(layer_checks.exact_linear_error, big))
    yield Check("exact linear: bits of a row in any batch", 0, partial(layer_checks.exact_rows_error, big))
    for dtype in (BFLOAT16, FLOAT16, FLOAT32):
        yield Check(f"low rank, {dtype}", ALLOWED[dtype], partial(layer_checks.low_rank_error, big, dtype))
    yield Check("low rank: bits of a row in any batch", 0, partial(layer_checks.low_rank_rows_error, big))
    for dtype in (FLOAT16, BFLOAT16, FLOAT32) if big else (FLOAT16, FLOAT32):
        yield Check(f"experts, {dtype}", 4 * ALLOWED[dtype], partial(layer_checks.mixture_error, big, dtype))
    whole = partial(layer_checks.mixture_error, big, FLOAT16, part=True)
    yield Check("experts of a rank", 4 * ALLOWED[FLOAT16], whole)
    yield Check("float8 linear", 0.06, layer_checks.fp8_linear_error)
    for form in QUANTISED:
        for rows in (1, 17, 300, 1000) if big else (3,):
            yield Check(
                f"quantised linear, {form}, {rows} rows",
                ALLOWED[BFLOAT16],
                partial(layer_checks.quantised_linear_error, form, rows, big),
            )
        yield Check(
            f"quantised linear, {form}: bits of a row",
            0,
            partial(layer_checks.quantised_rows_error, form, big),
        )
    for what, shape in state_checks.SHAPES[big].items():
        for dtype in (FLOAT32, BFLOAT16):
            yield Check(
                f"{what}, {dtype}", 4 * ALLOWED[dtype], partial(state_checks.state_error, shape, dtype, big)
            )
        yield Check(f"{what}: bits of a chunk", 0, partial(state_checks.chunks_error, shape, big))
    yield Check("blocks packed and unpacked", 0, layer_checks.copies_error)
    yield Check("checksums are xxh3", 0, layer_checks.checksums_error)
    yield Check("sampling as on a CPU", 0, partial(layer_checks.sampling_error, 151936 if big else 300))
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
    chunks: list[tuple[int, int]], options: dict[str, object], device: str, split_folds: bool = False
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
    together = decode(case, dtype=FLOAT32)
    for row in range(len(lengths)):
        if not torch.equal(decode(one(case, row), programs=5, dtype=FLOAT32)[0], together[row]):
            return 1
    return 0


def _decode_room(lengths: list[int], device: str) -> float:
    case = attention_case(lengths, [1] * len(lengths), head_dim=128, block_size=64, device=device)
    few, all_kept = (decode(case, most, dtype=FLOAT32) for most in (3, MAX_PARTIALS))
    return float(not torch.equal(few, all_kept))


def _prefilled_or_decoded(head_dim: int, fp8: bool, big: bool, device: str) -> float:
    """In float32: rounded to bfloat16, most numbers that differ would look alike."""
    tile = exact_tile(head_dim, fp8=fp8) if big else TileShape(16, 32, 4, 3)
    length, new = (1500, 700) if big else (300, 70)
    case = attention_case([length], [new], head_dim=head_dim, block_size=64, fp8=fp8, device=device)
    whole, first = prefill(case, tile, split_folds=True, dtype=FLOAT32), length - new
    for start, stop in ((0, 7), (7, new // 2), (new // 2, new)):
        lens = torch.tensor([first + stop], dtype=torch.int32, device=device)
        starts = torch.tensor([0, stop - start], dtype=torch.int32, device=device)
        chunk = replace(
            case, q=case.q[start:stop], inputs=replace(case.inputs, query_start_loc=starts, seq_lens=lens)
        )
        if not torch.equal(prefill(chunk, tile, split_folds=True, dtype=FLOAT32), whole[start:stop]):
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
    steps = replace(case, q=case.q[rows], inputs=inputs)
    return float(not torch.equal(decode(steps, tile=tile, exact=True, dtype=FLOAT32), whole[rows]))
