"""The states of a model that has them, in the blocks of a worker's memory.

The state after some tokens is kv[0] of the last of them, folded from the state before and the step's tokens
alone. Block j of a copy has ``state + l + j`` in each slot of layer l, so that a stale layer or block shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from simulation.model import MASK, NUM_LAYERS, first_layer

from splitserve.engine.step.batch import Batch
from splitserve.prefill.states import NO_STATE

if TYPE_CHECKING:
    from simulation.memory import Memory


class RowStates(NamedTuple):
    """A row's blocks: nothing is read where it begins, and there may be no snapshot. See ``StateInputs``."""

    read: list[int]
    written: list[int]
    snapshot: list[int]
    mark: int


def row_states(batch: Batch) -> Iterator[RowStates]:
    """Yield those of each row; of a model without states none."""
    if (states := batch.states) is None:
        return
    rows = zip(states.tables.tolist(), states.source.tolist(), states.marks.tolist(), strict=True)
    for (first, second, snapshot), source, mark in rows:
        if source == NO_STATE:
            yield RowStates([], first, snapshot if mark else [], mark)
        else:
            read, written = (second, first) if source else (first, second)
            yield RowStates(read, written, snapshot if mark else [], mark)


def write_states(memory: Memory, row: RowStates, tokens: Sequence[int], layers: range) -> None:
    """Write these layers of a row's new state and of its snapshot, after the step's ``tokens``."""
    size, folded = memory.block_size, dict[int, list[int]]()
    for j, block in enumerate(row.written):
        for layer in layers:
            before = _value(memory, row.read[j], j, layer) if row.read else 0
            if before not in folded:
                folded[before] = first_layer(before, tokens)
            after, start = folded[before], layer * size
            memory.write(block, start, [after[-1] + layer + j & MASK] * size)
            if row.mark:
                memory.write(row.snapshot[j], start, [after[row.mark - 1] + layer + j & MASK] * size)


def read_state(memory: Memory, blocks: Sequence[int]) -> int:
    """Return the state in a copy; if its layers and blocks do not agree, something that none is."""
    values = [
        _value(memory, block, j, layer) for j, block in enumerate(blocks) for layer in range(NUM_LAYERS)
    ]
    return values[0] if len(set(values)) == 1 else hash(tuple(values)) & MASK


def _value(memory: Memory, block: int, j: int, layer: int) -> int:
    slots = memory.read(block, layer, layer + 1)
    return slots[0] - layer - j & MASK if slots.count(slots[0]) == len(slots) else hash(tuple(slots)) & MASK
