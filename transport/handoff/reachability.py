"""When a decode worker that cannot be reached is given up. Pure.

A peer's patience counts from when the connection was lost, or from when the peer was last wanted, whichever
is later: a prompt for a peer that has been away for long gives it the same time to come back as any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..messages.messages import PeerId

Verdict: TypeAlias = Literal["here", "lost", "forgotten"]


@dataclass(frozen=True, slots=True)
class ReachTimes:
    """Patience, in seconds."""

    beyond_reach: float = 1.0  # ZeroMQ connects again within a tenth of a second where it can
    first_contact: float = 5.0  # the first connection, whose handshake waits for both ends' threads
    forgotten: float = 300.0  # connected to anew when a prompt is for it again


class Reachability:
    """Judges each peer that has a channel."""

    def __init__(self, times: ReachTimes | None = None) -> None:
        self._times = times or ReachTimes()
        self._wanted_at: dict[PeerId, float] = {}

    def wanted(self, peer: PeerId, now: float) -> None:
        """Note that a prompt asks for this peer."""
        self._wanted_at[peer] = now

    def forget(self, peer: PeerId) -> None:
        """Forget the peer: its channel is closed."""
        del self._wanted_at[peer]

    def judge(self, peer: PeerId, gone_since: float | None, ever_connected: bool, now: float) -> Verdict:
        """Return ``lost`` if handoffs to the peer are to be failed, ``forgotten`` if its channel is to be
        closed, too."""
        if gone_since is None:
            return "here"
        away_s, times = now - max(gone_since, self._wanted_at[peer]), self._times
        if away_s > times.forgotten:
            return "forgotten"
        return "lost" if away_s > (times.beyond_reach if ever_connected else times.first_contact) else "here"
