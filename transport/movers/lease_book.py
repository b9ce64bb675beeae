"""The leases of a two-sided mover: which parcels may be written, and where to. What ``tcp`` and ``nccl``
share.

A *parcel* is some layers of one or several blocks of a lease, in one piece.
"""

from __future__ import annotations

import hmac
import threading
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..messages.messages import MAX_PARCEL_POSITIONS
from ..process.wakeup import Wakeup
from .interface import Arrival

PARCEL_BYTES = 8 << 20  # at most, unless one block has more


def blocks_per_parcel(slice_bytes: int) -> int:
    """Return how many blocks one parcel may hold, with ``slice_bytes`` of each."""
    return min(MAX_PARCEL_POSITIONS, max(1, PARCEL_BYTES // slice_bytes))


@dataclass(frozen=True, slots=True)
class ParcelHeader:
    """Bytes [offset, offset + length) of each block at these positions of a lease."""

    lease: int
    secret: bytes
    offset: int
    length: int
    positions: tuple[int, ...]


@dataclass(slots=True)
class LeaseEntry:
    """An open lease. A layer of a position is *missing* until a parcel claims it, and *awaited* until that
    parcel is complete."""

    secret: bytes
    targets: Mapping[int, int]
    missing: dict[int, int] = field(default_factory=dict)  # by position, a bit for each layer
    awaited: dict[int, int] = field(default_factory=dict)  # by position, number of layers
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Claim:
    """A parcel whose body may be written: ``length`` bytes from ``offset`` of each of ``blocks``. Ask
    ``valid`` before each write."""

    entry: LeaseEntry
    header: ParcelHeader
    blocks: list[int]
    bits: int

    @property
    def valid(self) -> bool:
        return self.entry.is_open


class LeaseBook:
    """The open leases of a pool whose blocks have ``num_layers`` layers of ``layer_bytes``."""

    def __init__(self, num_layers: int, layer_bytes: int) -> None:
        self._num_layers, self._layer_bytes = num_layers, layer_bytes
        self._entries: dict[int, LeaseEntry] = {}
        self.dropped: Counter[str] = Counter()  # parcels without a claim, by the field that was wrong

    def open(self, lease: int, secret: bytes, targets: Mapping[int, int]) -> None:
        self.close(lease)
        self._entries[lease] = entry = LeaseEntry(secret, dict(targets))
        self._expect(entry, list(targets))

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        if lease in self._entries:
            self._expect(self._entries[lease], positions)

    def close(self, lease: int) -> None:
        """End the lease: its claims are void from now on."""
        entry = self._entries.pop(lease, None)
        if entry is not None:
            entry.is_open = False

    def close_all(self) -> None:
        for lease in list(self._entries):
            self.close(lease)

    def claim(self, header: ParcelHeader) -> Claim | None:
        """Return the right to write a parcel's body; None: see ``dropped``."""
        claim = self._claim(header)
        if isinstance(claim, str):
            self.dropped[claim] += 1
            return None
        return claim

    def complete(self, claim: Claim) -> list[Arrival]:
        """Note that the body has been written. Return the blocks that are complete with it."""
        if not claim.valid:
            return []
        done: list[Arrival] = []
        awaited = claim.entry.awaited
        for position in claim.header.positions:
            awaited[position] -= claim.bits.bit_count()
            if awaited[position] == 0:
                done.append((claim.header.lease, position))
        return done

    def give_back(self, claim: Claim) -> None:
        """Allow another parcel to bring the body: this one was cut off."""
        for position in claim.header.positions:
            claim.entry.missing[position] |= claim.bits

    def _claim(self, header: ParcelHeader) -> Claim | str:
        """Return the claim, or the name of the field that is wrong."""
        entry = self._entries.get(header.lease)
        if entry is None:
            return "lease"
        if not hmac.compare_digest(header.secret, entry.secret):
            return "secret"
        bits = self._layer_bits(header)
        if bits is None:
            return "length"
        positions = header.positions
        if len(set(positions)) != len(positions) or any(bits & ~entry.missing.get(p, 0) for p in positions):
            return "position"
        for position in positions:
            entry.missing[position] &= ~bits
        return Claim(entry, header, [entry.targets[p] for p in positions], bits)

    def _expect(self, entry: LeaseEntry, positions: Sequence[int]) -> None:
        for position in positions:
            entry.missing[position] = (1 << self._num_layers) - 1
            entry.awaited[position] = self._num_layers

    def _layer_bits(self, header: ParcelHeader) -> int | None:
        first, rest = divmod(header.offset, self._layer_bytes)
        count, more = divmod(header.length, self._layer_bytes)
        if rest or more or not 0 < count <= self._num_layers - first:
            return None
        return (1 << first + count) - (1 << first)


class BookedTarget:
    """A target whose own threads write arriving parcels, as the book of leases allows. ``_lock`` guards the
    book, the leased blocks of the pool and the arrivals."""

    one_sided = False
    lingers = False

    def __init__(self, num_layers: int, layer_bytes: int) -> None:
        self._lock = threading.RLock()
        self._book = LeaseBook(num_layers, layer_bytes)
        self._arrivals: deque[Arrival] = deque()
        self._news = Wakeup()

    @property
    def dropped(self) -> Counter[str]:
        """What was dropped, by reason."""
        return self._book.dropped

    @property
    def fd(self) -> int:
        return self._news.fd

    def open(self, lease: int, secret: bytes, targets: Mapping[int, int]) -> None:
        with self._lock:
            self._book.open(lease, secret, targets)

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        with self._lock:
            self._book.expect_again(lease, positions)

    def close(self, lease: int) -> None:
        with self._lock:  # no write is under way now, and none begins any more
            self._book.close(lease)

    def poll(self, limit: int) -> list[Arrival]:
        with self._lock:
            taken = [self._arrivals.popleft() for _ in range(min(limit, len(self._arrivals)))]
            if not self._arrivals:
                self._news.clear()
        return taken

    def _close_book(self) -> None:
        with self._lock:
            self._book.close_all()

    def _arrived(self, arrivals: list[Arrival]) -> None:
        """Queue arrivals; call it with the lock held."""
        if arrivals:
            self._arrivals.extend(arrivals)
            self._news.set()
