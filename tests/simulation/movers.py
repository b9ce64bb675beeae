"""KV blocks on their way: a one-sided mover that writes the peer's memory, and a two-sided one that sends
parcels. (The one that needs a rendezvous: communicators.py; the one-sided ones whose puts linger, or go on by
themselves: agents.py, copies.py.)"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from simulation.model import NUM_LAYERS
from simulation.network import LATE_S

if TYPE_CHECKING:
    from simulation.worker_role import WorkerRole


from simulation.targets import Parcel

from splitserve.transport.errors import MoverError, PeerEnded
from splitserve.transport.movers.interface import Arrival, Item

PARCEL = 4
"""Blocks a parcel, at most."""


class Source(ABC):
    """The sending side of either mover, as far as they are alike."""

    def __init__(self, writer: WorkerRole, peer: str, process: int) -> None:
        self.writer, self.world, self.peer, self.process = writer, writer.world, peer, process
        self.random, self.faults = self.world.random.random, self.world.scenario.faults
        self.is_broken = False  # whatever it copies arrives as something else
        self._was_tested = False

    def target(self) -> WorkerRole | None:
        """The process that was met, if it still lives."""
        target = self.world.workers.get(self.peer)
        return target if target is not None and target.alive and target.endpoint == self.process else None

    def content(self, block: int, first: int, end: int) -> list[int]:
        """What leaves: these layers of the block, or something else."""
        values = self.writer.memory.read(block, first, end)
        if self.is_broken:
            values[0] ^= 1 << 60  # beyond what is flipped below, which must not undo it
        if self.world.strikes(self.faults.corrupt_put, "puts corrupted"):
            values[int(self.random() * len(values))] ^= 1 << int(self.random() * 60)
        if self.world.strikes(self.faults.partial_put, "puts cut short"):
            values = values[: len(values) // 2]
        return values

    def put(
        self,
        lease: int,
        secret: bytes,
        items: Sequence[Item],
        first_layer: int = 0,
        num_layers: int | None = None,
    ) -> None:
        end = NUM_LAYERS if num_layers is None else first_layer + num_layers
        tests = self.writer.played.core.sender.tests.running.values()
        is_test = any(test.lease == lease for test in tests)
        if self.is_broken and self._was_tested and not is_test:
            self.world.violated(f"{self.writer.name}: a mover carries prompts though it failed its self-test")
        self._was_tested = self._was_tested or is_test
        self._put(lease, secret, items, first_layer, end)

    @abstractmethod
    def _put(self, lease: int, secret: bytes, items: Sequence[Item], first: int, end: int) -> None:
        """Layers [first, end) of these blocks."""

    def poll(self) -> list[Arrival]:
        """Blocks that have left are not reported one by one here. Raises MoverError."""
        return []

    def pending(self) -> int:
        """Blocks of puts that have not left yet."""
        return 0

    @abstractmethod
    def cancel(self, lease: int) -> None:
        """What has not left need not leave."""

    def writing(self, lease: int) -> bool:
        """Whether puts of this lease may be landing by themselves."""
        return False

    def _asked_about(self, lease: int, leases: Iterable[int]) -> bool:
        """Whether this lease is among those that are being written: then a message waits."""
        found = lease in leases
        self.world.counts["words held back"] += found
        return found

    @abstractmethod
    def close(self) -> Collection[int]:
        """The connection ends; what has not left is lost. The leases under which something may still land."""


class SharedMemorySource(Source):
    """Copies into the peer's memory by itself, half a block at a time: it may be stopped, or die, between any
    two halves."""

    def __init__(self, writer: WorkerRole, peer: str, process: int) -> None:
        super().__init__(writer, peer, process)
        self._owner = self.target()

    def poll(self) -> list[Arrival]:
        """Raises PeerEnded once the process that was met has ended, also where nothing is under way."""
        if self._owner is not None and not self._owner.process.alive:
            raise PeerEnded("the decode worker's process has ended")
        return super().poll()

    def _put(self, lease: int, secret: bytes, items: Sequence[Item], first: int, end: int) -> None:
        target = self._about_to_write(items)
        struck = int(self.random() * len(items))
        for i, (_, source, block) in enumerate(items):
            values = self.content(source, first, end)
            start, half = first * self.writer.memory.block_size, len(values) // 2
            self.writer.run(self._copy, target, lease, block, start, values[:half])
            if i == struck:
                self._strike_writer()
            self.writer.run(self._copy, target, lease, block, start + half, values[half:])
            self.writer.run(self._copied, target, block)

    def _about_to_write(self, items: Sequence[Item]) -> WorkerRole:
        """Return the worker written to; from now on these blocks have a writer. Raises MoverError."""
        target = self.target()
        if target is None:
            raise MoverError("the decode worker's process has ended")
        if self.world.strikes(self.faults.mover_error, "mover errors"):
            raise MoverError("the adversary says so")
        target.process.writers.setdefault(self.writer.process, Counter()).update(
            block for _, _, block in items
        )
        return target

    def cancel(self, lease: int) -> None:
        """What is put has left."""

    def close(self) -> tuple[()]:
        return ()

    def _strike_writer(self) -> None:
        if self.world.strikes(self.faults.freeze_in_put, "freezes in mid-put"):
            self.writer.process.freeze(0.1 + 3.0 * self.random())
        if self.world.strikes(self.faults.die_in_put, "deaths in mid-put"):
            self.world.kill(self.writer.process)

    def _copy(self, target: WorkerRole, lease: int, block: int, start: int, values: list[int]) -> None:
        if target.alive:
            target.written_by_peer(lease, block, start, values)
        elif target.process.alive and target.process.leaving:
            target.memory.write(
                block, start, values
            )  # blocks that its first role has left behind are nobody's until the process ends
        elif target.process.alive:
            self.world.violated(
                f"{target.name}: block {block} was written under lease {lease}, and its process "
                "has another role now"
            )

    def _copied(self, target: WorkerRole, block: int) -> None:
        counter = target.process.writers.get(self.writer.process, Counter())
        counter[block] -= 1
        if not counter[block]:
            del counter[block]
        if not counter:
            target.process.writers.pop(self.writer.process, None)


class ParcelSource(Source):
    """Sends parcels, which leave a little later with what their blocks hold then, and arrive as the adversary
    likes."""

    def __init__(self, writer: WorkerRole, peer: str, process: int) -> None:
        super().__init__(writer, peer, process)
        self._cancelled: set[int] = set()  # leases
        self._closed = False

    def _put(self, lease: int, secret: bytes, items: Sequence[Item], first: int, end: int) -> None:
        if self.world.strikes(self.faults.mover_error, "mover errors"):
            raise MoverError("the adversary says so")
        for start in range(0, len(items), PARCEL):
            parcel = items[start : start + PARCEL]
            given = [self.writer.blocks.times_given[block] for _, block, _ in parcel]
            self.writer.after(
                0.002 * self.random() ** 2, self._leave, lease, secret, parcel, first, end, given
            )

    def cancel(self, lease: int) -> None:
        self._cancelled.add(lease)

    def close(self) -> tuple[()]:
        self._closed = True
        return ()

    def _leave(
        self, lease: int, secret: bytes, items: Sequence[Item], first: int, end: int, given: list[int]
    ) -> None:
        if self._closed or lease in self._cancelled:
            return
        if given != [self.writer.blocks.times_given[block] for _, block, _ in items]:
            self.world.violated(
                f"{self.writer.name}: blocks of lease {lease} were given to others before they had left"
            )
        parcel = Parcel(
            lease,
            secret,
            first,
            end,
            [(position, self.content(source, first, end)) for position, source, _ in items],
        )
        copies = 1
        if self.world.strikes(self.faults.lost_put, "puts lost"):
            copies = 0
        elif self.world.strikes(self.faults.double_put, "puts doubled"):
            copies = 2
        for _ in range(copies):
            delay = 0.0002 + 0.002 * self.random()
            if self.world.strikes(self.faults.late_put, "puts late"):
                delay = 0.01 + LATE_S * self.random()
            self.world.queue.after(delay, self._arrive, parcel)

    def _arrive(self, parcel: Parcel) -> None:
        if (target := self.target()) is not None:
            target.run(target.parcels.on_parcel, parcel)
