"""Cached blocks on their way from the KV store to prompts that begin with them. Pure.

    a prompt comes        what is cached of it is held, and the next group of its blocks is read; if another
                          worker sends blocks of it, that comes first
    a group comes whole   it is in the cache, and more are read, ``ahead`` groups at a time
    one comes short       the store has no more of it: the prompt begins
    it takes too long     the prompt begins, and computes the rest (``PrefixWaits``)

A prompt whose next block is being read for another one waits for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from ..transport.handoff.protocol import Key, PrefixOver
from .chunks import PrefillSequence
from .prefix_waits import PrefixWaits
from .scheduler import PrefillScheduler


class ReadSizes(NamedTuple):
    """Blocks that are read as one group, and groups of a prompt that are read at a time."""

    group: int
    ahead: int


NO_STORE = ReadSizes(0, 0)


@dataclass(slots=True)
class _Reading:
    hashes: list[bytes]
    blocks: list[int]  # of the first ones, referenced here
    num_asked: int  # leading hashes that are here or have been asked for


class StoredPrefixes:
    """The prompts of ``scheduler`` whose blocks are being read."""

    def __init__(self, scheduler: PrefillScheduler, sizes: ReadSizes, left: Callable[[], int]) -> None:
        """``left`` returns how many blocks to leave to sequences that run here."""
        self._scheduler, self._blocks, self._left = scheduler, scheduler.blocks, left
        self._group, self._ahead = sizes
        self.waits = PrefixWaits()
        self.num_tokens = 0  # that have come
        self._orders: list[tuple[Key, list[bytes]]] = []
        self._reading: dict[Key, _Reading] = {}

    def begin(self, sequence: PrefillSequence, tokens_per_s: float | None, now: float) -> None:
        """Have a prompt that has just come, or to which no worker sends more, wait for what the store may
        have of it. Once: what is still being read for it would be taken for the new."""
        if not self._group or sequence.from_store:
            return
        hashes = sequence.usable_hashes(size := self._scheduler.block_size)
        num_tokens = (len(hashes) - (num_cached := self._blocks.match_prefix(hashes))) * size
        if not (wait_s := self.waits.seconds(num_tokens, tokens_per_s, now)):
            return
        sequence.prefix_by, sequence.from_store, last = now + wait_s, True, hashes[num_cached]
        sequence.prefix_of = next((key for key, other in self._reading.items() if last in other.hashes), None)
        if sequence.prefix_of is None:
            blocks = self._blocks.acquire_prefix(hashes)
            self._reading[sequence.key] = reading = _Reading(hashes, blocks, num_cached)
            self._ask(sequence.key, reading)

    def take_orders(self) -> list[tuple[Key, list[bytes]]]:
        """Return what is to be read since the last call: of each of these the leading blocks that the store
        has, to be reported under this key in this order."""
        orders, self._orders = self._orders, []
        return orders

    def arrived(self, key: Key, count: int) -> list[int]:
        """The next ``count`` blocks have been read. Return those to fill; none: they are not needed."""
        if (reading := self._reading.get(key)) is None:
            return []
        spare = self._blocks.num_available - self._left()
        if not (blocks := self._blocks.allocate(count) if 0 < count <= spare else None):
            self._over(key)
            return []
        reading.blocks += blocks
        return blocks

    def filled(self, key: Key, count: int) -> None:
        """The last ``count`` that ``arrived`` have their content."""
        reading, self.num_tokens = self._reading[key], self.num_tokens + count * self._scheduler.block_size
        end = len(reading.blocks)
        hashes, parent = reading.hashes[end - count : end], reading.hashes[end - count - 1 : end - count]
        self._blocks.commit_all(reading.blocks[-count:], hashes, parent[0] if parent else None)
        if count < self._group or end == len(reading.hashes):
            self._over(key)
            return
        while reading.num_asked < min(len(reading.hashes), end + self._ahead * self._group):
            self._ask(key, reading)

    def _ask(self, key: Key, reading: _Reading) -> None:
        first, reading.num_asked = reading.num_asked, reading.num_asked + self._group
        self._orders.append((key, reading.hashes[first : reading.num_asked]))

    def _over(self, key: Key) -> None:
        self.waits.over(PrefixOver(key, came=True), self._scheduler.waiting)
        self.end(key)

    def end(self, *keys: Key) -> None:
        """Read no more for these prompts. Those that wait for the same blocks begin."""
        for key in keys:
            if (reading := self._reading.pop(key, None)) is not None:
                self._blocks.release(reading.blocks)
                for sequence in self._scheduler.waiting.values():
                    if sequence.prefix_of == key:
                        sequence.prefix_by = 0.0

    def tick(self, now: float) -> None:
        """Hold nothing for prompts that wait no more: they may have to wait for each other's blocks."""
        waiting = self._scheduler.waiting
        self.end(*(key for key in self._reading if now >= waiting[key].prefix_by))

    def block_tables(self) -> Iterator[list[int]]:
        """Yield the blocks that are referenced here, prompt by prompt."""
        yield from (reading.blocks for reading in self._reading.values())
