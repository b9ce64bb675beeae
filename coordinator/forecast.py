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

from ..transport.messages import Load
from .pools import Worker, WorkerId

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

    def hear(self, worker: Worker, load: Load) -> None:
        """A prefill worker's report."""
        names = ("full_step_tokens", "full_step_seconds", "prompt_tokens", "cached_tokens")
        now = (*(load.counters.get(name, 0.0) for name in names),)
        known = self._measured.setdefault(worker.id, _Measured())
        tokens, seconds, prompt, cached = (max(0.0, new - old) for new, old in zip(now, known.counters, strict=True))
        known.counters = now
        if tokens and seconds:
            known.rates.append(tokens / seconds)
            known.rate = median(known.rates) if len(known.rates) >= MIN_REPORTS else None
        keep = 0.5 ** (prompt / HALF_LIFE_TOKENS)
        known.prompt_tokens, known.cached_tokens = known.prompt_tokens * keep + prompt, known.cached_tokens * keep + cached

    def forget(self, worker: Worker) -> None:
        """It is gone."""
        self._measured.pop(worker.id, None)

    @property
    def known(self) -> bool:
        """Whether any worker's speed is."""
        return any(measured.rate is not None for measured in self._measured.values())

    def tokens_per_s(self, workers: list[Worker]) -> float | None:
        """Of all these prefill workers; one that was not measured counts as the mean of the others. None: none was."""
        measured = [m.rate for w in workers if (m := self._measured.get(w.id)) is not None]
        rates = [rate for rate in measured if rate is not None]
        return sum(rates) / len(rates) * len(workers) if rates else None

    def share_to_compute(self) -> float:
        """Of all prompt tokens: those that no prefix cache has."""
        prompt = sum(measured.prompt_tokens for measured in self._measured.values())
        cached = sum(measured.cached_tokens for measured in self._measured.values())
        return 1.0 - cached / prompt if prompt else 1.0

    def seconds(self, workers: list[Worker], tokens_ahead: float, num_tokens: int) -> float | None:
        """Until the first token of a prompt of ``num_tokens`` that has so many tokens ahead of it; None: not known."""
        rate = self.tokens_per_s(workers)
        return None if rate is None else (tokens_ahead + num_tokens) * self.share_to_compute() / rate
