"""Distributions of a simulation's results, in memory that does not grow with the trace."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from .records import RequestRecord
from .slo import Slo

RESOLUTION = 0.002
"""Values that differ by less than this share may count as equal."""
_SCALE = 1 / math.log1p(RESOLUTION)
SMALLEST = 1e-7  # seconds; all below counts as 0


class Distribution:
    """Counts of values in classes of equal *relative* width, and their sum and largest."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self.num = 0
        self._total_ps = 0  # whole picoseconds: the order of adding makes no difference
        self.largest = 0.0

    def add(self, value: float, count: int = 1) -> None:
        self._counts[int(math.log(value) * _SCALE) if value > SMALLEST else -(1 << 30)] += count
        self.num += count
        self._total_ps += int(value * 1e12) * count
        if value > self.largest:
            self.largest = value

    @property
    def mean(self) -> float:
        return self._total_ps / 1e12 / self.num if self.num else math.nan

    def percentile(self, percent: float) -> float:
        """The value that this share does not exceed; to ``RESOLUTION``."""
        if not self.num:
            return math.nan
        rank, seen = percent / 100 * (self.num - 1), 0
        for index in sorted(self._counts):
            seen += self._counts[index]
            if seen > rank:
                break
        return (
            0.0
            if index == -(1 << 30)
            else min(math.exp((index + (0.5 if index >= 0 else -0.5)) / _SCALE), self.largest)
        )

    def summary(self, percents: tuple[float, ...] = (50, 90, 99)) -> dict[str, float]:
        points = {f"p{percent:g}": self.percentile(percent) for percent in percents}
        return {"mean": self.mean, **points, "max": self.largest}


class Tallies:
    """All that is known of the requests that have ended. ``tpot_all``: E2E after the first token over *all*
    tokens, as splitwise-sim counts it; ``gap``: between two decode steps of a worker, counted once for each
    sequence in both (the handoff's is not among them)."""

    NAMES = ("ttft", "tpot", "tpot_all", "gap", "e2e", "queue", "prefill", "handoff", "decode", "coordinator")

    def __init__(self, slo: Slo) -> None:
        self.slo = slo
        self.outcomes: Counter[str] = Counter()
        self.missed = [0] * len(slo.parts)
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self.of: dict[str, Distribution] = {name: Distribution() for name in self.NAMES}

    @property
    def num_requests(self) -> int:
        return sum(self.outcomes.values())

    @property
    def num_good(self) -> float:
        """Good requests; with levels, all but the misses of the worst one, as ``Slo`` weighs them."""
        return max(0.0, self.num_requests - self.slo.failed(self.missed))

    @property
    def attainment(self) -> float:
        """Good requests among all that ended."""
        return self.num_good / self.num_requests if self.num_requests else math.nan

    def add(self, record: RequestRecord) -> None:
        self.outcomes[record.outcome] += 1
        for index, part in enumerate(self.slo.parts):
            self.missed[index] += not part.met_by(record)
        if not record.finished:
            return
        self.num_prompt_tokens += record.num_prompt_tokens
        self.num_cached_tokens += record.num_cached_tokens
        self.num_output_tokens += record.num_received
        of = self.of
        of["ttft"].add(record.ttft_s)
        if (tpot := record.tpot_s) is not None:
            of["tpot"].add(tpot)
        of["tpot_all"].add(record.tpot_all_s)
        of["e2e"].add(record.e2e_s)
        if record.stages is not None:
            for name in ("queue", "prefill", "handoff", "decode", "coordinator"):
                of[name].add(getattr(record.stages, name))

    def percentiles(self, percents: tuple[float, ...] = (50, 90, 99)) -> Mapping[str, dict[str, float]]:
        """By quantity: mean, the percentiles, and the largest; in seconds."""
        return {name: d.summary(percents) for name, d in self.of.items() if d.num}
