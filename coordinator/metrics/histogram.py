"""A histogram that is cheap to feed: observations are kept in a list and counted thousands at a time.

The Prometheus client takes 0.8 us for each observation, a fifth of what a streamed token may cost; appending
takes 0.05 us.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Metric
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

BATCH = 8192


class BatchedHistogram:
    """One time series; a collector for a Prometheus registry."""

    def __init__(
        self, name: str, documentation: str, bounds: Sequence[float], labels: dict[str, str]
    ) -> None:
        """``bounds``: upper bounds of the buckets, ascending, without infinity."""
        self._name = name
        self._documentation = documentation
        self._labels = labels
        self._bounds = np.array(bounds)
        self._counts = np.zeros(len(bounds) + 1, dtype=np.int64)
        self._sum = 0.0
        self._pending: list[float] = []

    def observe(self, value: float) -> None:
        """Counts one value."""
        pending = self._pending
        pending.append(value)
        if len(pending) >= BATCH:
            self._fold()

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """Counts them at once."""
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        self._sum += float(values.sum())

    def _fold(self) -> None:
        values = np.array(self._pending)
        self._pending.clear()
        self.observe_all(values)

    def describe(self) -> list[Metric]:
        """Spares the registry a collection when this is registered."""
        return [HistogramMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterator[Metric]:
        """All values so far."""
        if self._pending:
            self._fold()
        bounds = [*map(floatToGoString, self._bounds.tolist()), "+Inf"]
        buckets = list(zip(bounds, map(float, self._counts.cumsum().tolist()), strict=True))
        family = HistogramMetricFamily(self._name, self._documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family
