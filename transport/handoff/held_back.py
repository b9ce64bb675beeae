"""Messages about blocks that a put may still be writing. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from ..messages.messages import PeerId

Send: TypeAlias = Callable[[], None]
Writing: TypeAlias = Callable[[int], bool]
"""Whether a put under this lease may still be writing."""


class HeldBack:
    """A message that lets the peer read blocks (Placed, Handoff) or reuse them (Release) waits, in order,
    until no put under its lease is under way. After a mover was closed in the middle of one, nothing more is
    sent about its lease, and the peer shuts this worker out before it reuses those blocks."""

    def __init__(self) -> None:
        self._queues: dict[PeerId, deque[tuple[int, Send]]] = {}
        self._unsettled: set[int] = set()  # leases under which a put of a closed mover may still land

    def send(self, peer: PeerId, lease: int, writing: Writing, send: Send) -> None:
        """Call ``send`` as soon as the message may go; ``lease`` 0: it is about no blocks."""
        if lease in self._unsettled:
            return
        queue = self._queues.get(peer, ())
        if lease and (writing(lease) or any(held == lease for held, _ in queue)):
            self._queues.setdefault(peer, deque()).append((lease, send))
        else:
            send()

    def written(self, peer: PeerId, writing: Writing) -> None:
        """Send the messages whose puts have ended."""
        if peer not in self._queues:
            return
        queue, still = self._queues.pop(peer), set[int]()
        for lease, send in queue:
            if lease in still or writing(lease):
                still.add(lease)
                self._queues.setdefault(peer, deque()).append((lease, send))
            else:
                send()

    def waits(self, peer: PeerId) -> bool:
        """Return whether a message to this peer waits."""
        return peer in self._queues

    def close(self, peer: PeerId, unsettled: Iterable[int]) -> None:
        """Drop the peer's messages: its mover is closed, and under the leases ``unsettled`` a put may still
        land. Handoff is of no use any more, and Release is sent again when the peer asks."""
        self._unsettled.update(unsettled)
        self._queues.pop(peer, None)
