"""Which requests are admitted, by a forecast of when they would have their first token. Pure; times in
seconds.

    time to first token = tokens to compute / tokens per second
    tokens to compute   = (on the workers + ahead in the queue + its own) x share not cached

Workers report the tokens and the seconds of full steps; a step that had room does not tell how much one could
hold. A worker's speed is the median over its latest reports, so that one step that hung turns no requests
away. Until a worker has reported full steps a few times there is no forecast, and no request is refused by
one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from ...transport.messages.messages import Load
from .limits import LifecycleLimits
from .pools import Pools
from .request import Ended, Request
from .request_queue import RequestQueue
from .worker import OpenWorkers, WorkerId, WorkerRecord

MIN_REPORTS, MAX_REPORTS = 3, 15  # with full steps in them
HALF_LIFE_TOKENS = 50_000.0  # of what is known of prefix caches


@dataclass(slots=True)
class _Speed:
    counters: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # as last reported, cumulative
    rates: deque[float] = field(
        default_factory=lambda: deque(maxlen=MAX_REPORTS)
    )  # tokens per second in full steps
    rate: float | None = None  # their median, once there are enough
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0


class Forecast:
    """Knows how fast each prefill worker computes."""

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
        tokens, seconds, prompt, cached = (
            max(0.0, new - old) for new, old in zip(counters, speed.counters, strict=True)
        )
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


class AdmissionControl:
    """Refuses requests that cannot be served, or not in time."""

    def __init__(
        self, limits: LifecycleLimits, pools: Pools, queue: RequestQueue, forecast: Forecast
    ) -> None:
        self._limits, self._pools, self._queue, self._forecast = limits, pools, queue, forecast
        self.num_refused_early = 0

    def refuse(self, request: Request, now: float) -> Ended | None:
        """Return the terminal event of a request that is not admitted; None: it is."""
        if len(self._queue) >= self._limits.max_queue:
            message = f"{len(self._queue)} requests are waiting already"
            return Ended(error="overloaded", message=message, retry_after_s=1.0)
        num_tokens, longest = len(request.prompt_token_ids), self._pools.max_sequence_tokens
        if num_tokens > longest - 1 and request.sampling.max_tokens > 0:
            room = f"the workers have room for {longest - 1} and one answer token"
            return Ended(error="refused", message=f"the prompt has {num_tokens} tokens; {room}")
        return self._refuse_late(request, now)

    def _refuse_late(self, request: Request, now: float) -> Ended | None:
        """Refuse at once, not after the wait, what would miss its deadline or its class's objective."""
        if not self._forecast.known:
            return None
        prefills = self._pools.open_of_role("prefill")
        ahead = prefills.sum_of_ranks  # tokens on the workers
        if not (len(self._queue) or ahead):
            return None
        ahead += self._queue.tokens_ahead(request.priority_class, request.tenant)
        wait_s = self._forecast.seconds(prefills, ahead, len(request.prompt_token_ids))
        allowed_s = min(
            request.deadline - now, self._limits.ttft_slo_s.get(request.priority_class, float("inf"))
        )
        if wait_s is None or wait_s <= allowed_s:
            return None
        self.num_refused_early += 1
        message = (
            f"the first token would take about {wait_s:.1f} s, and {allowed_s:g} s are allowed "
            f"({request.priority_class}); try again later, allow more time, or add prefill workers"
        )
        return Ended(error="overloaded", message=message, retry_after_s=wait_s - allowed_s)
