"""Which puts a two-sided mover's receiver accepts: the leases that are open, and what of their blocks has not come yet. No I/O."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .interface import Arrival
from .parcel import ParcelHeader


@dataclass(slots=True)
class LeaseEntry:
    """An open lease. A layer of a position is *missing* until a parcel claims it, and *awaited* until that parcel is complete."""

    secret: bytes
    targets: Mapping[int, int]
    missing: dict[int, int] = field(default_factory=dict)  # by position, a bit for each layer
    awaited: dict[int, int] = field(default_factory=dict)  # by position, number of layers
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class Claim:
    """A parcel whose body may be written: ``length`` bytes from ``offset`` of each of ``blocks``. Ask ``valid`` before each write."""

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
