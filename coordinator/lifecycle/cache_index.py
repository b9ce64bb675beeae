"""Which workers have a block in their prefix caches, over all workers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from .worker import WorkerRecord

MAX_LEVELS = 16


class Level(NamedTuple):
    """The workers that have a prompt cached up to and including one of its blocks."""

    block_hash: bytes
    holders: tuple[WorkerRecord, ...]  # of both roles, in the order in which they stored it


class CacheIndex:
    """For each block hash, the workers whose ``cached`` has it. Only this class changes ``cached``.

    A block that one worker has costs no more memory than its entry.
    """

    def __init__(self) -> None:
        self._holders: dict[bytes, tuple[WorkerRecord, ...]] = {}

    def __contains__(self, block_hash: bytes | None) -> bool:
        return block_hash in self._holders

    def __len__(self) -> int:
        return len(self._holders)

    def holders(self, block_hash: bytes) -> tuple[WorkerRecord, ...]:
        """Return the workers that have this block."""
        return self._holders.get(block_hash, ())

    def store(self, worker: WorkerRecord, hashes: Iterable[bytes]) -> None:
        """Note that the worker has these blocks."""
        cached, holders, alone = worker.cached, self._holders, (worker,)
        for block_hash in hashes:
            if block_hash not in cached:
                cached.add(block_hash)
                holders[block_hash] = holders.get(block_hash, ()) + alone

    def remove(self, worker: WorkerRecord, hashes: Iterable[bytes]) -> None:
        """Note that the worker has these blocks no more."""
        cached, holders = worker.cached, self._holders
        for block_hash in hashes:
            if block_hash in cached:
                cached.remove(block_hash)
                if left := tuple(w for w in holders[block_hash] if w is not worker):
                    holders[block_hash] = left
                else:
                    del holders[block_hash]

    def clear(self, worker: WorkerRecord) -> None:
        """Note that the worker has nothing cached, or is gone."""
        self.remove(worker, list(worker.cached))

    def levels(self, hashes: Sequence[bytes]) -> list[Level]:
        """Return how far how many workers have this prompt cached, at most ``MAX_LEVELS``, deepest first.

        ``hashes``: of all its full blocks. Caches evict leaves first, so those that have a block have all
        before it, and a level ends where the number of holders changes.
        """
        levels: list[Level] = []
        for block_hash in hashes:
            if not (holders := self.holders(block_hash)):
                break
            if levels and len(levels[-1].holders) == len(holders):
                levels.pop()
            levels.append(Level(block_hash, holders))
        return levels[:: -max(1, -(-len(levels) // MAX_LEVELS))]
