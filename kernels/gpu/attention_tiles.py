"""Softmax attention of some query rows over a range of cached keys, tile by tile: what decode and prefill
have in common.

    score[r, t] = scale q[r] . k[t], or softcap tanh of that / softcap
    m = max_t score;  norm = sum_t 2^(score - m);  acc = sum_t 2^(score - m) v[t];  out = acc / norm
    (scores in units of log2 e)

The state (m, norm, acc) is built up in tiles that begin at absolute multiples of ``KEYS``, so a row's bits
depend on its own position and keys only. A tile that shows a row nothing leaves its state as it was, bit for
bit. ``fold`` joins the states of two ranges of keys, earlier and later; decode and exact prefill fold ranges
of a fixed size in ascending order and so agree. Each fma is spelled out; exact launches forbid others: the
compiler would join scale * (q . k) - m in a tile without a mask, but not in a masked one. (Milakov and
Gimelshein, 2018; Dao et al., FlashAttention, 2022.)

A pool's layer is [num_blocks, 2 (K, V), num_kv_heads, block_size, head_dim]; with float8_e4m3fn, times one
scale a head for K and V.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from ..interface import AttentionInputs

LOG2_E = tl.constexpr(1.4426950408889634)
NO_WINDOW = 2**30


@dataclass(frozen=True, slots=True)
class TileShape:
    """``rows`` query rows (tokens times the heads of a group), ``keys`` cached tokens a tile; threads in
    warps of 32; tiles in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def layer_of(pool: Tensor, layer: int) -> Tensor:
    """[num_blocks, 2, num_kv_heads, block_size, head_dim] of one layer, checked for what the kernels take for
    granted."""
    view = pool[:, layer]
    assert view.stride(-1) == 1, "a head's values must be contiguous"
    return view


def window_of(inputs: AttentionInputs) -> int:
    return NO_WINDOW if inputs.sliding_window is None else inputs.sliding_window


def padded_seqs(num_seqs: int) -> int:
    """Few sizes, for each is compiled by itself."""
    return 64 if num_seqs <= 64 else max(1024, triton.next_power_of_2(num_seqs))


@triton.jit
def attend(
    q,  # [ROWS, DIMS]
    positions,  # int32 [ROWS]; -1: a padding row, sees nothing
    m,
    norm,
    acc,
    keys,  # pointer to the head's keys of block 0
    table,  # pointer to the sequence's block table
    begin,  # a multiple of KEYS
    end,
    lowest,  # the first position that any row sees
    window,
    scale,  # of the scores, in units of log2 e and of K
    stride_block,
    stride_value,  # from a key to its value
    stride_token,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,  # HEAD_DIM padded to a power of two
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,  # in the scores' own units; 0: none
    MASKED: tl.constexpr,  # False: every row sees every key in [begin, end)
    SPREAD: tl.constexpr = False,
):
    """The state of the rows after the keys [begin, end). ``SPREAD``: column c of ``acc`` is the dim
    c % 32 * (DIMS / 32) + c // 32. The product of four warps gives a thread every 32nd column of a value:
    these then lie side by side in memory."""
    offsets = tl.arange(0, KEYS)
    dims = tl.arange(0, DIMS)
    for start in tl.range(begin, end, KEYS, num_stages=STAGES):
        tokens = start + offsets
        inside = (tokens >= lowest) & (tokens < end)
        if BLOCK_SIZE % KEYS == 0:  # one block a tile: a scalar address and offsets that never change
            block = tl.load(table + start // BLOCK_SIZE).to(tl.int64)
            base = keys + block * stride_block + (start % BLOCK_SIZE) * stride_token
            within = (offsets * stride_token)[:, None] + dims[None, :]
        else:
            if not MASKED and KEYS % BLOCK_SIZE == 0:  # whole blocks: places in them that never change
                blocks = tl.load(table + start // BLOCK_SIZE + offsets // BLOCK_SIZE).to(tl.int64)
                slots = offsets % BLOCK_SIZE
            else:
                blocks = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
                slots = tokens % BLOCK_SIZE
            base = keys
            within = (blocks * stride_block + slots * stride_token)[:, None] + dims[None, :]
        if MASKED:
            k = tl.load(base + within, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
        elif DIMS != HEAD_DIM:
            k = tl.load(base + within, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            k = tl.load(base + within)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision="ieee")
        unit = scale if SOFTCAP == 0.0 else 1.0
        if SOFTCAP != 0.0:
            cap = SOFTCAP * LOG2_E
            scores = cap - 2 * cap / (tl.exp2(scores * (scale * (2 / SOFTCAP))) + 1)
        if MASKED:
            visible = inside[None, :] & (tokens[None, :] <= positions[:, None])
            if WINDOW:
                visible = visible & (tokens[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, float("-inf"))
        highest = tl.maximum(m, tl.max(scores, 1) * unit)
        finite = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(tl.fma(scores, unit, -finite[:, None]))
        shrink = tl.exp2(m - finite)
        norm = tl.fma(norm, shrink, tl.sum(weights, 1))
        if MASKED:
            v = tl.load(
                base + stride_value + within, mask=inside[:, None] & (dims < HEAD_DIM)[None, :], other=0.0
            )
        elif DIMS != HEAD_DIM:
            v = tl.load(base + stride_value + within, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            v = tl.load(base + stride_value + within)
        if SPREAD:
            v = tl.reshape(tl.trans(tl.reshape(v, [KEYS, 32, DIMS // 32]), (0, 2, 1)), [KEYS, DIMS])
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc * shrink[:, None], input_precision="ieee")
        m = highest
    return m, norm, acc


@triton.jit
def fold(m, norm, acc, later_m, later_norm, later_acc):
    """The state over both ranges of keys. With an empty range on either side: the other's, bit for bit."""
    highest = tl.maximum(m, later_m)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    shrink = tl.exp2(m - base)
    later_shrink = tl.exp2(later_m - base)
    norm = tl.fma(later_norm, later_shrink, norm * shrink)
    acc = tl.fma(later_acc, later_shrink[:, None], acc * shrink[:, None])
    return highest, norm, acc


@triton.jit
def add_sinks(m, norm, sinks, heads, real):
    """The rows' sums with their heads' sinks, which have no value. A row that saw no key stays without."""
    score = tl.load(sinks + heads, mask=real, other=float("-inf"))
    empty = norm == 0.0
    return norm + tl.where(empty, 0.0, tl.exp2(tl.fma(score, LOG2_E, -tl.where(empty, 0.0, m))))


@triton.jit
def normalize(norm, acc):
    """Output rows; zero where a row saw no key."""
    return acc / tl.where(norm == 0.0, 1.0, norm)[:, None]


@triton.jit
def for_float8(q):
    """Queries of a float8 cache, in float16 where they are bfloat16: it holds every float8 value, and
    to bfloat16 a GPU converts these in one more instruction each."""
    if q.dtype == tl.bfloat16:
        q = tl.minimum(tl.maximum(q.to(tl.float32), -65504.0), 65504.0).to(tl.float16)
    return q


@triton.jit
def unknown_zero(zero):
    """0, but the compiler cannot know (``zero``: a pointer to one), so that what is made with it is made here
    and nowhere before. The addresses of a tile's output would otherwise be held through all loops over keys,
    which need the registers."""
    return tl.load(zero, volatile=True)
