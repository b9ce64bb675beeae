"""The decode worker's leases: granted ones, and those that ended without their writer's word. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..messages.messages import PeerId
from .granting import BlockPool
from .incoming import Incoming
from .protocol import Key


@dataclass(slots=True)
class EndedLease:
    """A lease that ended without its writer's word."""

    key: Key
    writer: PeerId
    blocks: list[int]
    asked: float = -1e9  # when the writer was last asked to let go
    since: float = 0.0  # when it was first asked


class Quarantine:
    """Time alone ends nothing here: the writer's Release does, or its death, or that it was shut out."""

    def __init__(self) -> None:
        self.leases: dict[int, EndedLease] = {}

    @property
    def num_blocks(self) -> int:
        return sum(len(ended.blocks) for ended in self.leases.values())

    def of_writer(self, peer: PeerId) -> list[int]:
        """The leases that wait for this writer's word."""
        return [lease for lease, ended in self.leases.items() if ended.writer == peer]

    def to_ask(self, every_s: float, now: float) -> Iterator[tuple[int, EndedLease]]:
        """The leases whose writers are to be asked now."""
        for lease, ended in self.leases.items():
            if now - ended.asked >= every_s:
                ended.since = ended.since or now
                ended.asked = now
                yield lease, ended

    def silent_writers(self, silence_s: float, now: float) -> set[PeerId]:
        """Those that have not answered for so long."""
        return {e.writer for e in self.leases.values() if e.since and now - e.since >= silence_s}


class LeaseTable:
    """Which blocks of ``pool`` somebody else may be writing."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.granted: dict[Key, Incoming] = {}
        self.by_lease: dict[int, Incoming] = {}
        self.quarantine = Quarantine()

    @property
    def num_blocks(self) -> int:
        """Under a lease or in quarantine (they count as used in the pool)."""
        return sum(len(i.held) for i in self.granted.values()) + self.quarantine.num_blocks

    def blocks_open_to(self, lease: int) -> list[int]:
        """The blocks that this lease's writer may still be writing."""
        incoming = self.by_lease.get(lease)
        if incoming is not None:
            return incoming.blocks[incoming.num_cached :]
        ended = self.quarantine.leases.get(lease)
        return ended.blocks if ended is not None else []

    def block_tables(self) -> Iterator[list[int]]:
        yield from (incoming.held for incoming in self.granted.values())
        yield from (ended.blocks for ended in self.quarantine.leases.values())

    def ends(self) -> dict[int, float]:
        """When each lease ends, by lease, unless it is renewed. (One whose blocks are being checked ends with
        the check.)"""
        return {i.lease: i.expires for i in self.granted.values() if not i.verifying}

    def of_writer(self, peer: PeerId) -> list[Incoming]:
        return [incoming for incoming in self.granted.values() if incoming.peer == peer]

    def of(self, lease: int, peer: PeerId) -> Incoming | None:
        """The lease, if it is this writer's."""
        incoming = self.by_lease.get(lease)
        return incoming if incoming is not None and incoming.peer == peer else None

    def grant(self, incoming: Incoming) -> None:
        self.granted[incoming.key] = self.by_lease[incoming.lease] = incoming

    def take_back(self, incoming: Incoming) -> None:
        """The lease is over; what becomes of its blocks is for the caller to say."""
        self.granted.pop(incoming.key, None)
        self.by_lease.pop(incoming.lease, None)

    def end(self, incoming: Incoming, one_sided: bool) -> None:
        """Without a join. A writer that writes by itself must be believed to have stopped before its blocks
        are free."""
        self.take_back(incoming)
        if one_sided:
            self.quarantine.leases[incoming.lease] = EndedLease(incoming.key, incoming.peer, incoming.held)
        else:
            self._pool.release(incoming.held)

    def free_of_writer(self, peer: PeerId) -> None:
        """This writer writes no more: what its ended leases held is free."""
        for lease in self.quarantine.of_writer(peer):
            self.free(lease)

    def free(self, lease: int) -> None:
        """The writer of this ended lease has stopped."""
        self._pool.release(self.quarantine.leases.pop(lease).blocks)
