"""A candidate: prefill attention of a Hopper GPU, for plain causal attention over a cache of the queries'
own 16-bit type. It compiles for sm_90 and has not yet run; gpu_check checks and times it. Formula, FLOPs and
tiles: kernels/gpu/prefill_attention.py.

Two groups of four warps take 64 rows each. Another warp loads keys and values by descriptor into a ring of
stages, from a tile's last block of keys, which needs a mask, to its first. A stage holds a block's keys and
the values of the block before it. A group starts the products of both at once, and computes the softmax while
the second runs. In Gluon, because Triton waits for each product before it goes on.
(Shah et al., FlashAttention-3, 2024.)
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ...kernels.gpu.attention_tiles import TileShape
from ...kernels.gpu.prefill_attention import plan_prefill
from ...kernels.interface import AttentionInputs
from .kernel_checks import ALLOWED, Check
from .kernel_inputs import LAYER, attention_case, relative_error

ROWS, KEYS, STAGES = 128, 64, 4
REGISTERS = 240, 24  # a thread, of the second group and of the loads; the first group has what is left, 240
LOG2_E = gl.constexpr(1.4426950408889634)
CASES = (  # tokens in the cache, the last of them queries; heads of a group, KV heads, head dim
    ([700, 64, 333], [500, 64, 300], 4, 2, 128), ([1029, 200, 5], [129, 199, 5], 2, 2, 128),
    ([515], [515], 7, 1, 128), ([1500, 65], [2, 65], 4, 1, 64), ([9000], [4000], 1, 1, 64),
)  # fmt: skip


class HopperPrefill:
    """Called as ``Kernels.paged_attention``, for the steps that it serves."""

    def serves(self, q: Tensor, pool: Tensor, inputs: AttentionInputs) -> bool:
        plain = inputs.sliding_window is None and not inputs.softcap and inputs.sinks is None
        fits = q.shape[2] in (64, 128) and pool.shape[4] % KEYS == 0 and pool.is_contiguous()
        return plain and fits and q.dtype == pool.dtype and q.itemsize == 2

    def __call__(self, q: Tensor, pool: Tensor, layer: int, inputs: AttentionInputs) -> Tensor:
        (num_tokens, num_heads, head_dim) = q.shape
        _, num_layers, _, num_kv_heads, block_size, _ = pool.shape
        group, box = num_heads // num_kv_heads, [KEYS, head_dim]
        if type(self).__name__ not in inputs.plans:
            tile = TileShape(ROWS, KEYS, 4, STAGES)
            inputs.plans[type(self).__name__] = plan_prefill(inputs, num_tokens, group, tile, singles=True)
        plan = inputs.plans[type(self).__name__]
        dtype = gl.bfloat16 if q.dtype == torch.bfloat16 else gl.float16
        layout = gl.NVMMASharedLayout.get_default_for(box, dtype)
        rows = TensorDescriptor(pool, [pool.numel() // head_dim, head_dim], [head_dim, 1], box, layout)
        out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
        layer_rows = 2 * num_kv_heads * block_size
        _hopper_prefill_kernel[(len(plan.tiles) * num_kv_heads,)](
            q, rows, inputs.query_start_loc, inputs.seq_lens, inputs.block_tables, plan.tiles, plan.num_tiles,
            out, inputs.scale, q.stride(0), inputs.block_tables.stride(0),
            layer * layer_rows, num_layers * layer_rows, num_kv_heads * block_size,
            NUM_KV_HEADS=num_kv_heads, GROUP=group, TOKENS=ROWS // group, HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size, KEYS=KEYS, STAGES=STAGES, REGISTERS=REGISTERS, num_warps=4,
        )  # fmt: skip
        return out


def checks() -> Iterator[Check]:
    for case in CASES:
        yield Check(f"Gluon's prefill, {case}", ALLOWED[torch.bfloat16], partial(_error, *case))


def _error(
    lengths: list[int], queries: list[int], group: int, num_kv_heads: int, head_dim: int, device: str
) -> float:
    case = attention_case(
        lengths, queries, group=group, num_kv_heads=num_kv_heads, head_dim=head_dim, block_size=64,
        device=device,
    )  # fmt: skip
    out = HopperPrefill()(case.q, case.pool, LAYER, case.inputs)
    return relative_error(out.cpu(), case.exact)


@gluon.jit(do_not_specialize=["stride_table"])
def _hopper_prefill_kernel(
    q, kv, query_start_loc, seq_lens, tables, tiles, num_tiles, out, scale, stride_q, stride_table,
    layer_rows, block_rows, value_rows,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program a (tile, KV head). ``kv``: the pool as rows of [head_dim]; ``..._rows``: of it, from its
    beginning to the layer's, from a block to the next, from a key to its value."""
    place = gl.program_id(0) // NUM_KV_HEADS
    head = gl.program_id(0) % NUM_KV_HEADS
    if place < gl.load(num_tiles):
        b = gl.load(tiles + place * 2)
        first_query = gl.load(tiles + place * 2 + 1)
        chunk_start = gl.load(query_start_loc + b)
        chunk = gl.load(query_start_loc + b + 1) - chunk_start
        cached = gl.load(seq_lens + b) - chunk
        end = cached + gl.minimum(first_query + TOKENS, chunk)
        num_blocks = (end + KEYS - 1) // KEYS
        num_masked = gl.maximum(num_blocks - (cached + first_query + 1) // KEYS, 1)
        keys = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, KEYS, HEAD_DIM], kv.layout)
        values = gl.allocate_shared_memory(q.dtype.element_ty, [STAGES, KEYS, HEAD_DIM], kv.layout)
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        for i in gl.static_range(STAGES):
            mbarrier.init(full.index(i), count=1)
            mbarrier.init(empty.index(i), count=2)
        fence_async_shared()
        table = tables + b.to(gl.int64) * stride_table
        key_row = layer_rows + head * BLOCK_SIZE
        log2_scale = scale * LOG2_E
        gl.warp_specialize(
            [
                (_attend, (
                    q, out, keys, values, full, empty, log2_scale, stride_q, head, chunk_start, chunk, cached,
                    first_query, num_blocks, num_masked, 0,
                    NUM_KV_HEADS, GROUP, TOKENS, HEAD_DIM, KEYS, STAGES,
                )),
                (_attend, (
                    q, out, keys, values, full, empty, log2_scale, stride_q, head, chunk_start, chunk, cached,
                    first_query, num_blocks, num_masked, 64,
                    NUM_KV_HEADS, GROUP, TOKENS, HEAD_DIM, KEYS, STAGES,
                )),
                (_load, (
                    kv, table, keys, values, full, empty, num_blocks, block_rows, key_row,
                    key_row + value_rows, HEAD_DIM, BLOCK_SIZE, KEYS, STAGES,
                )),
            ],
            [4, 1], REGISTERS,
        )  # fmt: skip


