"""Running counts over a stream of requests. Their memory does not grow with the number of requests.

Lengths are whole numbers, so that counting each distinct one gives exact percentiles; times are summed as
they come.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

BINS_PER_DOUBLING = 4
FOLD_AT = 2048


@dataclass(slots=True)
class Moments:
    """Mean and variance of a stream (Welford's recurrence)."""

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0  # sum of (x - mean)^2

    def add(self, value: float) -> None:
        self.count += 1
        away = value - self.mean
        self.mean += away / self.count
        self.squares += away * (value - self.mean)

    @property
    def deviation(self) -> float:
        """Standard deviation of the values (divided by n)."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


@dataclass(slots=True)
class CoMoments:
    """Pearson's correlation of a stream of pairs."""

    x: Moments = field(default_factory=Moments)
    y: Moments = field(default_factory=Moments)
    products: float = 0.0

    def add(self, x: float, y: float) -> None:
        away = x - self.x.mean
        self.x.add(x)
        self.y.add(y)
        self.products += away * (y - self.y.mean)

    @property
    def correlation(self) -> float | None:
        """None where one of the two never varies."""
        scale = math.sqrt(self.x.squares * self.y.squares)
        return self.products / scale if scale else None


def percentiles(values: list[tuple[int, int]], percents: tuple[float, ...]) -> list[float]:
    """Percentiles of sorted (value, count), interpolated like numpy's default."""
    total = sum(count for _, count in values)
    return [_at(values, (total - 1) * percent / 100) for percent in percents]


def _at(values: list[tuple[int, int]], rank: float) -> float:
    low, high = math.floor(rank), math.ceil(rank)
    below: int | None = None
    seen = 0
    for value, count in values:
        seen += count
        if below is None and seen > low:
            below = value
        if below is not None and seen > high:
            return below + (value - below) * (rank - low)
    raise AssertionError("rank beyond the last value")


@dataclass(slots=True)
class Windows:
    """Arrivals in consecutive windows of ``width_s``, empty ones included, aligned to the wall clock by
    ``origin_s``."""

    width_s: float
    origin_s: float = 0.0
    peak: int = 0
    counts: Moments = field(default_factory=Moments)
    _index: int | None = None
    _count: int = 0

    def add(self, arrival_s: float) -> None:
        index = math.floor((arrival_s + self.origin_s) / self.width_s)
        if index != self._index:
            self._close(index)
        self._count += 1
        self.peak = max(self.peak, self._count)

    def _close(self, index: int) -> None:
        if self._index is not None:
            self.counts.add(self._count)
            self._add_empty(index - self._index - 1)
        self._index, self._count = index, 0

    def _add_empty(self, number: int) -> None:
        """``number`` windows without arrivals at once: a silent year is no work."""
        if number:
            total = self.counts.count + number
            self.counts.squares += self.counts.mean**2 * self.counts.count * number / total
            self.counts.mean *= self.counts.count / total
            self.counts.count = total

    @property
    def dispersion(self) -> float | None:
        """Variance over mean of the counts in whole windows (the last, cut one left out): 1 for Poisson
        arrivals, more for bursts."""
        if self.counts.count > 1 and self.counts.mean:
            return self.counts.deviation**2 / self.counts.mean
        return None


@dataclass(slots=True)
class SlidingPeak:
    """Most arrivals within any ``width_s`` seconds. Remembers the arrivals of one window."""

    width_s: float
    peak: int = 0
    _recent: deque[float] = field(default_factory=deque)

    def add(self, arrival_s: float) -> None:
        self._recent.append(arrival_s)
        while self._recent[0] <= arrival_s - self.width_s:
            self._recent.popleft()
        self.peak = max(self.peak, len(self._recent))


@dataclass(slots=True)
class FoldingBins:
    """Arrivals over time in at most FOLD_AT bins, whose width doubles as the trace gets longer."""

    width_s: float = 1.0
    counts: list[int] = field(default_factory=list)

    def add(self, arrival_s: float) -> None:
        while arrival_s >= self.width_s * FOLD_AT:
            self.counts = [sum(self.counts[at : at + 2]) for at in range(0, len(self.counts), 2)]
            self.width_s *= 2
        index = int(arrival_s / self.width_s)
        self.counts.extend([0] * (index + 1 - len(self.counts)))
        self.counts[index] += 1


def log_bin(value: float) -> int:
    """The bin of a positive value, BINS_PER_DOUBLING to a doubling."""
    return math.floor(math.log2(value) * BINS_PER_DOUBLING)


def bin_start(index: int) -> float:
    """The smallest value of a bin."""
    return float(2 ** (index / BINS_PER_DOUBLING))
