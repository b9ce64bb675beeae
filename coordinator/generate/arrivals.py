"""The calls that have come since the last turn of the event loop, and how many of them one turn handles."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from ..http.call import Call
from ..http.limits import LARGE_BODY_BYTES

MAX_PER_TURN = 32
"""Requests that are handled before streams are served again: some milliseconds."""


class Arrivals:
    """FIFO queue of complete calls."""

    def __init__(self, handle: Callable[[list[tuple[Call, float]]], None]) -> None:
        """``handle`` takes some calls, each with when it came, in monotonic seconds."""
        self._handle = handle
        self._waiting: list[tuple[Call, float]] = []

    def add(self, call: Call) -> None:
        """Have it handled with the next turn of the loop, together with all others that come by then."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.append((call, monotonic()))

    def _turn(self) -> None:
        """Handle as many calls as one turn of the loop may: streams are served between two turns."""
        count = num_bytes = 0
        for call, _ in self._waiting[:MAX_PER_TURN]:
            if count and num_bytes + len(call.body) > LARGE_BODY_BYTES:
                break
            count, num_bytes = count + 1, num_bytes + len(call.body)
        now, self._waiting = self._waiting[:count], self._waiting[count:]
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._handle(now)
