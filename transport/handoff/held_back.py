"""Messages about blocks that a put may still be writing: when each may be sent. Pure.

A message that lets the peer read blocks (Placed, Handoff) or give them to others (Release) waits until every
put under its lease has been written or has ended. What waits is sent in order. After a mover was closed in
the middle of a put, nobody knows when that put has ended: nothing more is sent of its lease, and the peer
shuts us out before it gives those blocks to others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from ..messages.messages import PeerId

Send: TypeAlias = Callable[[], None]


class HeldBack:
    """``writing``, wherever it is asked for: whether a put under this lease may still be writing."""

    def __init__(self) -> None:
        self._queues: dict[PeerId, deque[tuple[int, Send]]] = {}
        self._unsettled: set[int] = (
            set()
        )  # leases under which something may still land that a closed mover had begun

    def send(self, peer: PeerId, lease: int, writing: Callable[[int], bool], send: Send) -> None:
        """Call ``send`` as soon as it may be; ``lease`` 0: the message is about no blocks."""
        if lease in self._unsettled:
            return
        queue = self._queues.get(peer, ())
        if lease and (writing(lease) or any(held == lease for held, _ in queue)):
            self._queues.setdefault(peer, deque()).append((lease, send))
        else:
            send()

    def written(self, peer: PeerId, writing: Callable[[int], bool]) -> None:
        """Puts to this peer may have ended: send what waited for them."""
        if peer not in self._queues:
            return
        queue, still = self._queues.pop(peer), set[int]()
        for lease, send in queue:
            if lease in still or writing(lease):
                still.add(lease)
                self._queues.setdefault(peer, deque()).append((lease, send))
            else:
                send()

    def close(self, peer: PeerId, unsettled: Iterable[int]) -> None:
        """The mover to this peer is closed; under the leases ``unsettled`` something may still land. Handoff
        is of no use any more, and Release is sent again where it is asked for."""
        self._unsettled.update(unsettled)
        self._queues.pop(peer, None)
