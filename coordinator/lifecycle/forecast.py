"""The time to the first token of a request that waits now. Pure; times in seconds.

    time to first token = tokens to compute / tokens per second
    tokens to compute   = (on the workers + ahead in the queue + its own) x share not cached

Workers report the tokens and the seconds of full steps; a step with room left shows no full speed. A worker's
speed is the median of its latest reports, so that one step that hung turns no request away. There is no
forecast until a worker has reported full steps a few times.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from itertools import repeat
from operator import sub
from statistics import median

from ...transport.messages.messages import Load
from .open_workers import OpenWorkers
from .worker import WorkerId, WorkerRecord

MIN_REPORTS, MAX_REPORTS = 3, 15  # with full steps in them
HALF_LIFE_TOKENS = 50_000.0  # of the measured share of cached tokens


@dataclass(slots=True)
class _Speed:
    counters: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # as last reported, cumulative
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))  # tokens/s, full steps
    rate: float | None = None  # their median, once there are enough
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0


class Forecast:
    """Measures how fast each prefill worker computes."""

    def __init__(self) -> None:
        self._speeds: dict[WorkerId, _Speed] = {}
        self._num_known = 0  # workers with a rate
        self._version = 0
        self._cached: tuple[tuple[int, int], float | None, float] | None = None
        """Versions of the speeds and the workers, and for these: tokens_per_s and share_to_compute."""

    def report(self, worker: WorkerRecord, load: Load) -> None:
        """Take a prefill worker's report."""
        get = load.counters.get
        counters = (
            get("full_step_tokens", 0.0),
            get("full_step_seconds", 0.0),
            get("prompt_tokens", 0.0),
            get("cached_tokens", 0.0),
        )
        speed = self._speeds.setdefault(worker.id, _Speed())
        if counters == speed.counters:
            return
        tokens, seconds, prompt, cached = map(max, repeat(0.0), map(sub, counters, speed.counters))
        speed.counters = counters
        self._version += 1
        if tokens and seconds:
            speed.rates.append(tokens / seconds)
            if len(speed.rates) >= MIN_REPORTS:
                self._num_known += speed.rate is None
                speed.rate = median(speed.rates)
        keep = 0.5 ** (prompt / HALF_LIFE_TOKENS)
        speed.prompt_tokens = speed.prompt_tokens * keep + prompt
        speed.cached_tokens = speed.cached_tokens * keep + cached

    def forget(self, worker: WorkerRecord) -> None:
        """Forget a worker that is gone."""
        speed = self._speeds.pop(worker.id, None)
        if speed is not None:
            self._version += 1
            self._num_known -= speed.rate is not None

    @property
    def known(self) -> bool:
        """Whether any worker's speed is known."""
        return self._num_known > 0

    def tokens_per_s(self, workers: OpenWorkers) -> float | None:
        """Return the speed of all these prefill workers; an unknown one counts as the mean of the others.
        None: all are unknown."""
        speeds = [speed.rate for w in workers if (speed := self._speeds.get(w.id)) is not None]
        rates = [rate for rate in speeds if rate is not None]
        return sum(rates) / len(rates) * len(workers) if rates else None

    def share_to_compute(self) -> float:
        """Return the share of prompt tokens that no prefix cache has."""
        prompt = sum(speed.prompt_tokens for speed in self._speeds.values())
        cached = sum(speed.cached_tokens for speed in self._speeds.values())
        return 1.0 - cached / prompt if prompt else 1.0

    def seconds(self, workers: OpenWorkers, tokens_ahead: float, num_tokens: int) -> float | None:
        """Return the time until the first token of a prompt of ``num_tokens``; None: not known."""
        versions = (self._version, workers.version)
        if self._cached is None or self._cached[0] != versions:
            self._cached = versions, self.tokens_per_s(workers), self.share_to_compute()
        _, rate, share = self._cached
        return None if rate is None else (tokens_ahead + num_tokens) * share / rate
