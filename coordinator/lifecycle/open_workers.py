"""The workers of one role that take new work. Pure."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import nlargest
from itertools import chain
from math import inf

from .cache_index import Level
from .worker import WorkerRecord, hash64, shuffled

MAX_COMPARED = 16
FEW_HOLDERS = 64  # up to this number they are sorted; above, all workers are looked at by rank
GOLDEN = 2_654_435_761  # 2^32 by the golden ratio: its multiples spread evenly over any range


class OpenWorkers:
    """The workers of one role that take new work, in the order in which they came.

    They are also kept sorted by rank, so that finding the best of many means looking at the first few.
    """

    def __init__(self) -> None:
        self._workers: list[WorkerRecord] = []
        self._ranked: list[tuple[float, int, WorkerRecord]] = []  # sorted by rank, then by number
        self.max_room = -1  # upper bound of the workers' room, in tokens
        self.sum_of_ranks = 0.0
        self.version = 0  # incremented whenever a worker is added or removed

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, worker: WorkerRecord) -> None:
        """Add a worker that came after all that are here."""
        self.version += 1
        self._workers.append(worker)
        insort(self._ranked, (worker.rank, worker.number, worker))
        self.sum_of_ranks += worker.rank
        self.max_room = max(self.max_room, worker.room)

    def remove(self, worker: WorkerRecord) -> None:
        """Remove a worker that is gone, or takes no new work."""
        self.version += 1
        self._workers.remove(worker)
        del self._ranked[bisect_left(self._ranked, (worker.rank, worker.number))]
        self.sum_of_ranks -= worker.rank

    def changed(self, worker: WorkerRecord, rank_before: float) -> None:
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

    def with_room(self, num_tokens: int) -> list[WorkerRecord]:
        """Return all workers that have room for a new sequence of this length."""
        if not self.has_room(num_tokens):
            return []
        return [worker for worker in self._workers if worker.room >= num_tokens]

    def best(
        self,
        num_tokens: int,
        turn: int,
        limit: int | None = MAX_COMPARED,
        level: Level | None = None,
        session: str = "",
    ) -> list[WorkerRecord]:
        """Return the workers with room that may be the best for this sequence, of those that have no prefix
        of it cached, or of a level's holders.

        If there are more than ``limit``, return ``limit`` of them, the session's first, or rotated by
        ``turn``: among many workers that are nearly alike, as in an idle cluster, finding the very best costs
        more than it brings.
        """
        if num_tokens > self.max_room:
            return []
        ranked = self._ranked
        if level is not None and len(level.holders) <= FEW_HOLDERS:
            ranked = sorted((w.rank, w.number, w) for w in level.holders if w.listed is self)

        def suits(worker: WorkerRecord) -> bool:
            return worker.room >= num_tokens and (level is None or level.block_hash in worker.cached)

        begin = next((i for i, (_, _, worker) in enumerate(ranked) if suits(worker)), len(ranked))
        if begin == len(ranked):
            self.has_room(num_tokens)  # keeps the bound close
            return []
        max_rank = ranked[begin][2].max_competing_rank(num_tokens)
        end = bisect_left(ranked, (max_rank, inf), begin + 1)
        if limit is None or end - begin <= limit:
            return [worker for _, _, worker in ranked[begin:end] if suits(worker)]
        if session:
            number = hash64(session)
            suitable = (w for _, _, w in ranked[begin:end] if suits(w))
            return nlargest(limit, suitable, lambda w: shuffled(w.name_hash, number))
        first = begin + turn * GOLDEN % (end - begin)
        found = []
        for i in chain(range(first, end), range(begin, first)):
            worker = ranked[i][2]
            if worker.room >= num_tokens and (level is None or level.block_hash in worker.cached):
                found.append(worker)
                if len(found) == limit:
                    break
        return found
