"""When a process that has ended starts again. Pure: times come from the caller."""

from __future__ import annotations

from dataclasses import dataclass

FIRST_DELAY_S = 0.1
LONGEST_DELAY_S = 30.0
STABLE_AFTER_S = 20.0


@dataclass(slots=True)
class RestartPolicy:
    """Doubling delays for one process; a process that ran for ``stable_after_s`` begins with the first delay
    again."""

    first_delay_s: float = FIRST_DELAY_S
    longest_delay_s: float = LONGEST_DELAY_S
    stable_after_s: float = STABLE_AFTER_S
    _started: float = 0.0
    _next_delay_s: float = 0.0

    def started(self, now: float) -> None:
        self._started = now

    def delay_after_exit(self, now: float, *, ever_ready: bool) -> float | None:
        """Seconds to wait before the next start; None: give up, for what has never worked does not get better
        by trying."""
        if not ever_ready:
            return None
        if now - self._started >= self.stable_after_s or not self._next_delay_s:
            self._next_delay_s = self.first_delay_s
        delay = self._next_delay_s
        self._next_delay_s = min(2 * delay, self.longest_delay_s)
        return delay
