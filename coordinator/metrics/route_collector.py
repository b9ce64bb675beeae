"""The counts of routes, for /metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily


@dataclass(slots=True)
class RouteCounts:
    """Cumulative since the start."""

    # by route and model
    requests: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))


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
        yield requests
