"""Attention of one new token a sequence over its paged KV cache. Formula: attention_tiles.py.

Bytes: every cached key and value once, 2 * num_kv_heads * head_dim * itemsize a token; everything else is
small beside it. FLOPs: 4 * num_heads * head_dim a token, padded to 16 rows a KV head: far below what the
bytes take.

The heads of a group share their keys, so they are packed into the rows of one tile. The context is cut into
splits of ``SPLIT`` tokens at absolute positions, and a fixed number of programs takes (sequence, split, KV
head) items from a list that a small kernel writes once a step: one CUDA graph serves every context length,
and no sequence's bits depend on its batch. Splits are folded in ascending order within groups at absolute
positions, and the groups' results in ascending order: the program that finishes last in a group folds it, the
one that finishes a group last folds the groups. (Exact: one group, for that is the order of prefill.) In
large batches a group is one item, and where the partial results would outgrow their buffer, a sequence is,
whose splits are folded the same way in registers: fewer programs share it, the bits are the same.

float8: queries become float16, which holds every float8 value, so that no key or value is rounded on its way
to the product; a tile's values are taken in an order of dims in which a thread reads several at a time.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..interface import AttentionInputs
from .attention_tiles import (
    LOG2_E,
    TileShape,
    add_sinks,
    attend,
    fold,
    for_float8,
    layer_of,
    normalize,
    unknown_zero,
    window_of,
)
from .decode_plan import SPLIT, DecodePlan

REGISTERS = 65536  # of a multiprocessor
FOLDS_AT_ONCE = 4
ONE_GROUP = tl.constexpr(1 << 20)  # splits
EXACT_PROGRAMS_PER_SM = 2


def decode_tile(head_dim: int, group: int, itemsize: int = 2, fp8: bool = False) -> TileShape:
    """Sixteen rows are the smallest matrix product; stages are odd because a block number is loaded one stage
    ahead of its keys. ``itemsize``: bytes of an element of q; float32 has no tensor cores here, it is there
    for comparison. ``fp8``: so is the cache, whose keys and values take registers on their way to the
    product."""
    rows = max(16, triton.next_power_of_2(group))
    if itemsize == 4:
        return TileShape(rows, 32, 4, 3) if head_dim <= 256 else TileShape(rows, 16, 8, 3)
    if head_dim > 128:
        return TileShape(rows, 32, 4 if head_dim <= 256 else 8, 3 if fp8 else 5)
    return TileShape(rows, 64, 4, 5) if head_dim in (64, 128) else TileShape(rows, 32, 4, 7)


def programs_per_sm(head_dim: int, group: int, block_size: int) -> int:
    """What shared memory and registers of an H100 or H200 hold of ``decode_tile``'s programs, which get no
    more registers than that leaves each."""
    if head_dim <= 64 or head_dim > 256:
        return 4 if head_dim <= 64 else 1
    simple = group == triton.next_power_of_2(group) and block_size % 64 == 0
    return 3 if head_dim <= 128 and simple else 2


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
    dims, group = max(16, triton.next_power_of_2(head_dim)), num_heads // num_kv_heads
    registers = None  # named even where two programs leave enough: else the assembler spills for three
    if plan.group and q.itemsize == 2 and tile == decode_tile(head_dim, group, fp8=kv_scales is not None):
        at_once = programs_per_sm(head_dim, group, kv.shape[3])
        registers = min(248, REGISTERS // (at_once * tile.warps * 32) // 8 * 8)
    num_rows = len(plan.states) - len(inputs.seq_lens)
    _decode_kernel[(num_programs,)](
        q, kv, inputs.query_start_loc, inputs.seq_lens, inputs.block_tables, plan.items, plan.num_items,
        plan.arrived, plan.states, plan.sums, out, kv_scales, inputs.sinks, inputs.scale,
        len(inputs.seq_lens), num_rows, window_of(inputs), q.stride(0), inputs.block_tables.stride(0),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, ROWS=tile.rows, HEAD_DIM=head_dim,
        DIMS=dims, BLOCK_SIZE=kv.shape[3], KEYS=tile.keys, SPLIT=SPLIT, STAGES=tile.stages,
        WINDOW=inputs.sliding_window is not None, SOFTCAP=inputs.softcap, SCALED=kv_scales is not None,
        SINKS=inputs.sinks is not None, GROUP_SPLITS=plan.group or ONE_GROUP,
        FOLD_ROWS=triton.next_power_of_2(group), AT_ONCE=FOLDS_AT_ONCE,
        num_warps=tile.warps, maxnreg=registers, enable_fp_fusion=plan.group is not None,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "num_rows", "window", "stride_table"])
def _decode_kernel(
    q, kv, query_start_loc, seq_lens, tables, items, num_items, arrived, states, sums, out, kv_scales, sinks,
    scale,
    num_seqs, num_rows, window,
    stride_q, stride_table, stride_block, stride_value, stride_head, stride_token,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    SCALED: tl.constexpr, SINKS: tl.constexpr, GROUP_SPLITS: tl.constexpr, FOLD_ROWS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Program p takes the items p, p + num_programs, ... of every KV head; the heads of one split are
    neighbours, as in memory."""
    SPREAD: tl.constexpr = SCALED and ROWS < 64 and DIMS >= 64
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
        if SCALED:
            queries = for_float8(queries)
        positions = tl.where(rows < GROUP, length - 1, -1)
        m = tl.full([ROWS], float("-inf"), tl.float32)
        norm = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DIMS], tl.float32)
        if GROUP_SPLITS == ONE_GROUP:
            m, norm, acc = _attend_splits(
                queries, positions, kv + head * stride_head, tables + b.to(tl.int64) * stride_table,
                first, last, length, lowest, window,
                log2_scale * key_scale, stride_block, stride_value, stride_token,
                ROWS, HEAD_DIM, DIMS, BLOCK_SIZE, KEYS, SPLIT, STAGES, WINDOW, SOFTCAP, SPREAD,
            )  # fmt: skip
        else:
            for group in range(first // GROUP_SPLITS, tl.cdiv(last, GROUP_SPLITS)):
                begin = tl.maximum(first, group * GROUP_SPLITS)
                end = tl.minimum(last, (group + 1) * GROUP_SPLITS)
                m, norm, acc = _attend_splits(
                    queries, positions, kv + head * stride_head, tables + b.to(tl.int64) * stride_table,
                    begin, end, length, lowest, window,
                    log2_scale * key_scale, stride_block, stride_value, stride_token,
                    ROWS, HEAD_DIM, DIMS, BLOCK_SIZE, KEYS, SPLIT, STAGES, WINDOW, SOFTCAP, SPREAD,
                )  # fmt: skip
                # a sequence that is one item: registers do not suffice for a third state
                if last - first > 1:
                    own = rows + unknown_zero(query_start_loc)
                    place = (num_rows + b).to(tl.int64) * NUM_KV_HEADS * GROUP + head * GROUP + own
                    state = states + place * 2
                    total = sums + place[:, None] * HEAD_DIM + dims[None, :]
                    held = (own < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
                    if group > first // GROUP_SPLITS:
                        before_m = tl.load(state, mask=own < GROUP, other=float("-inf"))
                        before_norm = tl.load(state + 1, mask=own < GROUP, other=0.0)
                        before_acc = tl.load(total, mask=held, other=0.0)
                        m, norm, acc = fold(before_m, before_norm, before_acc, m, norm, acc)
                        tl.debug_barrier()
                    if (group + 1) * GROUP_SPLITS < last:
                        tl.store(state, m, mask=own < GROUP)
                        tl.store(state + 1, norm, mask=own < GROUP)
                        tl.store(total, acc, mask=held)
                        tl.debug_barrier()
        if SPREAD:
            acc = tl.reshape(tl.trans(tl.reshape(acc, [ROWS, DIMS // 32, 32]), (0, 2, 1)), [ROWS, DIMS])
        if (SCALED or HEAD_DIM >= 128) and ROWS < 64:  # a small tile that is short of registers all the same
            rows += unknown_zero(query_start_loc)
            heads = head * GROUP + rows
            real = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
            token = tl.load(query_start_loc + b, volatile=True).to(tl.int64)
        destination = out + (token * NUM_KV_HEADS + head) * GROUP * HEAD_DIM
        if row < 0:
            if SINKS:
                norm = add_sinks(m, norm, sinks, head * GROUP + rows, rows < GROUP)
            values = (normalize(norm, acc) * value_scale).to(out.dtype.element_ty)
            tl.store(destination + rows[:, None] * HEAD_DIM + dims[None, :], values, mask=real)
        else:
            at = row.to(tl.int64) * NUM_KV_HEADS * GROUP + heads
            tl.store(states + at * 2, m, mask=rows < GROUP)
            tl.store(states + at * 2 + 1, norm, mask=rows < GROUP)
            tl.store(sums + at[:, None] * HEAD_DIM + dims[None, :], acc, mask=real)
            tl.debug_barrier()  # all threads' stores come before the one that counts them
            lowest_split = lowest // SPLIT
            num_splits = tl.cdiv(length, SPLIT)
            group = first // GROUP_SPLITS
            begin = tl.maximum(group * GROUP_SPLITS, lowest_split)
            end = tl.minimum((group + 1) * GROUP_SPLITS, num_splits)
            top = row - first  # row of split 0, if it had one
            counter = arrived + (num_seqs + top + begin) * NUM_KV_HEADS + head
            if tl.atomic_add(counter, last - first, sem="acq_rel") == end - begin - (last - first):
                tl.store(counter, 0)
                step, is_last = 1, end - begin == num_splits - lowest_split
                if GROUP_SPLITS != ONE_GROUP:  # noqa: SIM102, known when it is compiled
                    if not is_last:
                        if last - first == 1:  # else the item was the group, and its row is the group's
                            few = tl.arange(0, FOLD_ROWS) + unknown_zero(query_start_loc)
                            inside = (few < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
                            group_m, group_norm, group_sums = _fold_rows(
                                states, sums, query_start_loc, head, top, begin, end, 1, lowest_split,
                                NUM_KV_HEADS, GROUP, HEAD_DIM, DIMS, FOLD_ROWS, AT_ONCE,
                            )  # fmt: skip
                            place = (top + begin).to(tl.int64) * NUM_KV_HEADS * GROUP + head * GROUP + few
                            tl.debug_barrier()  # all threads have read what lay there
                            tl.store(states + place * 2, group_m, mask=few < GROUP)
                            tl.store(states + place * 2 + 1, group_norm, mask=few < GROUP)
                            cells = place[:, None] * HEAD_DIM + dims[None, :]
                            tl.store(sums + cells, group_sums, mask=inside)
                            tl.debug_barrier()
                        step = GROUP_SPLITS
                        begin = lowest_split // GROUP_SPLITS
                        end = tl.cdiv(num_splits, GROUP_SPLITS)
                        folded = arrived + b * NUM_KV_HEADS + head
                        if tl.atomic_add(folded, 1, sem="acq_rel") == end - begin - 1:
                            tl.store(folded, 0)
                            is_last = True
                if is_last:
                    few = tl.arange(0, FOLD_ROWS) + unknown_zero(query_start_loc)
                    inside = (few < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
                    within = few[:, None] * HEAD_DIM + dims[None, :]
                    whole_m, whole_norm, whole = _fold_rows(
                        states, sums, query_start_loc, head, top, begin, end, step, lowest_split,
                        NUM_KV_HEADS, GROUP, HEAD_DIM, DIMS, FOLD_ROWS, AT_ONCE,
                    )  # fmt: skip
                    if SINKS:
                        whole_norm = add_sinks(whole_m, whole_norm, sinks, head * GROUP + few, few < GROUP)
                    values = (normalize(whole_norm, whole) * value_scale).to(out.dtype.element_ty)
                    tl.store(destination + within, values, mask=inside)


@triton.jit
def _attend_splits(
    q, positions, keys, table, first, last, length, lowest, window,
    scale, stride_block, stride_value, stride_token,
    ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, SPLIT: tl.constexpr, STAGES: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """The splits [first, last), folded in ascending order."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    for split in range(first, last):
        part_m, part_norm, part_acc = attend(
            q, positions,
            tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32),
            tl.zeros([ROWS, DIMS], tl.float32), keys, table,
            tl.maximum(split * SPLIT, lowest // KEYS * KEYS), tl.minimum((split + 1) * SPLIT, length),
            lowest, window, scale, stride_block, stride_value, stride_token,
            HEAD_DIM, DIMS, BLOCK_SIZE, KEYS, STAGES, WINDOW, SOFTCAP, MASKED=True, SPREAD=SPREAD,
        )  # fmt: skip
        m, norm, acc = fold(m, norm, acc, part_m, part_norm, part_acc)
    return m, norm, acc


@triton.jit
def _fold_rows(
    states, sums, zero, head, top, begin, end, step, lowest_split,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr,
    FOLD_ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The partial results of the splits ``step`` begin, ``step`` (begin + 1), ... before ``step`` end, folded
    in this order; of the first, that of ``lowest_split`` where it is later."""
    rows = tl.arange(0, FOLD_ROWS) + unknown_zero(zero)
    dims = tl.arange(0, DIMS)
    real = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    m = tl.full([FOLD_ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([FOLD_ROWS], tl.float32)
    acc = tl.zeros([FOLD_ROWS, DIMS], tl.float32)
    for j in tl.range(begin, end, loop_unroll_factor=AT_ONCE):  # unrolled: several loads under way at a time
        split = tl.maximum(j * step, lowest_split)
        at = (top + split).to(tl.int64) * NUM_KV_HEADS * GROUP + head * GROUP + rows
        part_m = tl.load(states + at * 2, mask=rows < GROUP, other=float("-inf"), cache_modifier=".cg")
        part_norm = tl.load(states + at * 2 + 1, mask=rows < GROUP, other=0.0, cache_modifier=".cg")
        place = sums + at[:, None] * HEAD_DIM + dims[None, :]
        part_acc = tl.load(place, mask=real, other=0.0, cache_modifier=".cg")
        m, norm, acc = fold(m, norm, acc, part_m, part_norm, part_acc)
    return m, norm, acc
