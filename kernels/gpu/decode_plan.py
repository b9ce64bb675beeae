"""The list of work of decode attention, written on the device once a step: which program takes which split of
which sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..interface import AttentionInputs
from .attention_tiles import padded_seqs, window_of

SPLIT = 256  # tokens
GROUP_SPLITS = 4
MANY_ITEMS = 256  # for all KV heads, enough to keep a GPU's memory busy
MAX_PARTIALS = 4096  # splits of a step whose partial results are kept: 64 MiB for 32 heads of 128


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """
    items     int32 [any, 4]   sequence, first split, last split + 1, row of the partial result
                               (-1: none, this item is all of it)
    num_items int32 [1]
    arrived   int32 [num_seqs + rows, num_kv_heads]  groups of a sequence that are folded, and splits of the
                               group whose first partial result is in that row; zero between launches
    states    float32 [rows + num_seqs, num_heads, 2]   m and norm of each partial result; behind them, of
                               the groups so far of a sequence that is one item
    sums      float32 [rows + num_seqs, num_heads, head_dim]
    group     splits that are folded by themselves; None: all of a sequence
    """

    items: Tensor
    num_items: Tensor
    arrived: Tensor
    states: Tensor
    sums: Tensor
    group: int | None


def plan_decode(
    inputs: AttentionInputs,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    max_partials: int = MAX_PARTIALS,
    one_group: bool = False,
) -> DecodePlan:
    """Cuts the sequences with one query into items, on their device, without a look at them; those with more
    are prefill's. A length of 0 is a padding row, whose output is zero. An item is a group of splits if that
    makes ``MANY_ITEMS``, else a split. ``one_group``: with the folds of an exact prefill."""
    num_seqs, device = len(inputs.seq_lens), inputs.seq_lens.device
    most_splits = num_seqs * triton.cdiv(inputs.block_tables.shape[1] * block_size, SPLIT)
    rows = min(most_splits, max_partials)
    plan = DecodePlan(
        items=torch.empty((num_seqs + rows, 4), dtype=torch.int32, device=device),
        num_items=torch.empty(1, dtype=torch.int32, device=device),
        arrived=torch.empty((num_seqs + rows, num_kv_heads), dtype=torch.int32, device=device),
        states=torch.empty((rows + num_seqs, num_heads, 2), dtype=torch.float32, device=device),
        sums=torch.empty((rows + num_seqs, num_heads, head_dim), dtype=torch.float32, device=device),
        group=None if one_group else GROUP_SPLITS,
    )
    _plan_kernel[(num_seqs,)](
        inputs.query_start_loc, inputs.seq_lens, plan.items, plan.num_items, plan.arrived, num_seqs,
        window_of(inputs), rows, triton.cdiv(MANY_ITEMS, num_kv_heads),
        NUM_KV_HEADS=num_kv_heads, HEADS_PADDED=triton.next_power_of_2(num_kv_heads), SPLIT=SPLIT,
        GROUP_SPLITS=plan.group or 1, SEQS=padded_seqs(num_seqs), CHUNK=64, num_warps=4,
    )  # fmt: skip
    return plan


@triton.jit(do_not_specialize=["num_seqs", "window", "max_partials", "many"])
def _plan_kernel(
    query_start_loc, seq_lens, items, num_items, arrived, num_seqs, window, max_partials, many,
    NUM_KV_HEADS: tl.constexpr, HEADS_PADDED: tl.constexpr, SPLIT: tl.constexpr, GROUP_SPLITS: tl.constexpr,
    SEQS: tl.constexpr, CHUNK: tl.constexpr,
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
    groups = tl.cdiv(first_split + num_splits, GROUP_SPLITS) - first_split // GROUP_SPLITS
    step = tl.where(tl.sum(tl.where(divided, groups, 0), 0) >= many, GROUP_SPLITS, 1)
    divided = divided & ((step == 1) | (groups > 1))
    counts = tl.where(divided, tl.where(step == 1, num_splits, groups), tl.where(single, 1, 0))
    start = tl.sum(tl.where(i < b, counts, 0), 0)
    count = tl.sum(tl.where(i == b, counts, 0), 0)
    first = tl.sum(tl.where(i == b, first_split, 0), 0)
    splits = tl.sum(tl.where(i == b, num_splits, 0), 0)
    row = tl.sum(tl.where(i == b, rows_up_to - rows, 0), 0)
    is_divided = tl.sum(tl.where((i == b) & divided, 1, 0), 0) > 0
    aligned = tl.where(is_divided, first // step * step, first)
    step = tl.where(is_divided, step, splits)
    heads = tl.arange(0, HEADS_PADDED)
    for done in range(0, count, CHUNK):
        c = done + tl.arange(0, CHUNK)
        item = items + (start + c) * 4
        tl.store(item, tl.zeros([CHUNK], tl.int32) + b, mask=c < count)
        begin = tl.maximum(aligned + c * step, first)
        end = tl.minimum(aligned + (c + 1) * step, first + splits)
        tl.store(item + 1, begin, mask=c < count)
        tl.store(item + 2, end, mask=c < count)
        tl.store(item + 3, tl.where(is_divided, row + begin - first, -1), mask=c < count)
        counters = arrived + (num_seqs + row + begin - first)[:, None] * NUM_KV_HEADS + heads[None, :]
        none = tl.zeros([CHUNK, HEADS_PADDED], tl.int32)
        tl.store(counters, none, mask=(is_divided & (c < count))[:, None] & (heads < NUM_KV_HEADS)[None, :])
    tl.store(
        arrived + b * NUM_KV_HEADS + heads, tl.zeros([HEADS_PADDED], tl.int32), mask=heads < NUM_KV_HEADS
    )
    if b == num_seqs - 1:
        tl.store(num_items, start + count)
