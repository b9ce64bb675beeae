"""When a process that has ended starts again, and which running one is hung and has to end. Pure: times come
from the caller."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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


class HungWatch:
    """A worker that the coordinator knew, and has not known for ``patience_s`` while its process runs, is
    hung: only its end helps."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._last_known: dict[tuple[str, int], float] = {}

    def hung(self, known: Collection[str], running: Mapping[str, int], now: float) -> list[str]:
        """Return the workers to kill, each process once. ``known``: workers that the coordinator counts as
        alive; ``running``: process ids by worker."""
        processes = {(name, pid) for name, pid in running.items()}
        self._last_known = {process: at for process, at in self._last_known.items() if process in processes}
        for process in processes:
            if process[0] in known:
                self._last_known[process] = now
        given_up = [process for process, at in self._last_known.items() if now - at >= self._patience_s]
        for process in given_up:
            del self._last_known[process]
        return sorted(name for name, _ in given_up)
