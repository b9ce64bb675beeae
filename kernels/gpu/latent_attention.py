"""Attention over latent vectors, absorbed: all heads share one key a token, which is its value too. Formula:
attention_tiles.py.

Bytes of a decode step: every cached vector once for each 64 heads, head_dim itemsize a token; FLOPs: 4
num_heads head_dim for each pair of a query and a key.

Rows of a tile are the heads of a token, or of several tokens of a chunk; one kernel serves prompts and
decoding. A vector is read once and multiplied twice, in two halves of a power of two and the rest each: 576
is 2 (256 + 32). Steps of decode rows, if not exact, cut each context into ``splits`` ranges, which a second
kernel folds in ascending order; otherwise a program reads all of its context in order, in tiles at absolute
positions, and a row's bits depend on its own position and keys only.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import AttentionInputs
from .attention_tiles import LOG2_E, TileShape, fold, layer_of, normalize
from .prefill_attention import PrefillPlan, plan_prefill

MOST_SPLITS = 16
PLAN = "latent"  # its place in ``AttentionInputs.plans``


def latent_tile(itemsize: int = 2) -> TileShape:
    """``itemsize``: bytes of an element of q; float32 is there for comparison."""
    return TileShape(64, 32, 8, 3) if itemsize == 2 else TileShape(16, 16, 4, 1)


def latent_attention(
    q: Tensor,
    pool: Tensor,
    layer: int,
    inputs: AttentionInputs,
    num_sms: int,
    exact: bool,
    lse: Tensor | None = None,
) -> Tensor:
    """q [num_tokens, num_heads, head_dim] (rows may be strided) -> [num_tokens, num_heads * head_dim].
    ``lse``: written, see ``Kernels.partial_attention``; of decode rows alone."""
    assert inputs.sliding_window is None, "latent attention has no window"
    assert not inputs.softcap, "latent attention has no softcap"
    assert inputs.sinks is None, "latent attention has no sinks"
    assert inputs.kv_scales is None, "latent attention has no float8 cache"
    (num_tokens, num_heads, head_dim), vectors = q.shape, layer_of(pool, layer)
    assert q.stride()[1:] == (head_dim, 1)
    assert vectors.shape[1] == vectors.shape[2] == 1
    tile, half = latent_tile(q.itemsize), head_dim // 2
    group = min(num_heads, tile.rows)
    plan = inputs.plans.get(PLAN)
    if plan is None:
        plan = inputs.plans[PLAN] = plan_prefill(inputs, num_tokens, group, tile, singles=True)
    assert isinstance(plan, PrefillPlan)
    head_tiles = triton.cdiv(num_heads, group)
    out = torch.empty((num_tokens, num_heads * head_dim), dtype=q.dtype, device=q.device)
    states = sums = None
    splits = 1
    split = not exact and len(inputs.seq_lens) == num_tokens
    assert split or lse is None
    if split:
        splits = max(1, min(MOST_SPLITS, num_sms // (num_tokens * head_tiles)))
        states = torch.empty((num_tokens, splits, num_heads, 2), dtype=torch.float32, device=q.device)
        sums = torch.empty((num_tokens, splits, num_heads, head_dim), dtype=torch.float32, device=q.device)
    big = 1 << (half.bit_length() - 1)
    if half < 16 or big == half:
        big, small = max(16, triton.next_power_of_2(half)), 0
    else:
        small = max(16, triton.next_power_of_2(half - big))
    _latent_kernel[(len(plan.tiles) * head_tiles, splits)](
        q, vectors, inputs.query_start_loc, inputs.seq_lens, inputs.block_tables, plan.tiles, plan.num_tiles,
        out, states, sums, inputs.scale, splits, q.stride(0), inputs.block_tables.stride(0),
        vectors.stride(0), vectors.stride(3),
        HEADS=num_heads, GROUP=group, ROWS=tile.rows, TOKENS=tile.rows // group, HALF=half, BIG=big,
        SMALL=small, BLOCK_SIZE=vectors.shape[3], KEYS=tile.keys, STAGES=tile.stages, num_warps=tile.warps,
    )  # fmt: skip
    if split:
        _fold_kernel[(num_tokens, num_heads)](
            states, sums, out, lse, splits, HEADS=num_heads, HEAD_DIM=head_dim,
            DIMS=triton.next_power_of_2(head_dim), num_warps=4,
        )  # fmt: skip
    return out


@triton.jit
def _piece(at, mask, first: tl.constexpr, count: tl.constexpr, most: tl.constexpr):
    """Numbers [first, first + count) of each row at ``at`` [rows]: no more than ``most`` of them are real."""
    dims = tl.arange(0, count)
    return tl.load(
        at[:, None] + first + dims[None, :], mask=mask[:, None] & (dims < most)[None, :], other=0.0
    )


@triton.jit
def _store_piece(at, values, mask, first: tl.constexpr, count: tl.constexpr, most: tl.constexpr):
    dims = tl.arange(0, count)
    inside = mask[:, None] & (dims < most)[None, :]
    tl.store(at[:, None] + first + dims[None, :], values.to(at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["splits", "stride_table"])
def _latent_kernel(
    q, vectors, query_start_loc, seq_lens, tables, tiles, num_tiles, out, states, sums, scale, splits,
    stride_q, stride_table, stride_block, stride_token,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr, HALF: tl.constexpr,
    BIG: tl.constexpr, SMALL: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program a (tile, part of the heads, range of the context)."""
    HEAD_TILES: tl.constexpr = (HEADS + GROUP - 1) // GROUP
    REST: tl.constexpr = HALF - BIG
    place = tl.program_id(0) // HEAD_TILES
    if place >= tl.load(num_tiles):
        return
    b = tl.load(tiles + place * 2)
    first_query = tl.load(tiles + place * 2 + 1)
    chunk_start = tl.load(query_start_loc + b)
    chunk = tl.load(query_start_loc + b + 1) - chunk_start
    cached = tl.load(seq_lens + b) - chunk
    rows = tl.arange(0, ROWS)
    query = first_query + rows // GROUP
    head = tl.program_id(0) % HEAD_TILES * GROUP + rows % GROUP
    real = (query < chunk) & (rows < TOKENS * GROUP) & (head < HEADS)
    positions = tl.where(real, cached + query, -1)
    token = (chunk_start + query).to(tl.int64)
    at_q = q + token * stride_q + head * (2 * HALF)
    q1 = _piece(at_q, real, 0, BIG, HALF)
    q2 = _piece(at_q, real, HALF, BIG, HALF)
    if SMALL:
        q3 = _piece(at_q, real, BIG, SMALL, REST)
        q4 = _piece(at_q, real, HALF + BIG, SMALL, REST)
        acc3 = tl.zeros([ROWS, SMALL], tl.float32)
        acc4 = tl.zeros([ROWS, SMALL], tl.float32)
    begin = 0
    end = cached + tl.minimum(first_query + TOKENS, chunk)
    if sums is not None:
        size = tl.cdiv(tl.cdiv(end, splits), KEYS) * KEYS
        begin = tl.program_id(1) * size
        end = tl.minimum(end, begin + size)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    acc1 = tl.zeros([ROWS, BIG], tl.float32)
    acc2 = tl.zeros([ROWS, BIG], tl.float32)
    offsets = tl.arange(0, KEYS)
    table = tables + b.to(tl.int64) * stride_table
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        tokens = start + offsets
        inside = tokens < end
        blocks = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        at = vectors + blocks * stride_block + (tokens % BLOCK_SIZE) * stride_token
        k1 = _piece(at, inside, 0, BIG, HALF)
        k2 = _piece(at, inside, HALF, BIG, HALF)
        scores = tl.dot(q1, tl.trans(k1), input_precision="ieee")
        scores = tl.dot(q2, tl.trans(k2), scores, input_precision="ieee")
        if SMALL:
            k3 = _piece(at, inside, BIG, SMALL, REST)
            k4 = _piece(at, inside, HALF + BIG, SMALL, REST)
            scores = tl.dot(q3, tl.trans(k3), scores, input_precision="ieee")
            scores = tl.dot(q4, tl.trans(k4), scores, input_precision="ieee")
        visible = inside[None, :] & (tokens[None, :] <= positions[:, None])
        scores = tl.where(visible, scores * (scale * LOG2_E), float("-inf"))
        highest = tl.maximum(m, tl.max(scores, 1))
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - finite[:, None])
        shrink = tl.exp2(m - finite)
        norm = tl.fma(norm, shrink, tl.sum(weights, 1))
        held = weights.to(q1.dtype)
        acc1 = tl.dot(held, k1, acc1 * shrink[:, None], input_precision="ieee")
        acc2 = tl.dot(held, k2, acc2 * shrink[:, None], input_precision="ieee")
        if SMALL:
            acc3 = tl.dot(held, k3, acc3 * shrink[:, None], input_precision="ieee")
            acc4 = tl.dot(held, k4, acc4 * shrink[:, None], input_precision="ieee")
        m = highest
    if sums is None:
        to = out + (token * HEADS + head) * (2 * HALF)
        acc1 = normalize(norm, acc1)
        acc2 = normalize(norm, acc2)
        if SMALL:
            acc3 = normalize(norm, acc3)
            acc4 = normalize(norm, acc4)
    else:
        row = (token * splits + tl.program_id(1)) * HEADS + head
        tl.store(states + row * 2, m, mask=real)
        tl.store(states + row * 2 + 1, norm, mask=real)
        to = sums + row * (2 * HALF)
    _store_piece(to, acc1, real, 0, BIG, HALF)
    _store_piece(to, acc2, real, HALF, BIG, HALF)
    if SMALL:
        _store_piece(to, acc3, real, BIG, SMALL, REST)
        _store_piece(to, acc4, real, HALF + BIG, SMALL, REST)


@triton.jit(do_not_specialize=["splits"])
def _fold_kernel(
    states, sums, out, lse, splits, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIMS: tl.constexpr
):  # fmt: skip
    """One program a head of a token: its ranges in ascending order."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    one = tl.arange(0, 1)
    dims = tl.arange(0, DIMS)
    real = (dims < HEAD_DIM)[None, :]
    m = tl.full([1], float("-inf"), tl.float32)
    norm = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, DIMS], tl.float32)
    for split in range(splits):
        row = (token * splits + split) * HEADS + head + one
        part = tl.load(sums + row[:, None] * HEAD_DIM + dims[None, :], mask=real, other=0.0)
        m, norm, acc = fold(m, norm, acc, tl.load(states + row * 2), tl.load(states + row * 2 + 1), part)
    to = out + (token * HEADS + head + one)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(to, normalize(norm, acc).to(out.dtype.element_ty), mask=real)
    if lse is not None:
        tl.store(lse + token * HEADS + head + one, (m + tl.log2(tl.where(norm == 0.0, 1.0, norm))) / LOG2_E)
