"""When a request that comes now would have its first token, from what prefill workers have been measured to compute. Pure.

    time to first token = (tokens on the workers + tokens ahead in the line + its own) x share not cached / tokens per second

Workers report tokens and seconds of steps that were full: a step with room tells how long a step takes, not how much one could hold.
A worker's speed is the median of its latest reports: one step that hung for seconds says nothing of the next ones, and must not turn
requests away. As long as nobody has reported full steps a few times there is no forecast, and nobody is refused by one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from ...transport.messages.messages import Load
from .open_workers import OpenWorkers
from .worker import Worker, WorkerId

MIN_REPORTS, MAX_REPORTS = 3, 15  # with full steps in them
HALF_LIFE_TOKENS = 50_000.0  # of what is known of the prefix cache


@dataclass(slots=True)
class _Measured:
    counters: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0)  # as last reported, cumulative
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_REPORTS))  # tokens a second in full steps, by report
    rate: float | None = None  # the median of them, once there are enough
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0


class Forecast:
    """What is known of each prefill worker's speed."""

    def __init__(self) -> None:
        self._measured: dict[WorkerId, _Measured] = {}
        self._num_known = 0  # of these, whose speed is
        self._num_changes = 0
        self._answer: tuple[tuple[int, int], float | None, float] | None = None  # after which changes: tokens_per_s, and share_to_compute

    def hear(self, worker: Worker, load: Load) -> None:
        """A prefill worker's report."""
        said = load.counters.get
        now = (said("full_step_tokens", 0.0), said("full_step_seconds", 0.0), said("prompt_tokens", 0.0), said("cached_tokens", 0.0))
        known = self._measured.setdefault(worker.id, _Measured())
        if now == known.counters:
            return
        tokens, seconds, prompt, cached = (max(0.0, new - old) for new, old in zip(now, known.counters, strict=True))
        known.counters = now
        self._num_changes += 1
        if tokens and seconds:
            known.rates.append(tokens / seconds)
            if len(known.rates) >= MIN_REPORTS:
                self._num_known += known.rate is None
                known.rate = median(known.rates)
        keep = 0.5 ** (prompt / HALF_LIFE_TOKENS)
        known.prompt_tokens, known.cached_tokens = known.prompt_tokens * keep + prompt, known.cached_tokens * keep + cached

    def forget(self, worker: Worker) -> None:
        """It is gone."""
        gone = self._measured.pop(worker.id, None)
        if gone is not None:
            self._num_changes += 1
            self._num_known -= gone.rate is not None

    @property
    def known(self) -> bool:
        """Whether any worker's speed is."""
        return self._num_known > 0

    def tokens_per_s(self, workers: OpenWorkers[Worker]) -> float | None:
        """Of all these prefill workers; one that was not measured counts as the mean of the others. None: none was."""
        measured = [m.rate for w in workers if (m := self._measured.get(w.id)) is not None]
        rates = [rate for rate in measured if rate is not None]
        return sum(rates) / len(rates) * len(workers) if rates else None

    def share_to_compute(self) -> float:
        """Of all prompt tokens: those that no prefix cache has."""
        prompt = sum(measured.prompt_tokens for measured in self._measured.values())
        cached = sum(measured.cached_tokens for measured in self._measured.values())
        return 1.0 - cached / prompt if prompt else 1.0

    def seconds(self, workers: OpenWorkers[Worker], tokens_ahead: float, num_tokens: int) -> float | None:
        """Until the first token of a prompt of ``num_tokens`` that has so many tokens ahead of it; None: not known."""
        changes = (self._num_changes, workers.num_changes)
        if self._answer is None or self._answer[0] != changes:
            self._answer = changes, self.tokens_per_s(workers), self.share_to_compute()
        _, rate, share = self._answer
        return None if rate is None else (tokens_ahead + num_tokens) * share / rate
