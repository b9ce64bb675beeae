"""Derives the inputs of a decode step on the device from the step before.

For a row fed by row j of the step before, which accepted ``accepted[j]`` tokens of it:

    token = sampled[j];  length = length[j] + accepted[j]
    position = length - 1;  slot = table[position // block_size] * block_size + position % block_size

Other rows bring token and length from the host. Block tables stay on the device, and the host sends the
entries that change. One program: a row's old length may be another row's new one, so all are read before any
is written. Bytes: 32 a row, and 12 an entry that changes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

HEADER = 4  # words before the columns: rows, changes, whether the lengths are those of the step before, none


def advance(
    packed: Tensor, sampled: Tensor, accepted: Tensor, token_ids: Tensor, positions: Tensor,
    seq_lens: Tensor, slot_mapping: Tensor, block_tables: Tensor, num_rows: int, block_size: int,
) -> None:  # fmt: skip
    """Write token_ids, positions, seq_lens int32 [num_rows], slot_mapping int64 [num_rows] and changed
    entries of block_tables int32 [any, max_blocks].

    packed    int32: HEADER words; a column of ``num_rows`` each of token_ids, fed_from (-1: the host knows
              token and length) and seq_lens; the changes, each an index into the tables as one run, and a
              block
    sampled   int32 [any], accepted int32 [any]: tokens that the step before has sampled, and how many of
              its own tokens count

    Rows behind those in use get length 0 and slot -1.
    """
    _advance_kernel[(1,)](
        packed, sampled, accepted, token_ids, positions, seq_lens, slot_mapping, block_tables,
        block_tables.stride(0), NUM_ROWS=num_rows, PADDED=triton.next_power_of_2(num_rows),
        BLOCK_SIZE=block_size, HEADER=HEADER, CHANGES=512, num_warps=4,
    )  # fmt: skip


@triton.jit
def _advance_kernel(
    packed, sampled, accepted, token_ids, positions, seq_lens, slot_mapping, block_tables, max_blocks,
    NUM_ROWS: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADER: tl.constexpr,
    CHANGES: tl.constexpr,
):  # fmt: skip
    num_seqs, num_changes, follows = tl.load(packed), tl.load(packed + 1), tl.load(packed + 2)
    row = tl.arange(0, PADDED)
    real = row < num_seqs
    columns = packed + HEADER + row
    fed_from = tl.load(columns + NUM_ROWS, mask=real, other=-1)
    token = tl.load(columns, mask=real, other=0)
    token = tl.load(sampled + fed_from, mask=fed_from >= 0, other=0) + tl.where(fed_from >= 0, 0, token)
    length = tl.load(columns + 2 * NUM_ROWS, mask=real, other=0)
    derived = (fed_from >= 0) & (follows != 0)
    before = tl.load(seq_lens + fed_from, mask=derived, other=0)
    before += tl.load(accepted + fed_from, mask=derived, other=0)
    length = tl.where(derived, before, length)
    changes = packed + HEADER + 3 * NUM_ROWS
    for start in range(0, num_changes, CHANGES):
        i = start + tl.arange(0, CHANGES)
        at = tl.load(changes + 2 * i, mask=i < num_changes, other=0)
        tl.store(block_tables + at, tl.load(changes + 2 * i + 1, mask=i < num_changes), mask=i < num_changes)
    tl.debug_barrier()  # all old lengths are read, and all entries are there
    position = tl.maximum(length - 1, 0)
    entry = block_tables + row.to(tl.int64) * max_blocks + position // BLOCK_SIZE
    block = tl.load(entry, mask=real, other=0).to(tl.int64)
    own = row < NUM_ROWS
    tl.store(token_ids + row, token, mask=own)
    tl.store(seq_lens + row, length, mask=own)
    tl.store(positions + row, position, mask=own)
    tl.store(slot_mapping + row, tl.where(real, block * BLOCK_SIZE + position % BLOCK_SIZE, -1), mask=own)
