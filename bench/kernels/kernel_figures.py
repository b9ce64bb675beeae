"""How fast the GPU's kernels are, each beside its floor. ``big``: for a GPU; else tiny shapes that only show
that all of it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...kernels.gpu.attention_tiles import TileShape
from ...kernels.gpu.decode_attention import (
    EXACT_PROGRAMS_PER_SM,
    decode_attention,
    decode_tile,
    programs_per_sm,
)
from ...kernels.gpu.decode_plan import plan_decode
from ...kernels.gpu.elementwise import gate_mul
from ...kernels.gpu.exact_linear import ExactLinear
from ...kernels.gpu.fp8_linear import Fp8Linear
from ...kernels.gpu.kv_blocks import block_checksums, pack_blocks
from ...kernels.gpu.low_rank import GpuLowRank
from ...kernels.gpu.norm import add_rms_norm
from ...kernels.gpu.prefill_attention import exact_tile, plan_prefill, prefill_attention, prefill_tile
from ...kernels.gpu.provided_attention import ProvidedAttention
from ...kernels.gpu.quantised_linear import QuantisedLinear
from ...kernels.gpu.rope_store import rope_and_store
from ...kernels.gpu.sampling import SamplingRows, sample
from ...kernels.interface import AttentionInputs, Linear, RopeInputs
from ...kernels.torch_linear import TorchLinear
from .gpu_timing import Call, Ceilings, Figure, bytes_figure, flops_figure, microseconds
from .kernel_inputs import QUANTISED, quantised_weight

BFLOAT16 = torch.bfloat16
LLAMA_8B = (8, 4, 128)  # KV heads, heads that share each, head_dim
TINY = (1, 2, 64)
SMALL = TileShape(16, 32, 4, 3)
BLOCK_SIZE = 64
ROTATED_BYTES = 300e6  # buffers used in turn outgrow a 50 MB cache
DECODES = (
    (1, 1024),
    (1, 16384),
    (8, 4096),
    (32, 4096),
    (64, 4096),
    (128, 1024),
    (256, 1024),
)  # batch, context
LINEARS = (("qkv", 6144, 4096), ("gate and up", 28672, 4096), ("down", 4096, 14336))  # outputs, inputs
UPDATED = (  # of Llama-3.1-8B, with the layers that share a product apart
    ("qkv", (4096, 1024, 1024), 4096), ("o", (4096,), 4096), ("gate and up", (14336, 14336), 4096),
    ("down", (4096,), 14336),
)  # fmt: skip
RANK, ADAPTERS = 16, 32
QUANTISED_FORMS, QUANTISED_FIGURE = ("AWQ", "float8 in blocks", "int4"), (512, 14336, 4096)  # rows, the same
PREFILLS = ((2048, 0), (8192, 0), (2048, 14336), (512, 7680))  # chunk, cached before it
# others than the one in use, for decode of head dim 128: what to try when it is slower than it should be
TILES = (
    (TileShape(16, 64, 4, 3), 3), (TileShape(16, 64, 4, 7), 2), (TileShape(16, 32, 4, 7), 4),
    (TileShape(16, 32, 4, 5), 4), (TileShape(16, 128, 4, 3), 3), (TileShape(16, 64, 8, 5), 2),
)  # fmt: skip
PREFILL_TILES = (TileShape(128, 64, 8, 3),)  # the same for prefill


def decode_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    for batch, context in DECODES if big else ((2, 100),):
        yield decode_figure(device, ceilings, batch, context, LLAMA_8B if big else TINY, big)
    yield decode_figure(device, ceilings, *((64, 4096, (8, 2, 128)) if big else (2, 70, (1, 1, 64))), big)
    batch, context, heads = (32, 4096, LLAMA_8B) if big else (2, 70, TINY)
    yield decode_figure(device, ceilings, batch, context, heads, big, dtype=torch.float8_e4m3fn)
    yield decode_figure(device, ceilings, batch, context, heads, big, exact=True)


def decode_tile_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    batch, context, heads = (32, 4096, LLAMA_8B) if big else (2, 70, TINY)
    for tile, per_sm in TILES if big else TILES[:1]:
        yield decode_figure(device, ceilings, batch, context, heads, big, tile=tile, per_sm=per_sm)


def prefill_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    heads = LLAMA_8B if big else TINY
    for chunk, cached in PREFILLS if big else ((20, 30),):
        yield prefill_figure(device, ceilings, chunk, cached, heads, big)
    longest = (8192, 0) if big else (9, 9)
    yield prefill_figure(device, ceilings, *longest, heads, big, exact=True)
    for tile in PREFILL_TILES:
        yield prefill_figure(device, ceilings, *longest, heads, big, tile=tile if big else SMALL)


def decode_figure(
    device: str, ceilings: Ceilings, batch: int, context: int, heads: tuple[int, int, int], big: bool,
    dtype: torch.dtype = BFLOAT16, exact: bool = False, tile: TileShape | None = None, per_sm: int = 0,
) -> Figure:  # fmt: skip
    num_kv_heads, group, head_dim = heads
    num_bytes = batch * context * 2 * num_kv_heads * head_dim * dtype.itemsize
    layers = min(128, int(ROTATED_BYTES / num_bytes) + 2) if big else 1
    pool, inputs = _cache(device, batch, context, layers, num_kv_heads, head_dim, dtype)
    q = torch.randn((batch, num_kv_heads * group, head_dim), device=device).to(BFLOAT16)
    out = torch.empty((batch, num_kv_heads * group * head_dim), dtype=BFLOAT16, device=device)
    sizes = num_kv_heads * group, num_kv_heads, head_dim, BLOCK_SIZE
    plan = plan_decode(inputs, *sizes, one_group=exact)
    name = f"decode attention, batch {batch}, context {context}, {num_kv_heads} x {group} heads of {head_dim}"
    name += f", {dtype}" if dtype != BFLOAT16 else ""
    name += ", exact" if exact else f", {tile}, {per_sm} a multiprocessor" if tile else ""
    fp8 = dtype.itemsize == 1
    shape = exact_tile(head_dim, fp8=fp8) if exact else tile or decode_tile(head_dim, group, fp8=fp8)
    per_sm = per_sm or (EXACT_PROGRAMS_PER_SM if exact else programs_per_sm(head_dim, group, BLOCK_SIZE))
    programs = per_sm * torch.cuda.get_device_properties(device).multi_processor_count if big else 3
    calls: list[Call] = [
        partial(decode_attention, out, q, pool, layer, inputs, plan, programs, shape)
        for layer in range(layers)
    ]
    return bytes_figure(name, microseconds(calls), num_bytes, ceilings)


def prefill_figure(
    device: str,
    ceilings: Ceilings,
    chunk: int,
    cached: int,
    heads: tuple[int, int, int],
    big: bool,
    exact: bool = False,
    tile: TileShape | None = None,
    provided: ProvidedAttention | None = None,
) -> Figure:
    num_kv_heads, group, head_dim = heads
    pool, inputs = _cache(device, 1, cached + chunk, 1, num_kv_heads, head_dim, BFLOAT16)
    starts = torch.tensor([0, chunk], dtype=torch.int32, device=device)
    inputs = replace(inputs, query_start_loc=starts, max_query_len=chunk)
    q = torch.randn((chunk, num_kv_heads * group, head_dim), device=device).to(BFLOAT16)
    out = torch.empty((chunk, num_kv_heads * group * head_dim), dtype=BFLOAT16, device=device)
    usual = (exact_tile(head_dim) if exact else prefill_tile(head_dim)) if big else SMALL
    plan = plan_prefill(inputs, chunk, group, tile or usual, singles=False)
    ours = partial(prefill_attention, out, q, pool, 0, inputs, plan, exact)
    us = microseconds([partial(provided, q, pool, 0, inputs) if provided is not None else ours])
    name = (
        f"prefill attention, {chunk} tokens after {cached}, {num_kv_heads} x {group} heads of "
        f"{head_dim}{', exact' if exact else f', {tile}' if tile else ''}"
    )
    if provided is not None:
        name += f", {type(provided).__name__}"
    pairs = chunk * cached + chunk * (chunk + 1) / 2
    return flops_figure(name, us, 4 * num_kv_heads * group * head_dim * pairs, ceilings)


def _cache(
    device: str, batch: int, context: int, layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[Tensor, AttentionInputs]:
    blocks = -(-context // BLOCK_SIZE)
    shape = (batch * blocks, layers, 2, num_kv_heads, BLOCK_SIZE, head_dim)
    pool = torch.empty(shape, dtype=BFLOAT16, device=device).normal_().to(dtype)
    tables = torch.randperm(batch * blocks, device=device).view(batch, blocks).int()
    lens = torch.full((batch,), context, dtype=torch.int32, device=device)
    scales = torch.ones((layers, 2, num_kv_heads), device=device) if dtype.itemsize == 1 else None
    starts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    return pool, AttentionInputs(starts, lens, tables, head_dim**-0.5, kv_scales=scales)


def linear_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    """Of Llama-3.1-8B: by cuBLAS, exact, in float8 where the GPU has it; and of quantised weights."""
    kinds: dict[str, Callable[[Tensor], Linear]] = {
        "cuBLAS": lambda w: TorchLinear(w, None),
        "exact": lambda w: ExactLinear(w, None),
    }
    if big and torch.cuda.get_device_capability(device) >= (8, 9):
        kinds["float8"] = lambda w: Fp8Linear(w, None)
    for name, n, k in LINEARS if big else (("tiny", 64, 64),):
        weights = [
            torch.randn((n, k), device=device).to(BFLOAT16)
            for _ in range(int(ROTATED_BYTES / (2 * n * k)) + 2 if big else 1)
        ]
        for kind, make in kinds.items():
            linears = [make(weight) for weight in weights]
            for m in (1, 16, 64, 256, 4096) if big else (3,):
                x = torch.randn((m, k), device=device).to(BFLOAT16)
                us = microseconds([partial(linear, x) for linear in linears])
                # of bfloat16, for all of them
                floor = max(2 * n * k / ceilings.copy, 2 * m * n * k / ceilings.flops) * 1e6
                yield Figure(
                    f"linear {name} {n} x {k}, {m} rows, {kind}", us, floor, 2 * m * n * k / us * 1e6, "FLOP"
                )
    m, n, k = QUANTISED_FIGURE if big else (3, 64, 64)
    x = torch.randn((m, k), device=device).to(BFLOAT16)
    for form in QUANTISED_FORMS:
        quantised = QuantisedLinear(quantised_weight(n, k, **QUANTISED[form], device=device), None)
        us = microseconds([partial(quantised, x)])
        yield flops_figure(f"linear {n} x {k}, {m} rows, {form}", us, 2 * m * n * k, ceilings)


def low_rank_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    """Updates of rank 16 of each layer, and before them the products that they are added to."""
    for name, outputs, k in UPDATED if big else (("tiny", (32, 16), 64),):
        n, ranks, last = sum(outputs), RANK * len(outputs), 0
        linears = [
            TorchLinear(torch.randn((n, k), device=device).to(BFLOAT16), None)
            for _ in range(int(ROTATED_BYTES / (2 * n * k)) + 2 if big else 1)
        ]
        updates = [low_rank_updates(outputs, k, device) for _ in range(8 if big else 1)]
        for m, adapters in ((1, 1), (32, 1), (32, 8), (32, 32), (2048, 1)) if big else ((3, 2),):
            x = torch.randn((m, k), device=device).to(BFLOAT16)
            if m != last:
                us, last = microseconds([partial(linear, x) for linear in linears]), m
                floor = max(2 * n * k / ceilings.copy, 2 * m * n * k / ceilings.flops) * 1e6
                yield Figure(f"linear {name}, {m} rows", us, floor, 2 * m * n * k / us * 1e6, "FLOP")
            out = torch.randn((m, n), device=device).to(BFLOAT16)
            row = torch.arange(m, dtype=torch.int32, device=device) % adapters
            calls: list[Call] = [
                partial(updates[i % len(updates)].add, out, x, (row + i) % ADAPTERS) for i in range(ADAPTERS)
            ]
            size, us = ranks * k + RANK * n, microseconds(calls)
            floor = max(2 * adapters * size / ceilings.copy, 2 * m * size / ceilings.flops) * 1e6
            yield Figure(
                f"low rank {name}, {m} rows, {adapters} adapters", us, floor, 2 * m * size / us * 1e6, "FLOP"
            )


def low_rank_updates(outputs: Sequence[int], in_features: int, device: str) -> GpuLowRank:
    """In all slots, of layers that share a product."""
    n, ranks = sum(outputs), RANK * len(outputs)
    updates = GpuLowRank(in_features, n, ranks, ADAPTERS, BFLOAT16, torch.device(device))
    b = torch.block_diag(*(torch.ones(size, RANK) for size in outputs))  # type: ignore[no-untyped-call]
    updates.put(0, torch.ones(ranks, in_features) / in_features, b / RANK)
    for memory in (updates._a, updates._b, updates._bounds):
        memory[1:] = memory[0]
    return updates


def small_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    rows_each, hidden = ((64, 8192), 4096) if big else ((2,), 128)
    num_heads, num_kv_heads, head_dim = hidden // 128, max(1, hidden // 512), 128
    width = (num_heads + 2 * num_kv_heads) * head_dim
    for rows in rows_each:
        x, residual = (torch.randn((rows, hidden), device=device).to(BFLOAT16) for _ in range(2))
        weight = torch.ones(hidden, dtype=BFLOAT16, device=device)
        us = microseconds([partial(add_rms_norm, x, residual, weight, 1e-5)])
        yield bytes_figure(f"norm with residual, {rows} x {hidden}", us, 8 * rows * hidden, ceilings)
        gate_up = torch.randn((rows, 7 * hidden), device=device).to(BFLOAT16)
        yield bytes_figure(
            f"gate, {rows} x {7 * hidden}",
            microseconds([partial(gate_mul, gate_up, "silu")]),
            21 * rows * hidden,
            ceilings,
        )
        qkv = torch.randn((rows, width), device=device).to(BFLOAT16)
        blocks = -(-rows // BLOCK_SIZE)
        pool = torch.zeros((blocks, 1, 2, num_kv_heads, BLOCK_SIZE, head_dim), dtype=BFLOAT16, device=device)
        positions = torch.arange(rows, dtype=torch.int32, device=device)
        norm = torch.ones(head_dim, dtype=BFLOAT16, device=device)
        cos_sin = torch.ones((rows, head_dim), device=device)
        rope = RopeInputs(
            positions, positions.long(), cos_sin, num_heads, num_kv_heads, head_dim, norm, norm, 1e-6
        )
        us = microseconds([partial(rope_and_store, qkv, pool, 0, rope)])
        yield bytes_figure(f"rope and store, {rows} x {width}", us, 4 * rows * width, ceilings)


def block_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    block_bytes, n = (8 << 20, 64) if big else (4096, 2)
    pool = torch.zeros((n, block_bytes), dtype=torch.uint8, device=device)
    blocks = torch.randperm(n, device=device)
    packed = torch.empty_like(pool)
    us = microseconds([partial(pack_blocks, pool, blocks, packed)])
    yield bytes_figure(f"pack {n} blocks of {block_bytes} bytes", us, 2 * n * block_bytes, ceilings)
    us = microseconds([partial(block_checksums, pool, blocks)])
    yield bytes_figure(f"checksums of {n} blocks of {block_bytes} bytes", us, n * block_bytes, ceilings)


def sampling_figures(device: str, ceilings: Ceilings, big: bool) -> Iterator[Figure]:
    vocab_size = 151936 if big else 300
    for batch in (1, 32, 132) if big else (2,):
        logits = torch.randn((batch, vocab_size), device=device) * 3
        for name, top_k, top_p in (
            ("plain", 0, 1.0),
            ("top-p 0.9", 0, 0.9),
            ("top-k 20 and top-p 0.95", 20, 0.95),
        ):
            us = microseconds([partial(sample, logits, _rows(device, batch, vocab_size, top_k, top_p))])
            yield bytes_figure(
                f"sampling, {name}, {batch} x {vocab_size}", us, 4 * batch * vocab_size, ceilings
            )


def _rows(device: str, n: int, vocab_size: int, top_k: int, top_p: float) -> SamplingRows:
    def full(value: float, dtype: torch.dtype) -> Tensor:
        return torch.full((n,), value, dtype=dtype, device=device)

    zeros, ones = full(0, torch.float32), full(1, torch.float32)
    none = torch.zeros(n + 1, dtype=torch.int32, device=device)
    return SamplingRows(
        full(7, torch.int64), full(9, torch.int32), ones, full(top_k, torch.int32),
        full(top_p, torch.float32), zeros, ones, zeros, zeros,
        full(-1, torch.int32), torch.zeros((1, vocab_size), dtype=torch.int32, device=device), none, none[:0],
        none[:0], zeros[:0],
        edited=False, filtered=top_p < 1,
    )  # fmt: skip
