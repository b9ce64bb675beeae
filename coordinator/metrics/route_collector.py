"""The counts of routes, for /metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from .metrics import TOKENS, BatchedHistogram

DIFFERENCE = "splitserve_shadow_first_difference_tokens"
POSITION = "Tokens before the first one in which a shadow's answer differs."


@dataclass(slots=True)
class RouteCounts:
    """Cumulative since the start."""

    # by route and model
    requests: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    # by route and result
    shadows: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    differences: dict[str, BatchedHistogram] = field(default_factory=dict)  # by route

    def shadowed(self, route: str, result: str, position: int) -> None:
        """Count a copy; ``position``: of the first token that differs, if the answers do."""
        self.shadows[route, result] += 1
        if result == "different":
            if route not in self.differences:
                self.differences[route] = BatchedHistogram(
                    DIFFERENCE, POSITION, (0, *TOKENS), {"route": route}
                )
            self.differences[route].observe(position)


class RouteCollector:
    """A collector for a Prometheus registry."""

    def __init__(self, counts: RouteCounts) -> None:
        self._counts = counts

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "splitserve_route_requests",
            "Requests for tokens that named a route, by the model that got them.",
            labels=["route", "model_name"],
        )
        for names, count in self._counts.requests.items():
            requests.add_metric(names, count)
        shadows = CounterMetricFamily(
            "splitserve_shadow",
            "Copies of requests for a route's shadow, by how their answers compare with the first ones.",
            labels=["route", "result"],
        )
        for names, count in self._counts.shadows.items():
            shadows.add_metric(names, count)
        differences = HistogramMetricFamily(DIFFERENCE, POSITION, labels=["route"])
        for histogram in self._counts.differences.values():
            for family in histogram.collect():
                differences.samples += family.samples
        yield from (requests, shadows, differences)
