"""A host: its clock is set forwards and backwards while processes run on it, and between their runs."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from simulation.clock import EventQueue

from splitserve.transport.messages.fields import incarnations

DAY_S = 86_400.0
JUMPS_S = (2.0, 60.0, 3600.0, DAY_S, 3650 * DAY_S)
"""A clock that is corrected, a virtual machine that goes on, a time zone in the wrong place, a host without a
battery."""


class Host:
    """What its processes can know of where they run."""

    def __init__(self, queue: EventQueue, random: Random) -> None:
        self._queue, self._random = queue, random
        self._offset_s = random.uniform(0.0, 50 * 365 * DAY_S)

    def time_ns(self) -> int:
        """The wall clock."""
        return int(1e9 * (self._offset_s + self._queue.now))

    def jump(self) -> None:
        """Its clock is set anew: seconds, hours or years from where it was, never before 1970."""
        by = self._random.choice(JUMPS_S) * self._random.uniform(0.5, 1.5) * self._random.choice((-1, 1))
        self._offset_s = max(0.0, self._offset_s + by)

    def incarnations(self) -> Callable[[], int]:
        """The numbers of a process that starts here."""
        return incarnations(self._random.getrandbits)
