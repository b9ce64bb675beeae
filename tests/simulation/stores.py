"""The folder of the KV store, which outlives all workers. Writes are lost or late, reads short or late."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from random import Random
from typing import TYPE_CHECKING

from splitserve.transport.handoff.protocol import Key
from splitserve.worker.parts import ReadingCore

if TYPE_CHECKING:
    from simulation.worker_process import WorkerProcess

MAX_WRITES = 3
QUICK_S, SLOW_S = 0.002, 2.0


class VirtualStore:
    """See ``BlockStore``. All workers of a world share what has been written."""

    gauges: Mapping[str, float] = {}
    counters: Mapping[str, float] = {}

    def __init__(self, process: WorkerProcess) -> None:
        self._process, self._world = process, process.world
        self._random = Random(f"store {process.world.seed} {process.name} {process.pid}")
        self.group, self.ahead = self._random.choice(((1, 32), (2, 4), (8, 4)))  # a bucket, or a folder
        self._share_slow = self._random.choice((0.0, 0.02, 0.5))
        self._known = set[bytes]()
        self._num_writes = 0
        self._reads: deque[tuple[Key, list[list[int]] | None]] = deque()  # None: not over yet
        self._num_reported = 0

    @property
    def takes_writes(self) -> bool:
        return self._num_writes < MAX_WRITES

    def knows(self, block_hash: bytes) -> bool:
        return self.group == 1 and block_hash in self._known

    def write(self, hashes: Sequence[bytes], blocks: Sequence[int]) -> None:
        assert 0 < len(hashes) == len(blocks) <= self.group
        self._num_writes += 1
        copied = [self._process.memory.read(block) for block in blocks]
        self._process.after(self._delay(), self._written, dict(zip(hashes, copied, strict=True)))

    def _written(self, content: dict[bytes, list[int]]) -> None:
        self._num_writes -= 1
        for block_hash, values in content.items():
            if self._random.random() < 0.95:
                self._world.stored[block_hash] = values
                self._world.counts["blocks saved"] += 1
                self._known.add(block_hash)
        self._process.poll()

    def read(self, key: Key, hashes: Sequence[bytes]) -> None:
        assert 0 < len(hashes) <= self.group
        self._reads.append((key, None))
        number = self._num_reported + len(self._reads)
        self._process.after(self._delay(), self._have_read, number, list(hashes))

    def _have_read(self, number: int, hashes: list[bytes]) -> None:
        found: list[list[int]] = []
        for block_hash in hashes:
            if block_hash not in self._world.stored or self._random.random() < 0.05:
                break
            self._known.add(block_hash)
            found.append(self._world.stored[block_hash])
        at = number - self._num_reported - 1
        self._reads[at] = (self._reads[at][0], found)
        self._process.poll()

    def report(self, core: ReadingCore) -> None:
        while self._reads and (found := self._reads[0][1]) is not None:
            key, _ = self._reads.popleft()
            self._num_reported += 1
            if blocks := core.arrived(key, len(found)):
                for block, values in zip(blocks, found, strict=True):
                    self._process.memory.write(block, 0, values)
                core.filled(key, len(found))
                self._world.counts["blocks loaded"] += len(found)

    def _delay(self) -> float:
        slow = self._random.random() < self._share_slow
        return SLOW_S * self._random.random() ** 4 if slow else QUICK_S * self._random.random()
