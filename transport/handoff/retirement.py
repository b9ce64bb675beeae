"""Who may hold blocks for what a worker was called, and is to be told that it is not called so any more.
Pure.

A decode worker keeps the blocks of a one-sided writer until that one has let go. While the writer goes on
under its name it is asked, and answers. A name that ends without its process (another role, another
incarnation) cannot be asked: a Release that was lost, or a Grant that never came, would keep those blocks for
good. So it ends by a word of its own, Retire, which is said again until it is answered.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..messages.incarnation import same_process
from ..messages.messages import Peer, PeerId


@dataclass(slots=True)
class Owed:
    """A decode worker that a name of ours may have been granted blocks by."""

    peer: Peer
    incarnation: int  # of ours, the newest that was
    said: float = -1e9  # when Retire was last said


class Retirement:
    """``ended``: the newest incarnation of ours that is over; those before it are too."""

    def __init__(self) -> None:
        self.ended = 0
        self._owed: dict[PeerId, Owed] = {}

    def met(self, peer: Peer, incarnation: int) -> None:
        """From now on ``peer`` may grant blocks to this incarnation of ours, which writes them by itself."""
        self._owed[peer.worker_id, peer.incarnation] = Owed(peer, incarnation)

    def connects(self, peer: Peer) -> None:
        """A decode worker is spoken to. One that has got a new name may hold what it granted under its old
        one."""
        if names := [owed for (worker_id, _), owed in self._owed.items() if worker_id == peer.worker_id]:
            self._owed.setdefault(
                (peer.worker_id, peer.incarnation), Owed(peer, max(owed.incarnation for owed in names))
            )

    @property
    def is_heard(self) -> bool:
        """Whether everybody knows of the names that are over."""
        return not any(owed.incarnation <= self.ended for owed in self._owed.values())

    def unheard(self) -> list[Peer]:
        """Who does not."""
        return [owed.peer for owed in self._owed.values() if owed.incarnation <= self.ended]

    def to_tell(self, every_s: float, now: float) -> Iterator[PeerId]:
        """Whom to say Retire to now."""
        for peer, owed in self._owed.items() if self.ended else ():
            if owed.incarnation <= self.ended and now - owed.said >= every_s:
                owed.said = now
                yield peer

    def heard(self, worker_id: str, incarnation: int) -> None:
        """That decode worker, whatever it is called now, holds nothing more for ours up to
        ``incarnation``."""
        for peer in [
            peer
            for peer, owed in self._owed.items()
            if peer[0] == worker_id and owed.incarnation <= incarnation
        ]:
            del self._owed[peer]

    def restarted(self, peer: PeerId) -> None:
        """Another process answers at this one's address: what this one held is gone with it."""
        for known in [k for k in self._owed if k[0] == peer[0] and same_process(k[1], peer[1])]:
            del self._owed[known]

    def forget(self, worker_id: str) -> None:
        """It is gone for good."""
        for peer in [peer for peer in self._owed if peer[0] == worker_id]:
            del self._owed[peer]
