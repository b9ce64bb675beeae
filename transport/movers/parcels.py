"""What flows over a data connection: parcels, each some layers of one or several blocks of a lease.

    size of the header u32 | header | body
    header: "SSKV" | version u8 | 3 bytes 0 | lease u64 | secret 16 B | offset u64 | length u64
            | positions u32 ...

little-endian. The body holds, for each position in turn, bytes [offset, offset + length) of its block. Sealed
(session.py), the header is one record and the body is cut into records of RECORD_BYTES, the last one shorter;
each is followed by its tag, and the size counts the tag.
"""

from __future__ import annotations

import hmac
import struct
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ..messages.messages import SECRET_BYTES
from ..process.wakeup import Wakeup
from .interface import Arrival, Pool

_HEADER = struct.Struct(f"<4sB3xQ{SECRET_BYTES}sQQ")
_MAGIC, _VERSION = b"SSKV", 2
SIZE = struct.Struct("<I")
PARCEL_BYTES = 8 << 20
RECORD_BYTES = 256 << 10
MAX_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class ParcelHeader:
    lease: int
    secret: bytes
    offset: int
    length: int
    positions: tuple[int, ...]


def pack_header(header: ParcelHeader) -> bytes:
    fixed = _HEADER.pack(_MAGIC, _VERSION, header.lease, header.secret, header.offset, header.length)
    return fixed + struct.pack(f"<{len(header.positions)}I", *header.positions)


def header_bytes(num_positions: int) -> int:
    return _HEADER.size + 4 * num_positions


def unpack_header(data: bytes | memoryview, max_positions: int) -> ParcelHeader | None:
    """None where ``data`` is no header of this version, or names no position or more than
    ``max_positions``."""
    size = len(data) - _HEADER.size
    if not 0 < size <= 4 * max_positions or size % 4:
        return None
    magic, version, lease, secret, offset, length = _HEADER.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or data[5:8] != b"\0\0\0":
        return None
    return ParcelHeader(
        lease, secret, offset, length, struct.unpack_from(f"<{size // 4}I", data, _HEADER.size)
    )


def slices_per_parcel(slice_bytes: int) -> int:
    """How many blocks one parcel may hold, of each of which it carries ``slice_bytes``."""
    return min(MAX_POSITIONS, max(1, PARCEL_BYTES // slice_bytes))


Span: TypeAlias = tuple[int, int]
"""[start, end) in the pool's bytes"""


def spans(pool: Pool, blocks: Sequence[int], offset: int, length: int) -> list[Span]:
    """Where the body of a parcel lies in ``pool``: runs of bytes, as long as they can be."""
    block_bytes = pool.shape[1] * pool.shape[2]
    runs: list[Span] = []
    for block in blocks:
        start = block * block_bytes + offset
        if runs and runs[-1][1] == start:
            runs[-1] = (runs[-1][0], start + length)
        else:
            runs.append((start, start + length))
    return runs


def records(runs: Sequence[Span]) -> Iterator[list[Span]]:
    """Cuts a body into records: for each one the runs that it consists of."""
    record: list[Span] = []
    room = RECORD_BYTES
    for start, end in runs:
        while start < end:
            taken = min(room, end - start)
            record.append((start, start + taken))
            start, room = start + taken, room - taken
            if room == 0:
                yield record
                record, room = [], RECORD_BYTES
    if record:
        yield record


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
    """For a pool of blocks of ``num_layers`` layers of ``layer_bytes``."""

    def __init__(self, num_layers: int, layer_bytes: int) -> None:
        self._num_layers, self._layer_bytes = num_layers, layer_bytes
        self._entries: dict[int, LeaseEntry] = {}

    def open(self, lease: int, secret: bytes, targets: Mapping[int, int]) -> None:
        self.close(lease)
        self._entries[lease] = entry = LeaseEntry(secret, dict(targets))
        self._expect(entry, list(targets))

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        if lease in self._entries:
            self._expect(self._entries[lease], positions)

    def close(self, lease: int) -> None:
        """Claims of this lease are void from now on."""
        entry = self._entries.pop(lease, None)
        if entry is not None:
            entry.is_open = False

    def close_all(self) -> None:
        for lease in list(self._entries):
            self.close(lease)

    def claim(self, header: ParcelHeader) -> Claim | str:
        """The right to write a parcel's body, or what is wrong with it."""
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

    def complete(self, claim: Claim) -> list[Arrival]:
        """The body has been written: says which blocks that completes."""
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
        """The body did not come to its end: another parcel may bring it."""
        for position in claim.header.positions:
            claim.entry.missing[position] |= claim.bits

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
    """Threads of this process write what comes in, as the book of leases allows. ``lock`` guards the book,
    the leased blocks of the pool and what has arrived."""

    one_sided = False
    lingers = False

    def __init__(self, num_layers: int, layer_bytes: int) -> None:
        self._lock = threading.Lock()
        self._book = LeaseBook(num_layers, layer_bytes)
        self._arrivals: deque[Arrival] = deque()
        self._news = Wakeup()

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
        """With the lock held."""
        if arrivals:
            self._arrivals.extend(arrivals)
            self._news.set()
