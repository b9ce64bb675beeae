"""The decode workers that may hold blocks for an earlier name of this worker, and must learn that the name
has ended. Pure.

A decode worker keeps the blocks of a one-sided writer until the writer releases them. A writer that goes on
under its name is asked, and answers. A name that ends without its process (another role, another incarnation)
cannot be asked: a lost Release, or a Grant that never came, would keep those blocks for good. So the process
sends Retire with the ended incarnation, and repeats it until Retired.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..messages.incarnation import same_process
from ..messages.messages import Peer, PeerId


@dataclass(slots=True)
class Holder:
    """A decode worker that may hold blocks for an incarnation of ours."""

    peer: Peer
    incarnation: int  # the newest of ours that it may hold blocks for
    sent_at: float = -1e9  # when Retire was last sent


class Retirement:
    """``ended``: our newest incarnation that is over; those before it are over too."""

    def __init__(self) -> None:
        self.ended = 0
        self._holders: dict[PeerId, Holder] = {}

    def add(self, peer: Peer, incarnation: int) -> None:
        """Note that ``peer`` may grant blocks to this incarnation of ours, which writes them by itself."""
        self._holders[peer.worker_id, peer.incarnation] = Holder(peer, incarnation)

    def connected(self, peer: Peer) -> None:
        """Note that there is a channel to this decode worker. Under a new name it may still hold the blocks
        that it granted under its old one."""
        known = [h.incarnation for (worker_id, _), h in self._holders.items() if worker_id == peer.worker_id]
        if known:
            self._holders.setdefault((peer.worker_id, peer.incarnation), Holder(peer, max(known)))

    @property
    def is_complete(self) -> bool:
        """Whether no decode worker may hold blocks for a name of ours that has ended."""
        return not self.pending()

    def pending(self) -> list[Peer]:
        """Return the decode workers that have not answered Retire."""
        return [holder.peer for holder in self._holders.values() if holder.incarnation <= self.ended]

    def due(self, every_s: float, now: float) -> Iterator[PeerId]:
        """Yield the decode workers that Retire is to be sent to now."""
        for peer, holder in self._holders.items() if self.ended else ():
            if holder.incarnation <= self.ended and now - holder.sent_at >= every_s:
                holder.sent_at = now
                yield peer

    def answered(self, worker_id: str, incarnation: int) -> None:
        """Note that this decode worker, under any name, holds nothing for ours up to ``incarnation``."""
        for peer in [
            p for p, h in self._holders.items() if p[0] == worker_id and h.incarnation <= incarnation
        ]:
            del self._holders[peer]

    def restarted(self, peer: PeerId) -> None:
        """Forget this decode worker's process: another one answers at its address."""
        for known in [k for k in self._holders if k[0] == peer[0] and same_process(k[1], peer[1])]:
            del self._holders[known]

    def forget(self, worker_id: str) -> None:
        """Forget this decode worker: it is gone for good."""
        for peer in [peer for peer in self._holders if peer[0] == worker_id]:
            del self._holders[peer]
