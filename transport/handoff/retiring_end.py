"""The sending end of a role that is over, in a process that goes on: it sends Retire to the decode workers
that may hold blocks for it, until each has answered."""

from __future__ import annotations

from .protocol import Undelivered
from .sender import HandoffSender
from .sending_end import SendingEnd

TICK_S = 0.05


class RetiringEnd:
    """Its owner calls ``turn`` again and again until it ``is_over``, then ``close``."""

    def __init__(self, end: SendingEnd, sender: HandoffSender) -> None:
        """``end``: of a worker at rest, of which nothing else is used any more."""
        self._end, self._sender = end, sender
        self._ticked = float("-inf")
        self._network = end.stop_writing()
        sender.retire()

    @property
    def is_over(self) -> bool:
        return self._sender.meetings.retirement.is_complete

    def turn(self, now: float) -> None:
        """Send what is due, and receive the answers."""
        self._end.receive(self._network.ready(), now)
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self._sender.tick(now)
        for action in self._sender.take():
            assert not isinstance(action, Undelivered), "a worker at rest hands nothing over"
            self._end.carry_out(action)

    def close(self) -> None:
        self._end.close()
