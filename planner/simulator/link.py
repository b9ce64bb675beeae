"""The link between the KV pools of simulated workers, and KV blocks without content."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ...transport.errors import MoverError
from ...transport.messages.messages import Met
from ...transport.movers.interface import Arrival, Item, MoverEndpoints, OneSidedTarget
from ...transport.movers.targets import MoverTargets
from .cluster import Pool
from .events import EventQueue

HOST, MOVER = "simulated", "shm"
"""All workers share a host, and write one another's blocks by a one-sided mover."""


class Link:
    """A process's way to others: it sends one put at a time and receives one at a time.

    A put that waits for a busy receiver does not hold its sender's next ones."""

    def __init__(self, pool: Pool) -> None:
        self._handoff, self._memory = pool.profile.handoff, pool.profile.memory
        self._bytes_per_s = pool.bytes_per_s
        self._out_free_at = self._in_free_at = 0.0
        self.num_bytes_out = 0

    def transfer(self, target: Link, num_blocks: int, num_layers: int | None, now: float) -> float:
        """Take the links of both ends for this number of layers and blocks; return when they have arrived."""
        memory, num_layers = self._memory, num_layers or self._memory.num_layers
        num_bytes = num_blocks * memory.block_bytes * num_layers // memory.num_layers
        num_slices = num_blocks if num_layers < memory.num_layers else 0
        rate = min(self._bytes_per_s, target._bytes_per_s)
        seconds = self._handoff.seconds(num_bytes, num_slices, rate)
        begin = max(now, self._out_free_at)
        self._out_free_at = begin + seconds
        target._in_free_at = max(begin, target._in_free_at) + seconds
        self.num_bytes_out += num_bytes
        return target._in_free_at


class LinkMover:
    """Opens the way from ``link`` to another one. ``find``: returns the link of the process that listens at a
    port; ``turn``: has the loop turn, when a put has arrived."""

    def __init__(
        self, link: Link, find: Callable[[str], Link | None], queue: EventQueue, turn: Callable[[], None]
    ) -> None:
        self._link, self._find, self._queue, self._turn = link, find, queue, turn

    def open(self, met: Met) -> LinkSource:
        if (target := self._find(met.shm_name)) is None:
            raise MoverError("that memory is gone")
        return LinkSource(self._link, target, self._queue, self._turn)


class LinkSource:
    """Puts take their time on the links of both ends; within one process they take none."""

    def __init__(self, link: Link, target: Link, queue: EventQueue, turn: Callable[[], None]) -> None:
        self._link, self._target, self._queue, self._turn = link, target, queue, turn
        self._puts: deque[tuple[float, int]] = deque()  # of those under way: end and lease

    def put(
        self,
        lease: int,
        secret: bytes,
        items: Sequence[Item],
        first_layer: int = 0,
        num_layers: int | None = None,
    ) -> None:
        if self._target is not self._link:
            done = self._link.transfer(self._target, len(items), num_layers, self._queue.now)
            self._puts.append((done, lease))
            self._queue.at(done, self._turn)

    def poll(self) -> list[Arrival]:
        while self._puts and self._puts[0][0] <= self._queue.now:
            self._puts.popleft()
        return []

    def pending(self) -> int:
        return len(self._puts)

    def writing(self, lease: int) -> bool:
        return any(put == lease for _, put in self._puts)

    def cancel(self, lease: int) -> None:
        """A put under way cannot be called back."""

    def close(self) -> set[int]:
        return {lease for _, lease in self._puts}


def targets_at(port: str) -> MoverTargets:
    """Return the movers into the pool of a worker that listens at this port."""
    endpoints = MoverEndpoints((MOVER,), HOST, shm_name=port)
    return MoverTargets({MOVER: OneSidedTarget()}, endpoints, lambda _: None)


class KvBlocks:
    """Blocks without content: all checksums are 0."""

    sums_on_gpu = False

    def __init__(self, num_layers: int, block_bytes: int) -> None:
        self.num_layers, self.block_bytes = num_layers, block_bytes

    def write_test_block(self, block: int, seed: Sequence[int]) -> None: ...

    def add_sent(self, blocks: Sequence[int], first_layer: int, num_layers: int) -> None: ...

    def sent_checksums(self, blocks: Sequence[int]) -> list[int]:
        return [0] * len(blocks)

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return [0] * len(blocks)