@gluon.jit
def _load(
    kv, table, keys, values, full, empty, num_blocks, block_rows, key_row, value_row,
    HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    before = value_row  # of a block's values; the first stage has none that matter, the last no such keys
    for turn in range(num_blocks + 1):
        stage = turn % STAGES
        start = gl.maximum(num_blocks - 1 - turn, 0) * KEYS
        row = gl.load(table + start // BLOCK_SIZE) * block_rows + start % BLOCK_SIZE
        mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(full.index(stage), 4 * KEYS * HEAD_DIM)
        tma.async_copy_global_to_shared(kv, [row + key_row, 0], full.index(stage), keys.index(stage))
        tma.async_copy_global_to_shared(kv, [before, 0], full.index(stage), values.index(stage))
        before = row + value_row


@gluon.jit
def _attend(
    q, out, keys, values, full, empty, scale, stride_q, head, chunk_start, chunk, cached, first_query,
    num_blocks, num_masked,
    FIRST_ROW: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr,
    HEAD_DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 rows of the tile. A row of no query has the values of none; it is not stored."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    MEMORY: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    at, real = _places(head, chunk, first_query, stride_q, FIRST_ROW, GROUP, TOKENS, HEAD_DIM, MEMORY)
    queries = gl.load(q + chunk_start.to(gl.int64) * stride_q + at, mask=real, other=0.0)
    queries = gl.convert_layout(queries, gl.DotOperandLayout(0, SCORES, 2))
    rows = FIRST_ROW + gl.arange(0, 64, layout=gl.SliceLayout(1, SCORES))
    positions = cached + first_query + rows // GROUP
    m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, SCORES))
    norm = gl.zeros([64], gl.float32, gl.SliceLayout(1, SCORES))
    acc = gl.zeros([64, HEAD_DIM], gl.float32, SUMS)

    last = num_blocks - 1
    mbarrier.wait(full.index(0), 0)
    zero = gl.zeros([64, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(queries, keys.index(0).permute((1, 0)), zero, use_acc=False)
    mbarrier.arrive(empty.index(0), count=1)
    weights, m, norm, _ = _softmax(scores, m, norm, scale, last, positions, KEYS, True, SCORES)
    mbarrier.wait(full.index(1), 0)
    if num_blocks * KEYS > cached + chunk:  # values of no token may be anything, and 0 times that too
        block = values.index(1)
        tokens = last * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(1, MEMORY))
        found = block.load(MEMORY)
        block.store(gl.where((tokens < cached + chunk)[:, None], found, gl.zeros_like(found)))
        fence_async_shared()
    for turn in range(1, num_masked):
        weights, m, norm, acc = _turn(
            turn, last - turn, queries, weights, m, norm, acc, scale, positions, keys, values, full, empty,
            KEYS, STAGES, True, SCORES, SUMS,
        )  # fmt: skip
    for turn in range(num_masked, num_blocks):
        weights, m, norm, acc = _turn(
            turn, last - turn, queries, weights, m, norm, acc, scale, positions, keys, values, full, empty,
            KEYS, STAGES, False, SCORES, SUMS,
        )  # fmt: skip
    operand = gl.convert_layout(weights.to(q.dtype.element_ty), gl.DotOperandLayout(0, SUMS, 2))
    acc = warpgroup_mma(operand, values.index(num_blocks % STAGES), acc)

    width: gl.constexpr = NUM_KV_HEADS * GROUP * HEAD_DIM
    at, real = _places(head, chunk, first_query, width, FIRST_ROW, GROUP, TOKENS, HEAD_DIM, SUMS)
    acc = acc / gl.convert_layout(norm, gl.SliceLayout(1, SUMS))[:, None]
    gl.store(out + chunk_start.to(gl.int64) * width + at, acc.to(out.dtype.element_ty), mask=real)


@gluon.jit
def _turn(
    turn, block, queries, weights, m, norm, acc, scale, positions, keys, values, full, empty,
    KEYS: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr, SUMS: gl.constexpr,
):  # fmt: skip
    """The scores of ``block``; what the block before it, whose weights are given, adds to ``acc``."""
    stage = turn % STAGES
    operand = gl.convert_layout(weights.to(queries.dtype), gl.DotOperandLayout(0, SUMS, 2))
    zero = gl.zeros([64, KEYS], gl.float32, SCORES)
    scores = warpgroup_mma(queries, keys.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    acc = warpgroup_mma(operand, values.index(stage), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    weights, m, norm, shrink = _softmax(scores, m, norm, scale, block, positions, KEYS, MASKED, SCORES)
    # the next stage is awaited here, for past this wait the assembler moves no part of the softmax, as it
    # would past that for the product
    mbarrier.wait(full.index((turn + 1) % STAGES), (turn + 1) // STAGES & 1)
    acc, operand = warpgroup_mma_wait(0, deps=(acc, operand))
    mbarrier.arrive(empty.index(stage), count=1)
    return weights, m, norm, acc * gl.convert_layout(shrink, gl.SliceLayout(1, SUMS))[:, None]


@gluon.jit
def _softmax(
    scores, m, norm, scale, block, positions,
    KEYS: gl.constexpr, MASKED: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    if MASKED:
        tokens = block * KEYS + gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(tokens[None, :] <= positions[:, None], scores, float("-inf"))
    highest = gl.maximum(m, gl.max(scores, 1) * scale)
    finite = highest
    if MASKED:
        finite = gl.where(highest == float("-inf"), 0.0, highest)
    weights = gl.exp2(scores * scale - finite[:, None])
    shrink = gl.exp2(m - finite)
    return weights, highest, norm * shrink + gl.sum(weights, 1), shrink


@gluon.jit
def _places(
    head, chunk, first_query, stride,
    FIRST_ROW: gl.constexpr, GROUP: gl.constexpr, TOKENS: gl.constexpr, HEAD_DIM: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Offsets of the rows' values from the chunk's first token, and which rows are there."""
    rows = FIRST_ROW + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT))
    query = first_query + rows // GROUP
    feature = (head * GROUP + rows % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    real = (query < chunk) & (rows < TOKENS * GROUP)
    return query.to(gl.int64)[:, None] * stride + feature, real[:, None]
