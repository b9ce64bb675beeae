"""How fast each worker is in either role, as a multiple of the latency model: predicted over measured
seconds of the last minute. Pure; times in seconds.

prefill  its full steps
decode   its steps between two looks, if it had sequences at both
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..coordinator.lifecycle.snapshot import WorkerState
from ..engine.latency_profile import Profile
from ..transport.messages.messages import Load
from .capacity import Capacity
from .load_watch import LoadPicture
from .options import SteeringOptions

MEMORY_S = 60.0
PRIOR_S = 2.0  # of work, assumed to go as in the other role


class Speed(NamedTuple):
    """1: as the latency model predicts."""

    prefill: float = 1.0
    decode: float = 1.0

    @property
    def suits_prefill(self) -> int:
        """How much better it is at prompts than at answers, in coarse steps."""
        return round(math.log(self.prefill / self.decode) / math.log(1.5))


class Speeds:
    """Call ``look`` at each look. ``profile`` None: all are 1."""

    def __init__(self, options: SteeringOptions, profile: Profile | None) -> None:
        self._options, self._profile = options, profile
        self._reports: dict[str, tuple[float, Load]] = {}  # by worker, with the time of the look
        # by process: seconds, predicted and measured, of prefill and decode
        self._work: defaultdict[str, np.ndarray] = defaultdict(lambda: np.full((2, 2), 1e-3))

    def look(self, workers: Sequence[WorkerState], picture: LoadPicture, now: float) -> dict[str, Speed]:
        """Return the speeds by process; by worker for those without a process."""
        reports = self._reports
        self._reports = {w.worker_id: (now, w.load) for w in workers if w.load is not None}
        for worker in workers:
            if self._profile is None or worker.load is None or not picture.new_tokens:
                continue
            capacity = Capacity(self._profile, self._options, worker.max_batch_tokens, worker.max_num_seqs)
            before = reports.get(worker.worker_id, (now, worker.load))
            work = self._work[worker.process or worker.worker_id]
            work *= math.exp(-self._options.every_s / MEMORY_S)
            work[int(worker.role == "decode")] += _seconds(
                worker, worker.load, before, now, capacity, picture
            )
        for gone in self._work.keys() - {worker.process or worker.worker_id for worker in workers}:
            del self._work[gone]
        return {name: _speed(work) for name, work in self._work.items()}


def _seconds(
    worker: WorkerState,
    load: Load,
    before: tuple[float, Load],
    now: float,
    capacity: Capacity,
    picture: LoadPicture,
) -> tuple[float, float]:
    """Return the predicted and the measured seconds of its steps since ``before``."""
    since, last = before
    if worker.role == "decode":
        if not last.num_running or not load.num_running or load.steps < last.steps:
            return 0.0, 0.0
        return (load.steps - last.steps) * capacity.step_s(load.num_running, picture), now - since
    names = ("full_step_tokens", "full_step_seconds")
    tokens, seconds = (max(0.0, load.counters.get(n, 0.0) - last.counters.get(n, 0.0)) for n in names)
    return tokens * capacity.prompt_s(picture) / picture.new_tokens, seconds


def _speed(work: np.ndarray) -> Speed:
    of_other = (work[::-1, 0] + PRIOR_S) / (work[::-1, 1] + PRIOR_S)
    return Speed(*((work[:, 0] + PRIOR_S * of_other) / (work[:, 1] + PRIOR_S)).tolist())
