"""The states of prompts, of a model some of whose layers have no keys and values but a state of all tokens so
far. Pure.

A state lies in blocks of the KV pool. A prompt has two copies: a chunk reads the one and writes the other, so
that a step that fails can be computed again. The state after a chunk's last full block stays in the prefix
cache as a *snapshot*, in blocks whose names follow from that block's hash: a later prompt begins behind the
longest prefix that has one. Cached blocks with no snapshot at their end are computed again, and get one: the
next prompt with the same beginning begins there. A snapshot may take as much memory as the keys and values of
thousands of tokens, so there is none where it would spare the computation of few.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ..engine.cache.block_manager import BlockManager
from ..engine.step.batch import BatchStates
from ..transport.messages.blocks import state_hashes

NO_STATE = -1  # see kernels/delta_net.py
WORTH = 4  # a snapshot of n blocks is to spare the computation of n / WORTH blocks of tokens


@dataclass(slots=True)
class PromptStates:
    """One prompt's. ``copies``: none where the model has no states."""

    copies: tuple[list[int], list[int]] = ([], [])
    cached: list[int] = field(default_factory=list)  # the snapshot from which its first chunk goes on
    branch: int = 0  # tokens that are cached, with a snapshot of fewer
    num_kept: int = 0  # blocks up to its newest snapshot
    num_booked: int = 0  # chunks

    def newest(self, num_in_flight: int) -> list[int]:
        """The copy that the last chunk writes."""
        return self.copies[(self.num_booked + num_in_flight - 1) % 2]


class ChunkStates(NamedTuple):
    """``snapshot`` gets the state after ``mark`` tokens of the chunk; none where it is empty."""

    read: list[int]
    write: list[int]
    snapshot: list[int]
    mark: int


class StateCache:
    """The states of a worker's prompts, ``num_blocks`` blocks each; 0: the model has none."""

    def __init__(self, blocks: BlockManager, num_blocks: int, block_size: int) -> None:
        self._blocks, self.num_blocks, self._block_size = blocks, num_blocks, block_size

    def hashes(self, block_hash: bytes) -> list[bytes]:
        """Those of the snapshot behind this block."""
        return state_hashes(block_hash, self.num_blocks)

    def with_snapshot(self, hashes: list[bytes]) -> list[bytes]:
        """Return the longest cached beginning of these blocks that another worker can go on behind, and the
        blocks of its snapshot."""
        count = self.match(hashes[: self._blocks.match_prefix(hashes)])
        return hashes[:count] + (self.hashes(hashes[count - 1]) if count else [])

    def match(self, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, which are all here, have a snapshot behind them."""
        if not self.num_blocks:
            return len(hashes)
        for count in range(len(hashes), 0, -1):
            first = state_hashes(hashes[count - 1], 1)
            if self._blocks.match_prefix(first) and self._is_whole(hashes[count - 1]):
                return count
        return 0

    def begin(self, hashes: Sequence[bytes], num_matched: int) -> PromptStates:
        """Those of a prompt that goes on behind ``num_matched`` of these blocks, which are all here. Room for
        two copies was checked."""
        if not self.num_blocks:
            return PromptStates()
        cached = self._blocks.acquire_prefix(self.hashes(hashes[num_matched - 1])) if num_matched else []
        both = self._blocks.allocate(2 * self.num_blocks)
        assert both is not None, "room was checked"
        branch = len(hashes) * self._block_size if self._is_worth(len(hashes) - num_matched) else 0
        copies = both[: self.num_blocks], both[self.num_blocks :]
        return PromptStates(copies, cached, branch, num_matched)

    def num_needed(self, hashes: Sequence[bytes]) -> int:
        """How many fewer blocks ``begin`` with these leaves available."""
        cached = self._blocks.num_idle_among(self.hashes(hashes[-1])) if hashes and self.num_blocks else 0
        return 2 * self.num_blocks + cached

    def of_chunk(
        self, states: PromptStates, num_in_flight: int, start: int, end: int, hashes: list[bytes], left: int
    ) -> ChunkStates | None:
        """Those of a prompt's next chunk. It gets a snapshot, unless there is one, it would be of little use,
        or there are no more than ``left`` blocks beside."""
        if not self.num_blocks:
            return None
        number = states.num_booked + num_in_flight
        read = states.copies[(number - 1) % 2] if number else states.cached
        num_full, snapshot = end // self._block_size, None
        mark = num_full * self._block_size - start
        wanted = mark > 0 and self._is_worth(num_full - states.num_kept)
        has_room = self.num_blocks + left <= self._blocks.num_available
        if wanted and has_room and not self._is_whole(hashes[num_full - 1]):
            snapshot = self._blocks.allocate(self.num_blocks)
        return ChunkStates(read, states.copies[number % 2], snapshot or [], mark if snapshot else 0)

    def book(self, states: PromptStates, chunk: ChunkStates, hashes: Sequence[bytes]) -> None:
        """The chunk has been computed; ``hashes``: of the prompt's full blocks so far, which are cached."""
        states.num_booked += 1
        self._blocks.release(states.cached)
        states.cached = []
        if chunk.snapshot:
            self._blocks.commit_all(chunk.snapshot, self.hashes(hashes[-1]), hashes[-1])
            states.num_kept = len(hashes)
        self.release(chunk)

    def release(self, chunk: ChunkStates | None) -> None:
        """The chunk is over, or has not been computed."""
        if chunk is not None:
            self._blocks.release(chunk.snapshot)

    def free(self, states: PromptStates) -> None:
        """The prompt is over here."""
        for blocks in held_states(states):
            self._blocks.release(blocks)
        states.copies, states.cached = ([], []), []

    def _is_worth(self, num_blocks: int) -> bool:
        """Whether these blocks of tokens are worth a snapshot behind them."""
        return WORTH * num_blocks >= max(1, self.num_blocks)

    def _is_whole(self, block_hash: bytes) -> bool:
        return self._blocks.match_prefix(self.hashes(block_hash)) == self.num_blocks


def held_states(states: PromptStates) -> list[list[int]]:
    """The blocks that are referenced for a prompt, without the snapshots of its chunks."""
    return [*states.copies, states.cached]


def batch_states(chunks: Sequence[ChunkStates]) -> BatchStates:
    """Those of a batch of these chunks."""
    rows = [[c.read or c.write, c.write, c.snapshot or c.write] for c in chunks]
    return BatchStates(
        np.array(rows, np.int32),
        np.array([0 if c.read else NO_STATE for c in chunks], np.int32),
        np.array([c.mark for c in chunks], np.int32),
    )
