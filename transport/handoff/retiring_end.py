"""The sending end of a role that is over, in a process that goes on: decode workers that may hold blocks for it are told until they have
heard."""

from __future__ import annotations

import zmq

from .actions import Undelivered
from .sender import HandoffSender
from .sending_end import SendingEnd

TICK_S = 0.05


class RetiringEnd:
    """Its owner calls ``turn`` again and again until it ``is_over``, then ``close``."""

    def __init__(self, end: SendingEnd, sender: HandoffSender) -> None:
        """``end``: of a worker at rest, of which nothing else is used any more."""
        self._end, self._sender = end, sender
        self._poller = zmq.Poller()
        self._ticked = 0.0
        end.stop_writing(self._poller)
        sender.retire()

    @property
    def is_over(self) -> bool:
        return self._sender.has_retired

    def turn(self, now: float) -> None:
        """Says what is due, and hears the answers."""
        self._end.receive({socket for socket, _ in self._poller.poll(0)}, now)
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self._sender.tick(now)
        for action in self._sender.take():
            assert not isinstance(action, Undelivered), "a worker at rest hands nothing over"
            self._end.carry_out(action)

    def close(self) -> None:
        self._end.close()
