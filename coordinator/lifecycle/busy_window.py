"""How busy a worker was lately, by its own reports. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

WINDOW_S = 10.0
MIN_SPACING_S = 0.5  # between two reports that are kept; workers report much more often


class BusyWindow:
    """Measures how busy a worker was in the last WINDOW_S seconds, by the worker's own clock."""

    def __init__(self) -> None:
        self._kept: deque[tuple[float, float]] = deque()
        """(uptime, busy) in seconds; the first is WINDOW_S old, or the oldest there is."""
        self._newest: tuple[float, float] | None = None

    def report(self, counters: Mapping[str, float]) -> None:
        """Take the cumulative counters of a load report; one without ``busy_seconds`` is ignored."""
        uptime, busy = counters.get("uptime_seconds"), counters.get("busy_seconds")
        if uptime is None or busy is None:
            return
        self._newest = uptime, busy
        if not self._kept or uptime - self._kept[-1][0] >= MIN_SPACING_S:
            self._kept.append(self._newest)
        while len(self._kept) > 1 and self._kept[1][0] <= uptime - WINDOW_S:
            self._kept.popleft()

    @property
    def share(self) -> float | None:
        """Share of the window in which a step ran, 0 to 1; None: not known."""
        if self._newest is None or (seconds := self._newest[0] - self._kept[0][0]) <= 0:
            return None
        return min(1.0, max(0.0, (self._newest[1] - self._kept[0][1]) / seconds))
