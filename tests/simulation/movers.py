"""KV blocks on their way: a one-sided mover that writes the peer's memory, and a two-sided one that sends parcels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from simulation.network import LATE_S

if TYPE_CHECKING:
    from simulation.decode_process import DecodeProcess
    from simulation.prefill_process import PrefillProcess

from splitserve.transport.messages import Met

Item = tuple[int, int, int]
"""(position in the lease, own block, the peer's block)"""
PARCEL = 4
"""Blocks a parcel, at most."""


class MoverError(Exception):
    """The mover has failed; its peer cannot be written through it any more."""


class Source:
    """The sending side of either mover, as far as they are alike."""

    def __init__(self, writer: PrefillProcess, peer: str, process: int) -> None:
        self.writer, self.world, self.peer, self.process = writer, writer.world, peer, process
        self.random, self.faults = self.world.random.random, self.world.scenario.faults

    def target(self) -> DecodeProcess | None:
        """The process that was met, if it still lives."""
        target = self.world.workers[self.peer]
        return target if target.alive and target.pid == self.process else None  # type: ignore[return-value]

    def content(self, block: int) -> list[int]:
        """What leaves: the block, or something else."""
        values = self.writer.memory.read(block)
        if self.world.strikes(self.faults.corrupt_put, "puts corrupted"):
            values[int(self.random() * len(values))] ^= 1 << int(self.random() * 60)
        if self.world.strikes(self.faults.partial_put, "puts cut short"):
            values = values[: len(values) // 2]
        return values

    def put(self, lease: int, secret: bytes, items: Sequence[Item]) -> None:
        raise NotImplementedError

    def cancel(self, lease: int) -> None:
        """What has not left need not leave."""

    def close(self) -> None:
        """The connection ends; what has not left is lost."""


class SharedMemorySource(Source):
    """Copies into the peer's memory by itself, half a block at a time: it may be stopped, or die, between any two halves."""

    def put(self, lease: int, secret: bytes, items: Sequence[Item]) -> None:
        target = self.target()
        if target is None:
            raise MoverError("the decode worker's process has ended")
        if self.world.strikes(self.faults.mover_error, "mover errors"):
            raise MoverError("the adversary says so")
        target.writers.setdefault(self.writer, Counter()).update(block for _, _, block in items)
        for _, source, block in items:
            values = self.content(source)
            half = len(values) // 2
            self.writer.run(self._copy, target, lease, block, 0, values[:half])
            if self.world.strikes(self.faults.freeze_in_put, "freezes in mid-put"):
                self.writer.freeze(0.1 + 3.0 * self.random())
            if self.world.strikes(self.faults.die_in_put, "deaths in mid-put"):
                self.world.kill(self.writer)
            self.writer.run(self._copy, target, lease, block, half, values[half:])
            self.writer.run(self._copied, target, block)

    def _copy(self, target: DecodeProcess, lease: int, block: int, start: int, values: list[int]) -> None:
        if target.alive:
            target.written_by_peer(lease, block, start, values)

    def _copied(self, target: DecodeProcess, block: int) -> None:
        counter = target.writers.get(self.writer, Counter())
        counter[block] -= 1
        if not counter[block]:
            del counter[block]
        if not counter:
            target.writers.pop(self.writer, None)


class ParcelSource(Source):
    """Sends parcels, which leave a little later with what their blocks hold then, and arrive as the adversary likes."""

    def __init__(self, writer: PrefillProcess, peer: str, process: int) -> None:
        super().__init__(writer, peer, process)
        self._waiting: dict[int, list[Sequence[Item]]] = {}  # parcels by lease that have not left

    def put(self, lease: int, secret: bytes, items: Sequence[Item]) -> None:
        if self.world.strikes(self.faults.mover_error, "mover errors"):
            raise MoverError("the adversary says so")
        for start in range(0, len(items), PARCEL):
            parcel = items[start : start + PARCEL]
            self._waiting.setdefault(lease, []).append(parcel)
            self.writer.leaving.update(block for _, block, _ in parcel)
            self.writer.after(0.002 * self.random() ** 2, self._leave, lease, secret, parcel)

    def cancel(self, lease: int) -> None:
        for parcel in self._waiting.pop(lease, []):
            self._gone(parcel)

    def close(self) -> None:
        for lease in list(self._waiting):
            self.cancel(lease)

    def _gone(self, items: Sequence[Item]) -> None:
        leaving = self.writer.leaving
        for _, block, _ in items:
            leaving[block] -= 1
            if not leaving[block]:
                del leaving[block]

    def _leave(self, lease: int, secret: bytes, items: Sequence[Item]) -> None:
        waiting = self._waiting.get(lease, [])
        if not any(parcel is items for parcel in waiting):
            return  # cancelled
        self._waiting[lease] = [parcel for parcel in waiting if parcel is not items]
        self._gone(items)
        parcel = [(position, self.content(source)) for position, source, _ in items]
        copies = 1
        if self.world.strikes(self.faults.lost_put, "puts lost"):
            copies = 0
        elif self.world.strikes(self.faults.double_put, "puts doubled"):
            copies = 2
        for _ in range(copies):
            delay = 0.0002 + 0.002 * self.random()
            if self.world.strikes(self.faults.late_put, "puts late"):
                delay = 0.01 + LATE_S * self.random()
            self.world.queue.after(delay, self._arrive, lease, secret, parcel)

    def _arrive(self, lease: int, secret: bytes, parcel: list[tuple[int, list[int]]]) -> None:
        if (target := self.target()) is not None:
            target.run(target.on_parcel, lease, secret, parcel)


class ParcelTarget:
    """The receiving side: this process itself writes, what it expects and nothing else."""

    def __init__(self) -> None:
        self._leases: dict[int, tuple[bytes, Mapping[int, int], set[int]]] = {}

    def open(self, lease: int, secret: bytes, targets: Mapping[int, int]) -> None:
        self._leases[lease] = (secret, targets, set(targets))

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        if lease in self._leases:
            self._leases[lease][2].update(positions)

    def close(self, lease: int) -> None:
        self._leases.pop(lease, None)

    def take_in(self, lease: int, secret: bytes, positions: Sequence[int]) -> list[int] | None:
        """The own blocks for these positions; None where they are not expected (any more)."""
        known = self._leases.get(lease)
        if known is None or known[0] != secret or not known[2].issuperset(positions):
            return None
        known[2].difference_update(positions)
        return [known[1][position] for position in positions]


def open_source(writer: PrefillProcess, peer: str, met: Met) -> Source:
    """Raises MoverError."""
    kind = SharedMemorySource if met.mover == "shm" else ParcelSource
    source = kind(writer, peer, int(met.data_address))
    if met.mover == "shm" and source.target() is None:
        raise MoverError("that memory is gone")
    return source
