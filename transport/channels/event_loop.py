"""Timers and channels on an asyncio (or uvloop) event loop. A channel is read by the loop's reader on the
socket's FD; zmq.asyncio is 4 times slower.

The FD is edge-triggered, and *any* use of the socket may consume the edge. So: read until nothing is left or
the budget is spent, then look again in the next turn; and look again after every send.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from .channels import DealerChannel, RouterChannel

BUDGET = 256  # messages per turn of the loop


class LoopTimers:
    """An event loop's timers. uvloop's own clock stands still during a callback; this one goes on."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.call_soon, self.call_later = loop.call_soon, loop.call_later

    def now(self) -> float:
        return time.monotonic()


class Attachment:
    """Passes the lists that ``channel.receive`` returns to ``callback`` on ``loop``, at most BUDGET of them a
    turn, until closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        channel: RouterChannel | DealerChannel,
        callback: Callable[[list[Any]], None],
    ):
        self._loop = loop
        self._channel = channel
        self._callback = callback
        self._scheduled: asyncio.Handle | None = None
        self._fd = channel.fd
        channel.after_send = self._look_again
        loop.add_reader(self._fd, self._drain)
        self._schedule()  # what came before us gives no edge any more

    def close(self) -> None:
        """Stops reading. The channel stays open."""
        self._loop.remove_reader(self._fd)
        self._channel.after_send = None
        if self._scheduled is not None:
            self._scheduled.cancel()

    def _drain(self) -> None:
        self._scheduled = None
        messages = self._channel.receive(BUDGET)
        self._look_again()
        if messages:
            self._callback(messages)

    def _look_again(self) -> None:
        if self._scheduled is None and self._channel.readable:
            self._schedule()

    def _schedule(self) -> None:
        self._scheduled = self._loop.call_soon(self._drain)
