"""The places of states in the KV pool, for Triton kernels: see ../states.py and ../state_shape.py."""

from __future__ import annotations

import triton
import triton.language as tl

from ..state_shape import NO_STATE, PADDING

SEQS = 64  # whose ends are looked at together
IS_NEW, IS_PADDING = tl.constexpr(NO_STATE), tl.constexpr(PADDING)


@triton.jit
def sequence_of(token, query_start_loc, source, num_seqs, SEQS: tl.constexpr):
    """The token's sequence; -1 where it is padding."""
    before = 0
    for first in range(0, num_seqs, SEQS):
        seqs = first + tl.arange(0, SEQS)
        ends = tl.load(query_start_loc + 1 + seqs, mask=seqs < num_seqs, other=2147483647)
        before += tl.sum((ends <= token).to(tl.int32), 0)
    which = tl.load(source + before, mask=before < num_seqs, other=IS_PADDING)
    return tl.where(which == IS_PADDING, -1, before)


@triton.jit
def first_of_run(
    states, tables, seq, copy, kv, run, mask, stride_block, stride_plane, stride_head, TABLE: tl.constexpr,
    PLANES: tl.constexpr,
):  # fmt: skip
    """Pointers to the first numbers of some runs of a copy of a key-value head's states."""
    blocks = tl.load(tables + (seq * 3 + copy) * TABLE + run // PLANES, mask=mask, other=0)
    return states + blocks.to(tl.int64) * stride_block + (run % PLANES) * stride_plane + kv * stride_head
