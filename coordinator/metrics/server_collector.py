"""The counts of the HTTP side, for /metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .efficiency import Efficiency

TOKENS = {  # fields of ``Counts``: name and text
    "prompt_tokens": (
        "prompt_tokens",
        "Prompt tokens of the requests that ended, as their usage says: once for all choices.",
    ),
    "cached_tokens": ("prompt_tokens_cached", "Of these, tokens found in a prefix cache."),
    "output_tokens": ("generation_tokens", "Output tokens of the sequences that ended."),
    "retries": ("request_retries", "Dispatches after a sequence's first."),
    "recovered": ("sequences_recovered", "Sequences that were dispatched again and ended well."),
}
EFFICIENCY = {
    "tokens_per_gpu_hour": "Output tokens per GPU-hour over the last minute.",
    "cost_per_million_tokens": (
        "Cost of a million output tokens over the last minute, at the configured price."
    ),
    "joules_per_token": "Energy of the GPUs per output token over the last minute.",
}


@dataclass(slots=True)
class Counts:
    """Cumulative since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    retries: int = 0
    recovered: int = 0
    # by endpoint, status and name of the adapter, empty without one
    requests: defaultdict[tuple[str, str, str], int] = field(default_factory=lambda: defaultdict(int))
    sequences: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # by finish reason
    refusals: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))  # by reason


class FailuresCollector:
    """``failures``: of listeners, by name; of no model."""

    def __init__(self, failures: Mapping[str, int]) -> None:
        self._failures = failures

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        failures = CounterMetricFamily(
            "splitserve_listener_failures",
            "Failures beside requests, which went on: trace file, usage, steering.",
            labels=["listener"],
        )
        for name, count in self._failures.items():
            failures.add_metric([name], count)
        yield failures


class ServerCollector:
    """``num_open``: HTTP requests for tokens that have not ended."""

    def __init__(
        self, counts: Counts, num_open: Callable[[], int], efficiency: Efficiency, model_name: str
    ) -> None:
        self._counts, self._num_open, self._efficiency = counts, num_open, efficiency
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        counts, model = self._counts, self._model_name
        requests = CounterMetricFamily(
            "splitserve_requests", "HTTP requests for tokens.", labels=["model_name", "endpoint", "status"]
        )
        for (endpoint, status, adapter), count in counts.requests.items():
            requests.add_metric([adapter or model, endpoint, status], count)
        sequences = CounterMetricFamily(
            "splitserve_sequences", "Sequences that ended.", labels=["model_name", "finished_reason"]
        )
        for reason, count in counts.sequences.items():
            sequences.add_metric([model, reason], count)
        refusals = CounterMetricFamily(
            "splitserve_refusals",
            "Requests answered with an error and no token.",
            labels=["model_name", "reason"],
        )
        for reason, count in counts.refusals.items():
            refusals.add_metric([model, reason], count)
        yield from (requests, sequences, refusals)
        for field_name, (name, text) in TOKENS.items():
            counter = CounterMetricFamily(f"splitserve_{name}", text, labels=["model_name"])
            counter.add_metric([model], getattr(counts, field_name))
            yield counter
        open_requests = GaugeMetricFamily(
            "splitserve_open_requests", "HTTP requests for tokens that have not ended.", labels=["model_name"]
        )
        open_requests.add_metric([model], self._num_open())
        yield open_requests
        yield from self._efficient()

    def _efficient(self) -> Iterator[Metric]:
        efficiency = self._efficiency
        for name, value in efficiency.gauges().items():
            yield GaugeMetricFamily(f"splitserve_{name}", EFFICIENCY[name], value=value)
        if efficiency.gpu_s:
            yield CounterMetricFamily(
                "splitserve_gpu_seconds",
                "Seconds of all GPUs whose workers were connected.",
                value=efficiency.gpu_s,
            )
            yield CounterMetricFamily(
                "splitserve_gpu_energy_joules", "Energy that these took meanwhile.", value=efficiency.joules
            )
        if efficiency.has_price:
            yield CounterMetricFamily(
                "splitserve_cost",
                "Cost of GPUs, or of workers without one, at the configured price.",
                value=efficiency.cost,
            )
