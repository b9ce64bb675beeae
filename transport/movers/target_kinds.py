"""What receiving ends have in common: those whose writers write by themselves, and those that write what comes in."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence

from ..channels.wakeup import Wakeup
from .interface import Arrival
from .lease_book import LeaseBook


class OneSidedTarget:
    """The receiving side has nothing to do: the writer writes, and Handoff tells that it has."""

    one_sided = True
    lingers = False
    fd: int | None = None

    def open(self, lease: int, secret: bytes, targets: Mapping[int, int]) -> None:
        """Nothing to prepare: the grant itself tells the writer where to write."""

    def expect_again(self, lease: int, positions: Sequence[int]) -> None:
        """Nothing to prepare."""

    def close(self, lease: int) -> None:
        """Cannot stop the writer; see ``PutTarget.one_sided``."""

    def poll(self, limit: int) -> list[Arrival]:
        return []

    def close_all(self) -> None:
        """The pool's memory is its owner's."""


class BookedTarget:
    """Threads of this process write what comes in, as the book of leases allows. ``lock`` guards the book, the leased blocks of the pool
    and what has arrived."""

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
