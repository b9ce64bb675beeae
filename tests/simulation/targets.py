"""Receiving ends of the movers between processes that share no memory, and of those that do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from simulation.model import NUM_LAYERS

if TYPE_CHECKING:
    from simulation.worker_role import WorkerRole

    from splitserve.transport.handoff.leases import LeaseTable
    from splitserve.transport.messages.messages import PeerId
from splitserve.transport.movers.interface import Arrival, OneSidedTarget
from splitserve.transport.movers.lease_book import LeaseBook, ParcelHeader


@dataclass(frozen=True, slots=True)
class Parcel:
    """Layers [first, end) of some blocks, by position in the lease."""

    lease: int
    secret: bytes
    first: int
    end: int
    slices: list[tuple[int, list[int]]]


class MappedTarget(OneSidedTarget):
    """The receiving side of a writer that has mapped the memory: open as long as that process lives."""

    def address(self, peer: PeerId) -> bytes:
        return b""

    def shut_out(self, peer: PeerId) -> bool:
        return False


def mover_of(leases: LeaseTable, lease: int) -> str:
    """The mover of this lease's writer; empty if there is no such lease."""
    incoming = leases.by_lease.get(lease)
    return incoming.mover if incoming is not None else ""


def blocks_open_to(leases: LeaseTable, lease: int) -> list[int]:
    """The blocks that this lease's writer may still be writing."""
    incoming = leases.by_lease.get(lease)
    if incoming is not None:
        return incoming.blocks[incoming.num_cached :]
    ended = leases.quarantine.leases.get(lease)
    return ended.blocks if ended is not None else []


class BookTarget:
    """The receiving side where this process itself writes what comes: what the real movers' lease book
    expects and nothing else. (A value counts as a byte.)"""

    one_sided = lingers = False

    def __init__(self, process: WorkerRole) -> None:
        self._process, self._memory = process, process.memory
        self.book = LeaseBook(NUM_LAYERS, process.memory.block_size)
        process.blocks.targets.append(self)
        self.fd = process.world.next_number()
        self._arrivals: list[Arrival] = []

    def open(self, lease: int, secret: bytes, targets: Mapping[int, int]) -> None:
        self.book.open(lease, secret, targets)

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        self.book.expect_again(lease, positions)

    def close(self, lease: int) -> None:
        self.book.close(lease)

    def poll(self, limit: int) -> list[Arrival]:
        arrivals, self._arrivals = self._arrivals[:limit], self._arrivals[limit:]
        if not self._arrivals:
            self._process.network.readable.discard(self.fd)
        return arrivals

    def close_all(self) -> None:
        self._process.blocks.targets.remove(self)

    def expected_blocks(self) -> Iterator[int]:
        """Yield the blocks that parcels may be put into: not of leases that have joined, also by another
        mover."""
        if not (entries := self.book._entries):
            return  # also a role that begins in this turn, and is not watched yet
        joined = self._process.played.core.receiver.leases.joined.values()
        for lease, entry in entries.items():
            if lease not in joined:
                yield from (entry.targets[at] for at, layers in entry.awaited.items() if layers)

    def _have_arrived(self, arrivals: list[Arrival]) -> None:
        self._arrivals += arrivals
        self._process.network.woken(self.fd)


class ParcelTarget(BookTarget):
    """Receives parcels. Every decode worker has one, which counts the corrupt blocks of all movers."""

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        self._process.world.counts["corrupt blocks found"] += len(positions)
        super().expect_again(lease, positions)

    def address(self, peer: PeerId) -> bytes:
        return b""

    def shut_out(self, peer: PeerId) -> bool:
        return True

    def on_parcel(self, parcel: Parcel) -> None:
        """Whole slices at places that are expected, or nothing."""
        process = self._process
        complete = self.take_in(parcel)
        if complete is None:
            process.world.counts["parcels refused"] += 1
            return
        if mover_of(process.core.receiver.leases, parcel.lease) != "tcp":
            process.world.violated(
                f"{process.name}: a parcel of lease {parcel.lease} was written, which had ended or "
                "belongs to another mover"
            )
        self._have_arrived([(parcel.lease, position) for position in complete])

    def take_in(self, parcel: Parcel) -> list[int] | None:
        """Writes the parcel and returns the positions that are complete now; None where it is not expected
        (any more), or is cut short."""
        size, start = (
            (parcel.end - parcel.first) * self._memory.block_size,
            parcel.first * self._memory.block_size,
        )
        positions = tuple(position for position, _ in parcel.slices)
        claim = self.book.claim(ParcelHeader(parcel.lease, parcel.secret, start, size, positions))
        if claim is None:
            return None
        if any(len(values) != size for _, values in parcel.slices):
            self.book.give_back(claim)
            return None
        for block, (_, values) in zip(claim.blocks, parcel.slices, strict=True):
            self._memory.write(block, start, values)
        return [position for _, position in self.book.complete(claim)]
