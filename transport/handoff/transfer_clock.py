"""How fast a mover is: times each burst of puts to a peer, from its first put until nothing of it is
pending."""

from __future__ import annotations

from .handoff import PeerId

SETTLED_BYTES = 1 << 20  # a smaller burst tells of wake-ups, not of the mover


class TransferClock:
    """``now`` is seconds of one monotonic clock."""

    def __init__(self) -> None:
        self._bursts: dict[PeerId, tuple[float, int]] = {}
        self.num_bytes = 0
        self.seconds = 0.0

    def put(self, peer: PeerId, num_bytes: int, now: float) -> None:
        """A put of this size is about to start."""
        since, before = self._bursts.get(peer, (now, 0))
        self._bursts[peer] = since, before + num_bytes

    def settled(self, peer: PeerId, now: float) -> tuple[int, float] | None:
        """Nothing is pending for this peer any more: (bytes, seconds) of the burst, if it was large enough to
        tell."""
        burst = self._bursts.pop(peer, None)
        if burst is None:
            return None
        since, num_bytes = burst
        self.num_bytes += num_bytes
        self.seconds += now - since
        return (num_bytes, now - since) if num_bytes >= SETTLED_BYTES else None

    def forget(self, peer: PeerId) -> None:
        """The mover has failed: this burst tells nothing."""
        self._bursts.pop(peer, None)
