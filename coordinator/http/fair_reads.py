"""Lets no connection that sends much keep the event loop: uvloop alone reads up to 8 MB of one in a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

TURN_BYTES = 128 << 10
"""A turn reads no more than these and one buffer (uvloop's has 250 KiB): less than a millisecond's work."""


class FairReads:
    """Pauses the reading of one connection until the next turn of the loop."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, is_paused: Callable[[], bool]
    ) -> None:
        """``is_paused``: whether the protocol itself wants nothing more now; then it resumes reading
        itself."""
        self._loop, self._transport, self._is_paused = loop, transport, is_paused
        self._num_bytes = 0

    def received(self, num_bytes: int) -> None:
        """Call it once these bytes have been worked on."""
        self._num_bytes += num_bytes
        if self._num_bytes > TURN_BYTES:
            self._num_bytes = 0
            if not self._is_paused():
                self._transport.pause_reading()
                self._loop.call_soon(self._resume)

    def _resume(self) -> None:
        if not self._is_paused() and not self._transport.is_closing():
            self._transport.resume_reading()
