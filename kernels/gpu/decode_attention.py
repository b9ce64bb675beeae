"""Attention of one new token a sequence over its paged KV cache. Formula: attention_tiles.py.

Bytes: every cached key and value once, 2 * num_kv_heads * head_dim * itemsize a token; everything else is
small beside it. FLOPs: 4 * num_heads * head_dim a token, padded to 16 rows a KV head: far below what the
bytes take.

The heads of a group share their keys, so they are packed into the rows of one tile. The context is cut into
splits of ``SPLIT`` tokens at absolute positions, and a fixed number of programs takes (sequence, split, KV
head) items from a list that a small kernel writes once a step: one CUDA graph serves every context length,
and no sequence's bits depend on its batch. The program that finishes a (sequence, head) last folds all its
splits in ascending order. Where the partial results would outgrow their buffer, a sequence is one item, whose
splits are folded the same way in registers: fewer programs share it, the bits are the same.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import AttentionInputs
from .attention_tiles import (
    LOG2_E,
    TileShape,
    attend,
    fold,
    layer_of,
    normalize,
    padded_seqs,
    unknown_zero,
    window_of,
)

SPLIT = 256  # tokens
EXACT_PROGRAMS_PER_SM = 2
MAX_PARTIALS = (
    4096  # splits of a step whose partial results are kept: a million tokens, 64 MiB for 32 heads of 128
)


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """items     int32 [any, 4]   sequence, first split, last split + 1, row of the partial result (-1: none,
    this item is all of it) num_items int32 [1] arrived   int32 [num_seqs, num_kv_heads]  zero between
    launches states    float32 [rows, num_heads, 2]    m and norm of each partial result sums      float32
    [rows, num_heads, head_dim]
    """

    items: Tensor
    num_items: Tensor
    arrived: Tensor
    states: Tensor
    sums: Tensor


def decode_tile(head_dim: int, group: int, itemsize: int = 2, fp8: bool = False) -> TileShape:
    """Sixteen rows are the smallest matrix product; stages are odd because a block number is loaded one stage
    ahead of its keys. ``itemsize``: bytes of an element of q; float32 has no tensor cores here, it is there
    for comparison. ``fp8``: so is the cache, whose keys and values take registers on their way to the
    product."""
    rows = max(16, triton.next_power_of_2(group))
    if itemsize == 4:
        return TileShape(rows, 32, 4, 3)
    if head_dim > 128:
        return TileShape(rows, 32, 4, 3 if fp8 else 5)
    wide = head_dim == 64 or (head_dim == 128 and not fp8)
    return TileShape(rows, 64, 4, 5) if wide else TileShape(rows, 32, 4, 7)


def programs_per_sm(head_dim: int, group: int, block_size: int, dtype: torch.dtype) -> int:
    """What registers and shared memory of an H100 or H200 hold of ``decode_tile``'s programs."""
    fp8 = dtype.itemsize == 1
    if head_dim <= 64:
        return 3 if fp8 else 4
    simple = group == triton.next_power_of_2(group) and block_size % 64 == 0 and not fp8
    return 3 if head_dim <= 128 and simple else 2


def plan_decode(
    inputs: AttentionInputs,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    max_partials: int = MAX_PARTIALS,
) -> DecodePlan:
    """Cuts the sequences with one query into items, on their device, without a look at them; those with more
    are prefill's. A length of 0 is a padding row, whose output is zero."""
    num_seqs, device = len(inputs.seq_lens), inputs.seq_lens.device
    most_splits = num_seqs * triton.cdiv(inputs.block_tables.shape[1] * block_size, SPLIT)
    rows = min(most_splits, max_partials)
    plan = DecodePlan(
        items=torch.empty((num_seqs + rows, 4), dtype=torch.int32, device=device),
        num_items=torch.empty(1, dtype=torch.int32, device=device),
        arrived=torch.empty((num_seqs, num_kv_heads), dtype=torch.int32, device=device),
        states=torch.empty((rows, num_heads, 2), dtype=torch.float32, device=device),
        sums=torch.empty((rows, num_heads, head_dim), dtype=torch.float32, device=device),
    )
    _plan_kernel[(num_seqs,)](
        inputs.query_start_loc, inputs.seq_lens, plan.items, plan.num_items, plan.arrived, num_seqs,
        window_of(inputs), rows,
        NUM_KV_HEADS=num_kv_heads, HEADS_PADDED=triton.next_power_of_2(num_kv_heads), SPLIT=SPLIT,
        SEQS=padded_seqs(num_seqs), CHUNK=64, num_warps=4,
    )  # fmt: skip
    return plan


