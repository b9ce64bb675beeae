"""What the output costs: GPUs, energy and money per token, over the last minute and since the start. Pure;
times in seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from .system_snapshot import CounterGrowth, SystemSnapshot, WorkerSnapshot

WINDOW_S = 60.0
HOUR_S = 3600.0


class Spent(NamedTuple):
    """Between two samples."""

    until: float
    tokens: float  # output tokens
    gpu_s: float
    joules: float
    cost: float


class Efficiency:
    """``price_per_hour``: of one GPU, or of one worker where it has none; None: not configured. Two workers
    on one GPU, or on the same ones, are one."""

    def __init__(self, price_per_hour: float | None) -> None:
        self._price = price_per_hour
        self._tokens = CounterGrowth("output_tokens")
        self._joules = CounterGrowth("gpu_energy_joules")
        self._window: deque[Spent] = deque()
        self._sampled_at: float | None = None
        self.gpu_s = self.joules = self.cost = 0.0
        """Since the start."""

    def sample(self, now: float, system: SystemSnapshot) -> None:
        """Book the time since the last sample to the present workers."""
        seconds = 0.0 if self._sampled_at is None else max(0.0, now - self._sampled_at)
        self._sampled_at = now
        gpus = {worker.device: worker for worker in system.workers if worker.device}
        num_gpus = sum(map(num_gpus_of, gpus))
        num_paid = num_gpus + sum(not worker.device for worker in system.workers)
        spent = Spent(
            until=now,
            tokens=self._tokens.since_last(system.workers)["output_tokens"],
            gpu_s=num_gpus * seconds,
            joules=self._joules.since_last(_one_a_gpu(gpus))["gpu_energy_joules"],
            cost=num_paid * seconds / HOUR_S * (self._price or 0.0),
        )
        self.gpu_s, self.joules, self.cost = (
            self.gpu_s + spent.gpu_s,
            self.joules + spent.joules,
            self.cost + spent.cost,
        )
        self._window.append(spent)
        while self._window[0].until < now - WINDOW_S:
            self._window.popleft()

    @property
    def has_price(self) -> bool:
        return self._price is not None

    def gauges(self) -> dict[str, float]:
        """Over the last minute; what cannot be known is left out."""
        tokens, gpu_s, joules, cost = (sum(spent[i] for spent in self._window) for i in range(1, 5))
        found: dict[str, float] = {}
        if gpu_s:
            found["tokens_per_gpu_hour"] = tokens / gpu_s * HOUR_S
        if tokens and self.has_price:
            found["cost_per_million_tokens"] = cost / tokens * 1e6
        if tokens and joules:
            found["joules_per_token"] = joules / tokens
        return found


def num_gpus_of(device: str) -> int:
    """Return how many GPUs a worker's device is: 4 of GPU-UUID*4."""
    number = device.rpartition("*")[2]
    return int(number) if number.isdecimal() else 1


def _one_a_gpu(gpus: dict[str, WorkerSnapshot]) -> Iterable[WorkerSnapshot]:
    """Return one worker for each GPU, under the GPU's name: its energy counts once."""
    return [worker._replace(worker_id=device) for device, worker in gpus.items()]
