"""How much the workers' counters have grown since one last looked. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from .system_snapshot import WorkerSnapshot


class CounterGrowth:
    """A worker that starts anew counts from zero; one that is seen for the first time has not grown yet."""

    def __init__(self, *names: str) -> None:
        self._names = names
        self._before: dict[tuple[str, str], float] = {}

    def since_last(self, workers: Iterable[WorkerSnapshot]) -> dict[str, float]:
        """By counter, over all workers."""
        grown = dict.fromkeys(self._names, 0.0)
        now = {
            (worker.worker_id, name): worker.counters[name]
            for worker in workers
            for name in self._names
            if name in worker.counters
        }
        for (worker_id, name), value in now.items():
            before = self._before.get((worker_id, name), value)
            grown[name] += value - before if value >= before else value
        self._before = now
        return grown
