"""The workers of one role that take new work: whether one has room, and which are candidates. Pure.

They are kept sorted by rank, which changes with what they have to do, so that finding the best of many means
to look at the first few.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, islice
from math import inf
from typing import Generic, Protocol, TypeVar

MAX_COMPARED = 16
GOLDEN = 2_654_435_761  # 2^32 by the golden ratio: its multiples spread evenly over any range


class Ranked(Protocol):
    """What is needed of a worker. See worker.py."""

    number: int
    rank: float
    room: int
    cached: set[bytes]

    def max_competing_rank(self, num_tokens: int) -> float: ...


W = TypeVar("W", bound=Ranked)


class OpenWorkers(Generic[W]):
    """Iterates over the workers in the order in which they came."""

    def __init__(self) -> None:
        self._workers: list[W] = []
        self._ranked: list[tuple[float, int, W]] = []  # sorted by rank, then by number
        self.max_room = -1  # upper bound of the workers' room, in tokens
        self.sum_of_ranks = 0.0
        self.version = 0  # incremented whenever a worker is added or removed

    def __iter__(self) -> Iterator[W]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, worker: W) -> None:
        """Add a worker that came after all that are here."""
        self.version += 1
        self._workers.append(worker)
        insort(self._ranked, (worker.rank, worker.number, worker))
        self.sum_of_ranks += worker.rank
        self.max_room = max(self.max_room, worker.room)

    def remove(self, worker: W) -> None:
        """Remove a worker that is gone, or takes no new work."""
        self.version += 1
        self._workers.remove(worker)
        del self._ranked[bisect_left(self._ranked, (worker.rank, worker.number))]
        self.sum_of_ranks -= worker.rank

    def changed(self, worker: W, rank_before: float) -> None:
        """Note that a worker's room or rank has changed."""
        if worker.room > self.max_room:
            self.max_room = worker.room
        if worker.rank != rank_before:
            del self._ranked[bisect_left(self._ranked, (rank_before, worker.number))]
            insort(self._ranked, (worker.rank, worker.number, worker))
            self.sum_of_ranks += worker.rank - rank_before

    def has_room(self, num_tokens: int) -> bool:
        """Whether any worker has room for a new sequence of this length."""
        if num_tokens > self.max_room:
            return False
        if any(worker.room >= num_tokens for worker in self._workers):
            return True
        self.max_room = max((worker.room for worker in self._workers), default=-1)
        return False

    def with_room(self, num_tokens: int) -> list[W]:
        """Return all workers that have room for a new sequence of this length."""
        return (
            [worker for worker in self._workers if worker.room >= num_tokens]
            if self.has_room(num_tokens)
            else []
        )

    def best(self, num_tokens: int, turn: int, limit: int | None = MAX_COMPARED) -> list[W]:
        """Return the workers with room that may be the best for this sequence, if none has a prefix of it
        cached.

        Where more than ``limit`` may be, return as many of them, others in another ``turn``: among many
        workers that are nearly alike, as in an idle cluster, finding the very best costs more than it brings.
        """
        if not self.has_room(num_tokens):
            return []
        begin = next(i for i, (_, _, worker) in enumerate(self._ranked) if worker.room >= num_tokens)
        end = bisect_left(
            self._ranked, (self._ranked[begin][2].max_competing_rank(num_tokens), inf), begin + 1
        )
        equals = self._ranked[begin:end]
        if limit is None or len(equals) <= limit:
            return [worker for _, _, worker in equals if worker.room >= num_tokens]
        first = turn * GOLDEN % len(equals)
        in_turn = chain(islice(equals, first, None), islice(equals, first))
        return list(islice((worker for _, _, worker in in_turn if worker.room >= num_tokens), limit))

    def caching(self, block_hash: bytes, num_tokens: int) -> list[W]:
        """Return the workers with room that have this block cached."""
        return [
            worker for worker in self._workers if block_hash in worker.cached and worker.room >= num_tokens
        ]
