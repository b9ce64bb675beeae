"""What /metrics says, in Prometheus' text format.

What requests do is counted here as they end; what workers report is read from a ``SystemSnapshot`` when somebody scrapes.
Nothing on the path of a token looks up a label.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .histogram import BatchedHistogram
from .request import Ended

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MIN_SCRAPE_INTERVAL_S = 1.0
"""A scrape sooner than this gets the last one's text: rendering holds up the streams for some milliseconds."""

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
TOKENS = tuple(1 << n for n in range(18))


@dataclass(frozen=True, slots=True)
class WorkerSnapshot:
    """One worker as it last reported."""

    worker_id: str
    role: str
    blocks_total: int
    blocks_free: int
    blocks_cached: int
    blocks_used: int
    blocks_leased: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    steps: int
    counters: Mapping[str, float] = field(default_factory=dict)  # cumulative since the worker's start


@dataclass(frozen=True, slots=True)
class SystemSnapshot:
    """The serving system behind the HTTP server. ``counters`` are the lifecycle's own, cumulative since the start."""

    num_waiting: int = 0  # requests not yet dispatched
    num_running: int = 0  # dispatched and not ended
    workers: Sequence[WorkerSnapshot] = ()
    counters: Mapping[str, float] = field(default_factory=dict)


class Metrics:
    """All metrics of one coordinator."""

    def __init__(self, model_name: str, system: Callable[[], SystemSnapshot]) -> None:
        self.registry = CollectorRegistry()
        self.num_open = 0  # HTTP requests for tokens that have not ended
        self.num_output_tokens = 0
        self._model_name = model_name
        self._scraped_at = float("-inf")
        self._text = b""
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.tpot = self._histogram(
            "time_per_output_token_seconds", "Mean time per token after the first, one value a sequence.", TOKEN_SECONDS
        )
        self.itl = self._histogram("inter_token_latency_seconds", "Between two writes of one stream, per token.", TOKEN_SECONDS)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the end of the sequence.", SECONDS)
        self._stages = {
            name: self._histogram(f"request_{name}_time_seconds", text, SECONDS)
            for name, text in (
                ("queue", "Waiting in the coordinator and on the prefill worker."),
                ("prefill", "Computing the prompt."),
                ("handoff", "From the first token to the join on the decode worker."),
                ("decode", "On the decode worker."),
            )
        }
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence.", TOKENS)
        self._output_length = self._histogram("request_generation_tokens", "Output tokens of a sequence.", TOKENS)
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of the sequences that ended.")
        self._cached_tokens = self._counter("prompt_tokens_cached", "Of these, tokens found in a prefix cache.")
        self._retries = self._counter("request_retries", "Dispatches after a sequence's first.")
        self._requests = Counter(
            "splitserve_requests", "HTTP requests for tokens.", ["model_name", "endpoint", "status"], registry=self.registry
        )
        self._sequences = Counter(
            "splitserve_sequences", "Sequences that ended.", ["model_name", "finished_reason"], registry=self.registry
        )
        self.registry.register(_ServerCollector(self, {"model_name": model_name}))
        self.registry.register(_SystemCollector(system))

    def request_ended(self, endpoint: str, status: str) -> None:
        """``status``: the HTTP status, or "cancelled" where the client went away first."""
        self._requests.labels(self._model_name, endpoint, status).inc()

    def sequence_ended(self, ended: Ended, num_prompt_tokens: int, num_tokens: int, arrival: float, first: float, now: float) -> None:
        """Times in monotonic seconds; ``first`` is when the first token came, 0 if none did."""
        reason = ended.finish_reason or ("error" if ended.error else "cancelled")
        self._sequences.labels(self._model_name, reason).inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._cached_tokens.inc(ended.num_cached_tokens)
        if ended.num_dispatches > 1:
            self._retries.inc(ended.num_dispatches - 1)
        self._prompt_length.observe(num_prompt_tokens)
        self._output_length.observe(num_tokens)
        self.num_output_tokens += num_tokens
        self.e2e.observe(now - arrival)
        if first:
            self.ttft.observe(first - arrival)
        if num_tokens > 1:
            self.tpot.observe((now - first) / (num_tokens - 1))
        stages = ended.stages
        self._stages["queue"].observe(stages.queue)
        self._stages["prefill"].observe(stages.prefill)
        self._stages["handoff"].observe(stages.handoff)
        self._stages["decode"].observe(stages.decode)

    def render(self, now: float) -> bytes:
        """The text for a scrape."""
        if now - self._scraped_at >= MIN_SCRAPE_INTERVAL_S:
            self._text = generate_latest(self.registry)
            self._scraped_at = now
        return self._text

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> BatchedHistogram:
        histogram = BatchedHistogram(f"splitserve_{name}", text, bounds, {"model_name": self._model_name})
        self.registry.register(histogram)
        return histogram

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"splitserve_{name}", text, ["model_name"], registry=self.registry).labels(self._model_name)


