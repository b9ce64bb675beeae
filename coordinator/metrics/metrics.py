"""The metrics of one coordinator, in Prometheus' text format.

Requests are counted here as they end; workers' numbers are read from a ``SystemSnapshot`` at each scrape.
Nothing on the path of a token looks up a label.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.utils import floatToGoString

from ..errors import ApiError
from ..lifecycle.request import Ended
from ..lifecycle.time_ledger import NAMES
from ..listeners import ListenerFailures, Listeners
from .efficiency import Efficiency
from .request_record import RequestRecord
from .server_collector import Counts, ServerCollector
from .system_collector import SystemCollector
from .system_snapshot import SystemSnapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MIN_SCRAPE_INTERVAL_S = 1.0
"""A scrape sooner than this gets the last one's text: rendering holds up the streams for some
milliseconds."""

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5,
    0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
)  # fmt: skip
TOKEN_SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05,
    0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10,
)  # fmt: skip
TOKENS = tuple(1 << n for n in range(18))
BATCH = 512
"""Requests that are over and are booked together."""
PENDING = 8192
"""Observations of a histogram that are counted together."""
STAGES = {
    "parse": "Reading, validating and tokenizing a request.",
    "queue": "Waiting in the coordinator and on the prefill worker.",
    "prefill": "Computing the prompt.",
    "handoff": "From the first token to the join on the decode worker.",
    "decode": "On the decode worker.",
    "coordinator": (
        "From when a worker made the last token until the coordinator took it up: messages on their "
        "way and its lateness."
    ),
    "stream": "From the last token to the response's last byte.",
}


class BatchedHistogram:
    """One time series, and a collector for a Prometheus registry.

    Observations are appended to a list (0.05 us) and counted thousands at a time; the Prometheus client takes
    0.8 us for each, a fifth of a streamed token's budget.
    """

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
        """Count one value."""
        pending = self._pending
        pending.append(value)
        if len(pending) >= PENDING:
            self._fold()

    def observe_all(self, values: NDArray[np.float64]) -> None:
        """Count many values at once."""
        self._counts += np.bincount(np.searchsorted(self._bounds, values), minlength=len(self._counts))
        self._sum += float(values.sum())

    def _fold(self) -> None:
        values = np.array(self._pending)
        self._pending.clear()
        self.observe_all(values)

    def describe(self) -> list[Metric]:
        """Spare the registry a collection when this is registered."""
        return [HistogramMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterator[Metric]:
        """Yield all values so far."""
        if self._pending:
            self._fold()
        bounds = [*map(floatToGoString, self._bounds.tolist()), "+Inf"]
        buckets = list(zip(bounds, map(float, self._counts.cumsum().tolist()), strict=True))
        family = HistogramMetricFamily(self._name, self._documentation, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family


class Metrics:
    """All metrics of one model."""

    def __init__(
        self,
        model_name: str,
        system: Callable[[], SystemSnapshot],
        price_per_hour: float | None = None,
        failures: ListenerFailures | None = None,
    ) -> None:
        self.registry = CollectorRegistry()
        self.counts = Counts()
        self.num_open = 0  # HTTP requests for tokens that have not ended
        self.efficiency = Efficiency(price_per_hour)
        self.failures = failures or ListenerFailures()
        """Failures of every listener in this coordinator."""
        self.listeners: Listeners[[RequestRecord]] = Listeners(self.failures)
        """Called for each request that is over."""
        self.model_name = model_name
        self.ttft = self._histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", SECONDS
        )
        self.tpot = self._histogram(
            "time_per_output_token_seconds",
            "Mean time per token after the first, one value a sequence.",
            TOKEN_SECONDS,
        )
        self.itl = self._histogram(
            "inter_token_latency_seconds", "Between two writes of one stream, per token.", TOKEN_SECONDS
        )
        self.e2e = self._histogram(
            "e2e_request_latency_seconds", "From arrival to the response's last byte.", SECONDS
        )
        self._stages = [
            self._histogram(f"request_{name}_time_seconds", STAGES[name], SECONDS) for name in NAMES
        ]
        self._closed: list[RequestRecord] = []  # not yet in the histograms
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence.", TOKENS)
        self._output_length = self._histogram(
            "request_generation_tokens", "Output tokens of a sequence.", TOKENS
        )
        self.registry.register(
            ServerCollector(self.counts, lambda: self.num_open, self.efficiency, model_name)
        )
        self.registry.register(SystemCollector(system))

    def request_ended(self, endpoint: str, status: str, adapter: str = "") -> None:
        """Count a response. ``status``: the HTTP status, or "cancelled" if the client went away first.
        ``adapter``: the name of the model's adapter that it is for."""
        self.counts.requests[endpoint, status, adapter] += 1

    def refused(self, error: ApiError) -> None:
        """Count a request that got this error and no token."""
        self.counts.refusals[error.code or error.kind] += 1

    def sequence_ended(
        self, ended: Ended, num_prompt_tokens: int, num_tokens: int, arrival: float, first: float, now: float
    ) -> None:
        """Count a sequence. Times in monotonic seconds; ``first``: of the first token, 0 without one."""
        counts = self.counts
        reason = (
            "timeout" if ended.error == "deadline" and num_tokens else "error" if ended.error else "cancelled"
        )
        counts.sequences[ended.finish_reason or reason] += 1
        counts.output_tokens += num_tokens
        counts.retries += max(0, ended.num_dispatches - 1)
        counts.recovered += ended.finish_reason is not None and ended.num_dispatches > 1
        self._prompt_length.observe(num_prompt_tokens)
        self._output_length.observe(num_tokens)
        if first:
            self.ttft.observe(first - arrival)
        if num_tokens > 1:
            self.tpot.observe((now - first) / (num_tokens - 1))

    def prompts_done(self, num_tokens: int, num_cached: int) -> None:
        """Count one HTTP request's prompts, as in its usage: each once, however many choices it has."""
        self.counts.prompt_tokens += num_tokens
        self.counts.cached_tokens += num_cached

    def request_closed(self, record: RequestRecord) -> None:
        """Count a request that is over: its response is complete, or its client has gone."""
        self._closed.append(record)
        if len(self._closed) >= BATCH:
            self._book_closed()
        self.listeners(record)

    def collect(self) -> Iterator[Metric]:
        """Yield all of them."""
        self._book_closed()
        yield from self.registry.collect()

    def _book_closed(self) -> None:
        """Book all closed requests: a column of each stage's seconds, and one of their totals."""
        closed, self._closed = self._closed, []
        if not closed:
            return
        seconds = np.array([record.stages for record in closed])  # [num_requests, num_stages]
        for histogram, column in zip(self._stages, seconds.T, strict=True):
            histogram.observe_all(column)
        self.e2e.observe_all(np.array([record.total for record in closed]))

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> BatchedHistogram:
        histogram = BatchedHistogram(f"splitserve_{name}", text, bounds, {"model_name": self.model_name})
        self.registry.register(histogram)
        return histogram


class Scrape:
    """The text of /metrics. Of several models each series has its model's name."""

    def __init__(self, models: Sequence[Metrics], registry: CollectorRegistry) -> None:
        """``registry``: what belongs to no model."""
        self._models, self._registry = models, registry
        self._scraped_at = float("-inf")
        self._text = b""

    def render(self, now: float) -> bytes:
        """Return the text for a scrape."""
        if now - self._scraped_at >= MIN_SCRAPE_INTERVAL_S:
            self._text = generate_latest(cast(CollectorRegistry, self))
            self._scraped_at = now
        return self._text

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, with the series of all models."""
        yield from self._registry.collect()
        if len(self._models) == 1:
            yield from self._models[0].collect()
            return
        families: dict[str, Metric] = {}
        for metrics in self._models:
            for family in metrics.collect():
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                merged.samples += [
                    sample._replace(labels={"model_name": metrics.model_name, **sample.labels})
                    for sample in family.samples
                ]
        yield from families.values()