def decode_attention(
    out: Tensor,
    q: Tensor,
    pool: Tensor,
    layer: int,
    inputs: AttentionInputs,
    plan: DecodePlan,
    num_programs: int,
    tile: TileShape,
) -> None:
    """q [num_tokens, num_heads, head_dim] (rows may be strided) -> out [num_tokens, num_heads * head_dim], of
    sequences with one query."""
    (num_heads, head_dim), num_kv_heads = q.shape[1:], pool.shape[3]
    kv, kv_scales = layer_of(pool, layer), None if inputs.kv_scales is None else inputs.kv_scales[layer]
    assert q.stride()[1:] == (head_dim, 1)
    assert out.is_contiguous()
    assert num_heads // num_kv_heads <= tile.rows, "the heads of a group are the rows of one tile"
    dims = max(16, triton.next_power_of_2(head_dim))
    _decode_kernel[(num_programs,)](
        q, kv, inputs.query_start_loc, inputs.seq_lens, inputs.block_tables, plan.items, plan.num_items,
        plan.arrived, plan.states,
        plan.sums, out, kv_scales, inputs.scale, window_of(inputs), q.stride(0),
        inputs.block_tables.stride(0),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        NUM_KV_HEADS=num_kv_heads, GROUP=num_heads // num_kv_heads, ROWS=tile.rows, HEAD_DIM=head_dim,
        DIMS=dims,
        BLOCK_SIZE=kv.shape[3], KEYS=tile.keys, SPLIT=SPLIT, STAGES=tile.stages,
        WINDOW=inputs.sliding_window is not None,
        SCALED=kv_scales is not None,
        AT_ONCE=max(1, 8192 // (dims * tile.rows)), num_warps=tile.warps,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "window", "max_partials"])
def _plan_kernel(
    query_start_loc, seq_lens, items, num_items, arrived, num_seqs, window, max_partials,
    NUM_KV_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, SPLIT: tl.constexpr, SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program a sequence; each looks at the lengths of all."""
    b = tl.program_id(0)
    i = tl.arange(0, SEQS)
    lengths = tl.load(seq_lens + i, mask=i < num_seqs, other=0)
    starts = tl.load(query_start_loc + i, mask=i < num_seqs, other=0)
    single = tl.load(query_start_loc + i + 1, mask=i < num_seqs, other=0) - starts == 1
    first_split = tl.maximum(lengths - window, 0) // SPLIT
    num_splits = tl.cdiv(lengths, SPLIT) - first_split
    rows = tl.where(single & (num_splits > 1), num_splits, 0)
    rows_up_to = tl.cumsum(rows, 0)
    divided = (rows > 0) & (rows_up_to <= max_partials)
    counts = tl.where(divided, num_splits, tl.where(single, 1, 0))
    start = tl.sum(tl.where(i < b, counts, 0), 0)
    count = tl.sum(tl.where(i == b, counts, 0), 0)
    first = tl.sum(tl.where(i == b, first_split, 0), 0)
    splits = tl.sum(tl.where(i == b, num_splits, 0), 0)
    row = tl.sum(tl.where(i == b, rows_up_to - rows, 0), 0)
    is_divided = tl.sum(tl.where((i == b) & divided, 1, 0), 0) > 0
    step = tl.where(is_divided, 1, splits)
    for done in range(0, count, CHUNK):
        c = done + tl.arange(0, CHUNK)
        item = items + (start + c) * 4
        tl.store(item, tl.zeros([CHUNK], tl.int32) + b, mask=c < count)
        tl.store(item + 1, first + c, mask=c < count)
        tl.store(item + 2, first + c + step, mask=c < count)
        tl.store(item + 3, tl.where(is_divided, row + c, -1), mask=c < count)
    heads = tl.arange(0, HEADS_PADDED)
    tl.store(
        arrived + b * NUM_KV_HEADS + heads, tl.zeros([HEADS_PADDED], tl.int32), mask=heads < NUM_KV_HEADS
    )
    if b == num_seqs - 1:
        tl.store(num_items, start + count)


@triton.jit(do_not_specialize=["window", "stride_table"])
def _decode_kernel(
    q, kv, query_start_loc, seq_lens, tables, items, num_items, arrived, states, sums, out, kv_scales, scale,
    window,
    stride_q, stride_table, stride_block, stride_value, stride_head, stride_token,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SCALED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program p takes the items p, p + num_programs, ... of every KV head; the heads of one split are
    neighbours, as in memory."""
    dims = tl.arange(0, DIMS)
    log2_scale = scale * LOG2_E
    for work in range(tl.program_id(0), tl.load(num_items) * NUM_KV_HEADS, tl.num_programs(0)):
        head = work % NUM_KV_HEADS
        item = items + (work // NUM_KV_HEADS) * 4
        b = tl.load(item)
        first = tl.load(item + 1)
        last = tl.load(item + 2)
        row = tl.load(item + 3)
        length = tl.load(seq_lens + b)
        lowest = tl.maximum(length - window, 0)
        key_scale = 1.0
        value_scale = 1.0
        if SCALED:
            key_scale = tl.load(kv_scales + head)
            value_scale = tl.load(kv_scales + NUM_KV_HEADS + head)
        rows = tl.arange(0, ROWS)
        heads = head * GROUP + rows
        real = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
        token = tl.load(query_start_loc + b).to(tl.int64)
        queries = tl.load(
            q + token * stride_q + heads[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0
        )
        positions = tl.where(rows < GROUP, length - 1, -1)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        norm = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        for split in range(first, last):
            part_m, part_norm, part_acc = attend(
                queries, positions,
                tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32),
                tl.zeros([ROWS, DIMS], tl.float32),
                kv + head * stride_head, tables + b.to(tl.int64) * stride_table,
                tl.maximum(split * SPLIT, lowest // KEYS * KEYS), tl.minimum((split + 1) * SPLIT, length),
                lowest, window,
                log2_scale * key_scale, stride_block, stride_value, stride_token,
                HEAD_DIM, DIMS, BLOCK_SIZE, KEYS, STAGES, WINDOW, MASKED=True,
            )  # fmt: skip
            m, norm, acc = fold(m, norm, acc, part_m, part_norm, part_acc)
        if (SCALED or HEAD_DIM > 128) and ROWS < 64:  # a small tile that is short of registers all the same
            rows += unknown_zero(query_start_loc)
            heads = head * GROUP + rows
            real = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
            token = tl.load(query_start_loc + b, volatile=True).to(tl.int64)
        destination = out + (token * NUM_KV_HEADS * GROUP + heads[:, None]) * HEAD_DIM + dims[None, :]
        if row < 0:
            tl.store(destination, (normalize(norm, acc) * value_scale).to(out.dtype.element_ty), mask=real)
        else:
            at = row.to(tl.int64) * NUM_KV_HEADS * GROUP + heads
            tl.store(states + at * 2, m, mask=rows < GROUP)
            tl.store(states + at * 2 + 1, norm, mask=rows < GROUP)
            tl.store(sums + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=real)
            tl.debug_barrier()  # all threads' stores come before the one that counts them
            lowest_split = lowest // SPLIT
            num_splits = tl.cdiv(length, SPLIT) - lowest_split
            counter = arrived + b * NUM_KV_HEADS + head
            if tl.atomic_add(counter, 1, sem="acq_rel") == num_splits - 1:
                m = tl.full([ROWS], float("-inf"), tl.float32)
                norm = tl.zeros([ROWS], tl.float32)
                acc = tl.zeros([ROWS, DIMS], tl.float32)
                top = row - (first - lowest_split)
                for j in tl.range(
                    0, num_splits, loop_unroll_factor=AT_ONCE
                ):  # unrolled: several loads under way at a time
                    at = (top + j).to(tl.int64) * NUM_KV_HEADS * GROUP + heads
                    part_m = tl.load(
                        states + at * 2, mask=rows < GROUP, other=float("-inf"), cache_modifier=".cg"
                    )
                    part_norm = tl.load(
                        states + at * 2 + 1, mask=rows < GROUP, other=0.0, cache_modifier=".cg"
                    )
                    part_acc = tl.load(
                        sums + at[:, None] * HEAD_DIM + dims[None, :],
                        mask=real,
                        other=0.0,
                        cache_modifier=".cg",
                    )
                    m, norm, acc = fold(m, norm, acc, part_m, part_norm, part_acc)
                tl.store(
                    destination, (normalize(norm, acc) * value_scale).to(out.dtype.element_ty), mask=real
                )
                tl.store(counter, 0)
