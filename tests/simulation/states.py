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
        before = _read(memory, row.read[j], j, layers) if row.read else 0
        if before not in folded:
            folded[before] = first_layer(before, tokens)
        after, start = folded[before], layers.start * size
        memory.write(block, start, _content(after[-1], j, layers, size))
        if row.mark:
            memory.write(row.snapshot[j], start, _content(after[row.mark - 1], j, layers, size))


def read_state(memory: Memory, blocks: Sequence[int]) -> int:
    """Return the state in a copy; if its layers and blocks do not agree, something that none is."""
    states = [_read(memory, block, j, range(NUM_LAYERS)) for j, block in enumerate(blocks)]
    return states[0] if states.count(states[0]) == len(states) else hash(tuple(states)) & MASK


def _read(memory: Memory, block: int, j: int, layers: range) -> int:
    values = memory.read(block, layers.start, layers.stop)
    state = values[0] - layers.start - j & MASK
    return state if values == _content(state, j, layers, memory.block_size) else hash(tuple(values)) & MASK


def _content(state: int, j: int, layers: range, size: int) -> list[int]:
    values: list[int] = []
    for layer in layers:
        values += [state + layer + j & MASK] * size
    return values