class _ServerCollector:
    def __init__(self, metrics: Metrics, labels: dict[str, str]) -> None:
        self._metrics = metrics
        self._labels = labels

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        tokens = CounterMetricFamily("splitserve_generation_tokens", "Output tokens of the sequences that ended.", labels=names)
        tokens.add_metric(values, self._metrics.num_output_tokens)
        open_requests = GaugeMetricFamily("splitserve_open_requests", "HTTP requests for tokens that have not ended.", labels=names)
        open_requests.add_metric(values, self._metrics.num_open)
        yield from (tokens, open_requests)


class _SystemCollector:
    def __init__(self, system: Callable[[], SystemSnapshot]) -> None:
        self._system = system

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        system = self._system()
        yield GaugeMetricFamily("splitserve_num_requests_waiting", "Sequences that wait for a worker.", value=system.num_waiting)
        yield GaugeMetricFamily("splitserve_num_requests_running", "Sequences on workers.", value=system.num_running)
        for name, value in system.counters.items():
            yield CounterMetricFamily(_safe(f"splitserve_{name}"), f"The lifecycle's {name}.", value=value)
        yield self._blocks(system.workers)
        yield from self._loads(system.workers)
        yield from self._worker_counters(system.workers)

    def _blocks(self, workers: Sequence[WorkerSnapshot]) -> Metric:
        blocks = GaugeMetricFamily("splitserve_kv_blocks", "KV blocks of a worker by state.", labels=["worker", "role", "state"])
        for worker in workers:
            for state in ("total", "free", "cached", "used", "leased"):
                blocks.add_metric([worker.worker_id, worker.role, state], getattr(worker, f"blocks_{state}"))
        return blocks

    def _loads(self, workers: Sequence[WorkerSnapshot]) -> Iterator[Metric]:
        labels = ["worker", "role"]
        usage = GaugeMetricFamily("splitserve_kv_cache_usage_ratio", "Share of a worker's KV blocks that requests hold.", labels=labels)
        running = GaugeMetricFamily("splitserve_worker_running", "Sequences in a worker's batch.", labels=labels)
        waiting = GaugeMetricFamily("splitserve_worker_waiting", "Sequences that wait on a worker.", labels=labels)
        tokens = GaugeMetricFamily("splitserve_worker_waiting_tokens", "Prompt tokens that wait on a worker.", labels=labels)
        steps = CounterMetricFamily("splitserve_worker_steps", "Engine steps of a worker.", labels=labels)
        for worker in workers:
            values = [worker.worker_id, worker.role]
            held = worker.blocks_used + worker.blocks_leased
            usage.add_metric(values, held / worker.blocks_total if worker.blocks_total else 0.0)
            running.add_metric(values, worker.num_running)
            waiting.add_metric(values, worker.num_waiting)
            tokens.add_metric(values, worker.num_waiting_tokens)
            steps.add_metric(values, worker.steps)
        yield from (usage, running, waiting, tokens, steps)

    def _worker_counters(self, workers: Sequence[WorkerSnapshot]) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily] = {}
        for worker in workers:
            for name, value in worker.counters.items():
                safe = _safe(f"splitserve_worker_{name}")
                family = families.setdefault(
                    safe, CounterMetricFamily(safe, f"The workers' {name}, since each one's start.", labels=["worker", "role"])
                )
                family.add_metric([worker.worker_id, worker.role], value)
        yield from families.values()


def _safe(name: str) -> str:
    """Counter names come over the wire."""
    return re.sub(r"[^a-zA-Z0-9_]", "_", name)
