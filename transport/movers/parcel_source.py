"""The sending side of a two-sided mover: its parcels, in the order in which they were put."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import MoverError
from .interface import Arrival, Items, layer_slice
from .lease_book import blocks_per_parcel


@dataclass(frozen=True, slots=True)
class Parcel:
    """These layers of own blocks, for these positions of a lease."""

    lease: int
    secret: bytes
    positions: tuple[int, ...]
    blocks: list[int]
    layers: slice


class ParcelSource:
    """See ``interface.PutSource``. Threads of a subclass take parcels by ``next`` and report each by
    ``left``. Every method is safe to use from any thread."""

    def __init__(self, shape: Sequence[int]) -> None:
        """``shape``: of the own pool."""
        self._shape = shape
        self._changed = threading.Condition()  # also the lock
        self._waiting: deque[Parcel] = deque()
        self._leaving: list[Parcel] = []
        self._left: list[Arrival] = []
        self._failure = ""
        self._is_closed = False

    @property
    def is_over(self) -> bool:
        """Whether nothing leaves any more."""
        return self._is_closed or bool(self._failure)

    def put(
        self, lease: int, secret: bytes, items: Items, first_layer: int = 0, num_layers: int | None = None
    ) -> None:
        layers = layer_slice(self._shape, first_layer, num_layers)
        num_blocks, _, layer_bytes = self._shape
        if not all(0 <= own < num_blocks for _, own, _ in items):
            raise MoverError(f"put of a block that does not exist; the pool has {num_blocks}")
        size = blocks_per_parcel((layers.stop - layers.start) * layer_bytes)
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        parcels = [
            Parcel(lease, secret, tuple(item[0] for item in part), [item[1] for item in part], layers)
            for part in parts
        ]
        with self._changed:
            self._raise_failure()
            self._waiting.extend(parcels)
            if parcels:
                self._queued(parcels)
            self._changed.notify_all()

    def poll(self) -> list[Arrival]:
        with self._changed:
            self._raise_failure()
            left, self._left = self._left, []
            return left

    def pending(self) -> int:
        with self._changed:
            return sum(len(parcel.positions) for parcel in (*self._waiting, *self._leaving))

    def writing(self, lease: int) -> bool:
        return False  # the peer writes, and only what its leases allow

    def cancel(self, lease: int) -> None:
        """Report none of the lease's parcels as left."""
        with self._changed:
            self._left = [arrival for arrival in self._left if arrival[0] != lease]

    def next(self) -> Parcel | None:
        """Return a parcel to send now, if any. Then call ``left``."""
        with self._changed:
            if self.is_over or not self._waiting:
                return None
            self._leaving.append(self._waiting.popleft())
            return self._leaving[-1]

    def wait_for_next(self) -> Parcel | None:
        """Wait for a parcel to send. None: the source is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.is_over)
            return self.next()

    def left(self, parcel: Parcel) -> None:
        """Note that this parcel has left."""
        with self._changed:
            self._leaving.remove(parcel)
            self._left += [(parcel.lease, position) for position in parcel.positions]

    def fail(self, reason: str) -> None:
        """Let ``put`` and ``poll`` raise MoverError; the first reason counts."""
        with self._changed:
            self._failure = self._failure or reason
            self._changed.notify_all()

    def _close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _queued(self, parcels: Sequence[Parcel]) -> None:
        """Called after each put, with the lock held."""

    def _raise_failure(self) -> None:
        if self._failure:
            raise MoverError(self._failure)
