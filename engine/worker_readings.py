"""What a worker reports of itself at every heartbeat: how busy it is, and how long its start took."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping


class StartPhases:
    """``done(name)`` after each phase; the clock runs from construction."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self.seconds: dict[str, float] = {}

    def done(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = now - self._last, now

    def __str__(self) -> str:
        """``3.1 s: fingerprint 0.4, weights 2.1, KV cache 0.2, warm-up 0.4``"""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self.seconds.items())
        return f"{self._last - self._start:.1f} s: {parts}"


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
