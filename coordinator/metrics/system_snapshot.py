"""The serving system at one moment, as metrics and dashboard read it. Plain values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NOTHING: Mapping[str, float] = {}


class WorkerSnapshot(NamedTuple):
    """One worker as it last reported."""

    worker_id: str
    role: str
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    blocks_leased: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    steps: int
    counters: Mapping[str, float] = NOTHING  # cumulative since the worker's start
    draining: bool = False
    host: str = ""
    pid: int = 0
    device: str = ""  # its GPU's UUID; of four GPUs the first one's and *4
    gauges: Mapping[str, float] = NOTHING
    busy: float | None = None  # share of the last seconds in which a step ran, 0 to 1; None: not known
    adapters: Sequence[str] = ()  # names of those that it has
    max_num_seqs: int = 0  # rows of its batch; 0: not known


@dataclass(frozen=True, slots=True)
class SystemSnapshot:
    """The serving system behind the HTTP server. ``counters`` are the lifecycle's own, cumulative since the
    start."""

    ready: bool = False
    gap: str = ""  # why no workers can serve requests
    num_waiting: int = 0  # requests not yet dispatched
    num_running: int = 0  # dispatched and not ended
    workers: Sequence[WorkerSnapshot] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)  # requests by the stage that they are in
    steering: Mapping[str, Any] | None = None  # JSON-ready; None: there is no pool controller
    # why the latest workers that are gone are gone, by worker id
    reasons_lost: Mapping[str, str] = field(default_factory=dict)
    num_adapters: int = 0  # that requests may name
    last_retries: Sequence[str] = ()  # the latest requests that had to be dispatched again, and why


class CounterGrowth:
    """How much the workers' counters have grown since the last look. A worker that starts anew counts from
    zero; one that is seen for the first time has not grown yet."""

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
