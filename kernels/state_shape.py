"""The states that layers keep in place of keys and values: their sizes, and where they lie in the KV pool.
Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self

NO_STATE, PADDING = -1, -2
"""See ``states.StateInputs``."""


class StateShape(Protocol):
    """The state of one layer and sequence: float32 numbers, an equal part with each key-value head."""

    @property
    def num_floats(self) -> int: ...

    @property
    def row(self) -> int:
        """Numbers that lie side by side."""

    def of_head(self, num_kv_heads: int) -> Self:
        """The part that lies where one key-value head's keys and values do. Raises ValueError where heads
        have no equal parts."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The place of a layer's state in the blocks of a table: the bytes of the cache's layer ``layer``, from
    ``offset`` floats on in those of each head.

    A head's floats lie first in its keys of the first block, then in its values, then in the next block's.
    A row (``StateShape.row``) is never cut: what these *runs* have behind their last whole row is not used.
    """

    layer: int
    offset: int


def used_floats(shape: StateShape, run_bytes: int) -> int:
    """Floats of whole rows in a run. ``run_bytes``: of one head's keys in one block and layer. Raises
    ValueError where a run is shorter than a row."""
    if run_bytes < 4 * shape.row or run_bytes % 4:
        raise ValueError(
            f"a block has {run_bytes} bytes of a head's keys, and a state's rows {4 * shape.row}"
        )
    return run_bytes // 4 // shape.row * shape.row


def spaced_floats(shape: StateShape, num_kv_heads: int) -> int:
    """Floats from one layer's state to the next one's, in a head's bytes."""
    part = shape.of_head(num_kv_heads)
    return -(-part.num_floats // part.row) * part.row


def num_state_blocks(shape: StateShape, num_kv_heads: int, run_bytes: int, num_layers: int = 1) -> int:
    """Blocks for the states of as many layers. Raises as ``used_floats`` and ``StateShape.of_head``."""
    return -(-num_layers * spaced_floats(shape, num_kv_heads) // (2 * used_floats(shape, run_bytes)))
