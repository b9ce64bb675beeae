"""What a worker's process reports of itself at every heartbeat: how busy it is, and how long its start
took."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping


class BusyClock:
    """Sums the seconds in which a step ran. One thread calls ``begin`` and ``end``; any thread may read
    ``seconds``."""

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (
            0.0,
            None,
        )  # the sum, and when the running step began: replaced together
        self._ended = float("-inf")

    def begin(self, at: float) -> None:
        """A step has begun, or was launched, at this time. It runs once the one before has ended."""
        self._state = self._state[0], max(at, self._ended)

    def end(self, now: float) -> None:
        """The step has ended."""
        self._state, self._ended = (self.seconds(now), None), now

    def seconds(self, now: float) -> float:
        """Seconds until now, those of the running step included."""
        total, began = self._state
        return total if began is None else total + max(0.0, now - began)


class WorkerReadings:
    """See ``transport.reports.Telemetry``. ``busy_seconds``: of all steps so far; ``phases``: of the start,
    in seconds by name."""

    def __init__(
        self, busy_seconds: Callable[[], float], phases: Mapping[str, float], clock: Callable[[], float]
    ) -> None:
        self._busy_seconds, self._clock, self._began = busy_seconds, clock, clock()
        self._phases = dict(phases)

    def connected(self) -> None:
        """A coordinator has taken this worker in: the start is over, if it was not before."""
        self._phases.setdefault("connect", self._clock() - self._began)

    @property
    def counters(self) -> dict[str, float]:
        return {"busy_seconds": self._busy_seconds(), "uptime_seconds": self._clock() - self._began}

    @property
    def gauges(self) -> dict[str, float]:
        return {
            f"start_seconds_{re.sub('[^a-z]', '_', name.lower())}": seconds
            for name, seconds in self._phases.items()
        }
