"""Samples the system every two seconds, for all that keep a history of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

from .system_snapshot import SystemSnapshot

PERIOD_S = 2.0


class Sampler:
    """``listeners`` take the time (monotonic seconds) and what was seen."""

    def __init__(
        self, system: Callable[[], SystemSnapshot], listeners: Callable[[float, SystemSnapshot], None]
    ) -> None:
        self._system, self._listeners = system, listeners

    async def follow(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            self._listeners(monotonic(), self._system())
