"""The workers of one role that take new work: who has room, and who of them comes into question. Pure.

They are kept in the order of their rank, which changes with what they have to do, so that to find the best of very many means to look at
the first few.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain, islice
from math import inf
from typing import Generic, Protocol, TypeVar

MOST_COMPARED = 16
GOLDEN = 2_654_435_761  # 2^32 by the golden ratio: the multiples of it spread evenly over any range


class Ranked(Protocol):
    """A worker, as far as this goes. See worker.py."""

    number: int
    rank: float
    room: int
    cached: set[bytes]

    def rank_of_equals(self, num_tokens: int) -> float: ...


W = TypeVar("W", bound=Ranked)


class OpenWorkers(Generic[W]):
    """Iterates over them in the order in which they came."""

    def __init__(self) -> None:
        self._workers: list[W] = []
        self._ranked: list[tuple[float, int, W]] = []  # sorted by rank, then by number
        self.most_room = -1
        """Nobody has room for more; perhaps nobody has for as much."""
        self.sum_of_ranks = 0.0
        self.num_changes = 0  # who is here has changed so often

    def __iter__(self) -> Iterator[W]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, worker: W) -> None:
        """It has come, after all that are here."""
        self.num_changes += 1
        self._workers.append(worker)
        insort(self._ranked, (worker.rank, worker.number, worker))
        self.sum_of_ranks += worker.rank
        self.most_room = max(self.most_room, worker.room)

    def remove(self, worker: W) -> None:
        """It is gone, or takes no more."""
        self.num_changes += 1
        self._workers.remove(worker)
        del self._ranked[bisect_left(self._ranked, (worker.rank, worker.number))]
        self.sum_of_ranks -= worker.rank

    def changed(self, worker: W, rank_before: float) -> None:
        """It has more to do, or less."""
        if worker.room > self.most_room:
            self.most_room = worker.room
        if worker.rank != rank_before:
            del self._ranked[bisect_left(self._ranked, (rank_before, worker.number))]
            insort(self._ranked, (worker.rank, worker.number, worker))
            self.sum_of_ranks += worker.rank - rank_before

    def has_room(self, num_tokens: int) -> bool:
        """Whether anybody has room for a new sequence of this length."""
        if num_tokens > self.most_room:
            return False
        if any(worker.room >= num_tokens for worker in self._workers):
            return True
        self.most_room = max((worker.room for worker in self._workers), default=-1)
        return False

    def with_room(self, num_tokens: int) -> list[W]:
        """All that have."""
        return [worker for worker in self._workers if worker.room >= num_tokens] if self.has_room(num_tokens) else []

    def best(self, num_tokens: int, turn: int, most: int | None = MOST_COMPARED) -> list[W]:
        """Of these, the best by rank with all that may be as good for this sequence; of more than ``most`` that many, others in another
        turn: among very many that are nearly alike, as on an idle cluster, who is the very best matters less than finding out costs."""
        if not self.has_room(num_tokens):
            return []
        begin = next(i for i, (_, _, worker) in enumerate(self._ranked) if worker.room >= num_tokens)
        end = bisect_left(self._ranked, (self._ranked[begin][2].rank_of_equals(num_tokens), inf), begin + 1)
        equals = self._ranked[begin:end]
        if most is None or len(equals) <= most:
            return [worker for _, _, worker in equals if worker.room >= num_tokens]
        first = turn * GOLDEN % len(equals)
        in_turn = chain(islice(equals, first, None), islice(equals, first))
        return list(islice((worker for _, _, worker in in_turn if worker.room >= num_tokens), most))

    def caching(self, block_hash: bytes, num_tokens: int) -> list[W]:
        """Of these, who has this block."""
        return [worker for worker in self._workers if block_hash in worker.cached and worker.room >= num_tokens]
