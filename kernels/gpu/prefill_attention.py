"""Causal attention of chunks of new tokens over their sequences' paged KV caches. Formula:
attention_tiles.py.

FLOPs: 4 * num_heads * head_dim for each pair of a query and a key that it sees; a chunk of n tokens after c
cached ones has n c + n (n + 1) / 2 pairs. Bytes: each tile of queries reads all keys that it sees; at 128
rows that is far below what the FLOPs take.

The chunk's own keys and values are already in the cache. A tile is ``rows // group`` tokens with all heads of
a group, so a key is read once for all of them. A small kernel lists the tiles of all chunks once a step,
those with the longest context first, so that the last programs to finish are short ones. The middle of a
tile's keys, which every row sees, runs without a mask.

``split_folds``: every row's keys are folded in the same splits as decode folds them, in the same tile shape:
a row's bits are then the same whether its token was prefilled, in whatever chunk, or decoded.
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
    add_sinks,
    attend,
    fold,
    for_float8,
    layer_of,
    normalize,
    padded_seqs,
    unknown_zero,
    window_of,
)
from .decode_plan import SPLIT


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """
    tiles     int32 [any, 2]   sequence, first of the tile's queries within its chunk
    num_tiles int32 [1]
    """

    tiles: Tensor
    num_tiles: Tensor
    tile: TileShape


def prefill_tile(head_dim: int, itemsize: int = 2, fp8: bool = False) -> TileShape:
    """``itemsize``: bytes of an element of q; float32 has no tensor cores here, it is there for
    comparison. ``fp8``: so is the cache."""
    if itemsize == 4:
        return TileShape(32, 32 if head_dim <= 128 else 16, 4 if head_dim <= 256 else 8, 2)
    if head_dim > 256:  # the queries alone would fill half of the shared memory with 128 rows
        return TileShape(64, 16, 8, 3)
    if head_dim == 128 and not fp8:
        return TileShape(128, 128, 8, 2)
    return TileShape(128, 64 if head_dim <= 128 else 32, 8, 3)


def exact_tile(head_dim: int, itemsize: int = 2, fp8: bool = False) -> TileShape:
    """For prefill and decode alike, with ``split_folds``: 64 rows are the smallest product of a warp group.
    Head dim 256 over a float8 cache, and 512, leave no registers for that one, and take the smaller product
    of a warp."""
    if itemsize == 4:
        return prefill_tile(head_dim, itemsize)
    if head_dim <= 64:
        return TileShape(64, 64, 4, 3)
    if head_dim <= 128:
        return TileShape(64, 16, 4, 7 if fp8 else 5)
    if head_dim > 256:
        return TileShape(32, 16, 8, 3)
    return TileShape(32, 32, 8, 3) if fp8 else TileShape(64, 16, 8, 3)


def plan_prefill(
    inputs: AttentionInputs, num_tokens: int, group: int, tile: TileShape, singles: bool
) -> PrefillPlan:
    """Lists the tiles on the device, without a look at the lengths: room for as many as ``num_tokens`` can
    make. ``singles``: chunks of one token too, which decode would take."""
    num_seqs, device = len(inputs.seq_lens), inputs.seq_lens.device
    tokens = tile.rows // group
    assert tokens > 0, f"{group} heads share a KV head; a tile has {tile.rows} rows"
    plan = PrefillPlan(
        tiles=torch.empty((num_tokens // tokens + num_seqs, 2), dtype=torch.int32, device=device),
        num_tiles=torch.empty(1, dtype=torch.int32, device=device),
        tile=tile,
    )
    seqs = padded_seqs(num_seqs)
    _plan_kernel[(num_seqs,)](
        inputs.query_start_loc, inputs.seq_lens, plan.tiles, plan.num_tiles, num_seqs, tokens,
        0 if singles else 1,
        SEQS=seqs, CHUNK=max(1, 2048 // seqs), num_warps=4,
    )  # fmt: skip
    return plan


def prefill_attention(
    out: Tensor,
    q: Tensor,
    pool: Tensor,
    layer: int,
    inputs: AttentionInputs,
    plan: PrefillPlan,
    split_folds: bool,
) -> None:
    """q [num_tokens, num_heads, head_dim] (rows may be strided) -> out [num_tokens, num_heads * head_dim], of
    the planned chunks."""
    (num_heads, head_dim), num_kv_heads = q.shape[1:], pool.shape[3]
    kv, kv_scales = layer_of(pool, layer), None if inputs.kv_scales is None else inputs.kv_scales[layer]
    assert q.stride()[1:] == (head_dim, 1)
    assert out.is_contiguous()
    group, tile = num_heads // num_kv_heads, plan.tile
    _prefill_kernel[(len(plan.tiles) * num_kv_heads,)](
        q, kv, inputs.query_start_loc, inputs.seq_lens, inputs.block_tables, plan.tiles, plan.num_tiles, out,
        kv_scales, inputs.sinks,
        inputs.scale, window_of(inputs), q.stride(0), inputs.block_tables.stride(0),
        kv.stride(0), kv.stride(1), kv.stride(2), kv.stride(3),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, ROWS=tile.rows, TOKENS=tile.rows // group, HEAD_DIM=head_dim,
        DIMS=max(16, triton.next_power_of_2(head_dim)), BLOCK_SIZE=kv.shape[3], KEYS=tile.keys,
        SPLIT=SPLIT if split_folds else 0, STAGES=tile.stages, WINDOW=inputs.sliding_window is not None,
        SOFTCAP=inputs.softcap, SCALED=kv_scales is not None, SINKS=inputs.sinks is not None,
        num_warps=tile.warps, enable_fp_fusion=not split_folds,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "tokens", "too_short"])
def _plan_kernel(
    query_start_loc, seq_lens, tiles, num_tiles, num_seqs, tokens, too_short, SEQS: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program a sequence: a tile's place in the list is the number of tiles whose context is longer (or
    equal, of an earlier one)."""
    b = tl.program_id(0)
    i = tl.arange(0, SEQS)
    starts = tl.load(query_start_loc + i, mask=i < num_seqs, other=0)
    chunks = tl.load(query_start_loc + i + 1, mask=i < num_seqs, other=0) - starts
    cached = tl.load(seq_lens + i, mask=i < num_seqs, other=0) - chunks
    counts = tl.where(chunks > too_short, tl.cdiv(chunks, tokens), 0)
    own_cached = tl.sum(tl.where(i == b, cached, 0), 0)
    own_count = tl.sum(tl.where(i == b, counts, 0), 0)
    for done in range(0, own_count, CHUNK):
        j = done + tl.arange(0, CHUNK)
        end = own_cached + (j + 1) * tokens
        beyond = tl.maximum(end[:, None] - cached[None, :], 0)
        longer = tl.maximum(counts[None, :] - beyond // tokens, 0)
        equal = (
            (beyond > 0) & (beyond % tokens == 0) & (beyond // tokens <= counts[None, :]) & (i < b)[None, :]
        )
        place = tl.sum(longer + equal.to(tl.int32), 1)
        tl.store(tiles + place * 2, tl.zeros([CHUNK], tl.int32) + b, mask=j < own_count)
        tl.store(tiles + place * 2 + 1, j * tokens, mask=j < own_count)
    if b == 0:
        tl.store(num_tiles, tl.sum(counts, 0))


@triton.jit(do_not_specialize=["window", "stride_table"])
def _prefill_kernel(
    q, kv, query_start_loc, seq_lens, tables, tiles, num_tiles, out, kv_scales, sinks, scale,
    window,
    stride_q, stride_table, stride_block, stride_value, stride_head, stride_token,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SCALED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One program a (tile, KV head)."""
    place = tl.program_id(0) // NUM_KV_HEADS
    head = tl.program_id(0) % NUM_KV_HEADS
    if place >= tl.load(num_tiles):
        return
    b = tl.load(tiles + place * 2)
    first_query = tl.load(tiles + place * 2 + 1)
    chunk_start = tl.load(query_start_loc + b)
    chunk = tl.load(query_start_loc + b + 1) - chunk_start
    cached = tl.load(seq_lens + b) - chunk
    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIMS)
    query = first_query + rows // GROUP
    real_row = (query < chunk) & (rows < TOKENS * GROUP)
    feature = (head * GROUP + rows % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    at = (chunk_start + query).to(tl.int64)[:, None] * stride_q + feature
    queries = tl.load(q + at, mask=real_row[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    if SCALED:
        queries = for_float8(queries)
    positions = tl.where(real_row, cached + query, -1)

    first_position = cached + first_query
    last_position = cached + tl.minimum(first_query + TOKENS, chunk) - 1
    lowest = tl.maximum(first_position - window + 1, 0)
    # from here to `diagonal` every row sees every key
    middle = tl.cdiv(tl.maximum(last_position - window + 1, 0), KEYS) * KEYS
    diagonal = tl.maximum((first_position + 1) // KEYS * KEYS, middle)
    key_scale = 1.0
    value_scale = 1.0
    if SCALED:
        key_scale = tl.load(kv_scales + head)
        value_scale = tl.load(kv_scales + NUM_KV_HEADS + head)
    keys = kv + head * stride_head
    table = tables + b.to(tl.int64) * stride_table
    log2_scale = scale * LOG2_E * key_scale
    m = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIMS], tl.float32)
    if SPLIT == 0:
        m, norm, acc = _attend_three(
            queries, positions, m, norm, acc, keys, table, lowest // KEYS * KEYS, middle, diagonal,
            last_position + 1, lowest, window,
            log2_scale, stride_block, stride_value, stride_token,
            HEAD_DIM, DIMS, BLOCK_SIZE, KEYS, STAGES, WINDOW, SOFTCAP,
        )  # fmt: skip
    else:
        for split in range(lowest // SPLIT, tl.cdiv(last_position + 1, SPLIT)):
            part_m, part_norm, part_acc = _attend_three(
                queries, positions,
                tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32),
                tl.zeros([ROWS, DIMS], tl.float32),
                keys, table, tl.maximum(lowest // KEYS * KEYS, split * SPLIT), middle, diagonal,
                tl.minimum(last_position + 1, (split + 1) * SPLIT), lowest, window,
                log2_scale, stride_block, stride_value, stride_token,
                HEAD_DIM, DIMS, BLOCK_SIZE, KEYS, STAGES, WINDOW, SOFTCAP,
            )  # fmt: skip
            m, norm, acc = fold(m, norm, acc, part_m, part_norm, part_acc)
    rows += unknown_zero(query_start_loc)
    query = first_query + rows // GROUP
    real_row = (query < chunk) & (rows < TOKENS * GROUP)
    feature = (head * GROUP + rows % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    at = (chunk_start + query).to(tl.int64)[:, None] * (NUM_KV_HEADS * GROUP * HEAD_DIM) + feature
    if SINKS:
        norm = add_sinks(m, norm, sinks, head * GROUP + rows % GROUP, real_row)
    values = (normalize(norm, acc) * value_scale).to(out.dtype.element_ty)
    tl.store(out + at, values, mask=real_row[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def _attend_three(
    q, positions, m, norm, acc, keys, table, begin, middle, diagonal, end, lowest, window,
    scale, stride_block, stride_value, stride_token,
    HEAD_DIM: tl.constexpr, DIMS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """The keys [begin, end): the window's ragged beginning, the middle that every row sees, and the
    diagonal, with the edges in smaller tiles."""
    EDGE: tl.constexpr = KEYS if KEYS < 64 else 64
    middle = tl.minimum(tl.maximum(middle, begin), end)
    diagonal = tl.minimum(tl.maximum(diagonal, middle), end)
    if WINDOW:
        m, norm, acc = attend(
            q, positions, m, norm, acc, keys, table, begin, middle, lowest, window,
            scale, stride_block, stride_value, stride_token,
            HEAD_DIM, DIMS, BLOCK_SIZE, EDGE, STAGES, WINDOW, SOFTCAP, MASKED=True,
        )  # fmt: skip
    m, norm, acc = attend(
        q, positions, m, norm, acc, keys, table, middle, diagonal, lowest, window,
        scale, stride_block, stride_value, stride_token,
        HEAD_DIM, DIMS, BLOCK_SIZE, KEYS, STAGES, WINDOW, SOFTCAP, MASKED=False,
    )  # fmt: skip
    return attend(
        q, positions, m, norm, acc, keys, table, diagonal, end, lowest, window,
        scale, stride_block, stride_value, stride_token,
        HEAD_DIM, DIMS, BLOCK_SIZE, EDGE, STAGES, WINDOW, SOFTCAP, MASKED=True,
    )  # fmt: skip
