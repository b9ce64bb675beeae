"""What /metrics says, in Prometheus' text format.

What requests do is counted here as they end; what workers report is read from a ``SystemSnapshot`` when somebody scrapes.
Nothing on the path of a token looks up a label.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from .histogram import BatchedHistogram
from .request import Ended
from .request_record import RequestRecord

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MIN_SCRAPE_INTERVAL_S = 1.0
"""A scrape sooner than this gets the last one's text: rendering holds up the streams for some milliseconds."""

LIFECYCLE_COUNTERS = {
    "redispatches": "Attempts at requests that failed or were preempted and were followed by another.",
    "refused_early": "Requests refused at once because their first token would have come too late.",
    "recoveries": "Times a request that was dispatched again had its next token.",
    "recovery_seconds": "Seconds from a lost attempt that was noticed to the next token, summed over recoveries.",
    "workers_lost": "Workers that were declared dead or came back as a new process.",
    "workers_left": "Workers that drained and left.",
    "sequences_moved": "Running sequences handed from a decode worker that left to another one, with their KV blocks.",
    "moves_given_up": "Such hand-overs that failed; the sequence ran on where it was.",
    "deadlines_queue": "Requests that passed a deadline while they waited for a worker.",
    "deadlines_prefill": "Requests that passed a deadline while their prompt was computed.",
    "deadlines_handoff": "Requests that passed a deadline between prefill and decode.",
    "deadlines_decode": "Requests that passed a deadline while they generated.",
}
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
    draining: bool = False
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class SystemSnapshot:
    """The serving system behind the HTTP server. ``counters`` are the lifecycle's own, cumulative since the start."""

    ready: bool = False
    num_waiting: int = 0  # requests not yet dispatched
    num_running: int = 0  # dispatched and not ended
    workers: Sequence[WorkerSnapshot] = ()
    counters: Mapping[str, float] = field(default_factory=dict)
    stages: Mapping[str, int] = field(default_factory=dict)  # requests by the stage that they are in


class Metrics:
    """All metrics of one coordinator."""

    def __init__(self, model_name: str, system: Callable[[], SystemSnapshot]) -> None:
        self.registry = CollectorRegistry()
        self.num_open = 0  # HTTP requests for tokens that have not ended
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.num_retries = 0
        self.listeners: list[Callable[[RequestRecord], None]] = []
        """Hear of each request that is over."""
        self.requests: defaultdict[tuple[str, str], int] = defaultdict(int)  # by endpoint and status
        self.sequences: defaultdict[str, int] = defaultdict(int)  # by finish reason
        self.model_name = model_name
        self._scraped_at = float("-inf")
        self._text = b""
        self.ttft = self._histogram("time_to_first_token_seconds", "From arrival to the first token.", SECONDS)
        self.tpot = self._histogram(
            "time_per_output_token_seconds", "Mean time per token after the first, one value a sequence.", TOKEN_SECONDS
        )
        self.itl = self._histogram("inter_token_latency_seconds", "Between two writes of one stream, per token.", TOKEN_SECONDS)
        self.e2e = self._histogram("e2e_request_latency_seconds", "From arrival to the response's last byte.", SECONDS)
        self._stages = {
            name: self._histogram(f"request_{name}_time_seconds", text, SECONDS)
            for name, text in (
                ("parse", "Reading, validating and tokenizing a request."),
                ("queue", "Waiting in the coordinator and on the prefill worker."),
                ("prefill", "Computing the prompt."),
                ("handoff", "From the first token to the join on the decode worker."),
                ("decode", "On the decode worker."),
                ("stream", "From the last token to the response's last byte."),
            )
        }
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence.", TOKENS)
        self._output_length = self._histogram("request_generation_tokens", "Output tokens of a sequence.", TOKENS)
        self.registry.register(_ServerCollector(self, model_name))
        self.registry.register(_SystemCollector(system))

    def request_ended(self, endpoint: str, status: str) -> None:
        """``status``: the HTTP status, or "cancelled" where the client went away first."""
        self.requests[endpoint, status] += 1

    def sequence_ended(self, ended: Ended, num_prompt_tokens: int, num_tokens: int, arrival: float, first: float, now: float) -> None:
        """Times in monotonic seconds; ``first`` is when the first token came, 0 if none did."""
        reason = ended.finish_reason or ("error" if ended.error else "cancelled")
        self.sequences[reason] += 1
        self.num_prompt_tokens += num_prompt_tokens
        self.num_cached_tokens += ended.num_cached_tokens
        self.num_output_tokens += num_tokens
        self.num_retries += max(0, ended.num_dispatches - 1)
        self._prompt_length.observe(num_prompt_tokens)
        self._output_length.observe(num_tokens)
        if first:
            self.ttft.observe(first - arrival)
        if num_tokens > 1:
            self.tpot.observe((now - first) / (num_tokens - 1))

    def request_closed(self, record: RequestRecord) -> None:
        """The response is complete, or its client gone. Over all requests the stages sum to the end-to-end time."""
        self.e2e.observe(record.total)
        for name, histogram in self._stages.items():
            histogram.observe(getattr(record.stages, name))
        for listener in self.listeners:
            listener(record)

    def render(self, now: float) -> bytes:
        """The text for a scrape."""
        if now - self._scraped_at >= MIN_SCRAPE_INTERVAL_S:
            self._text = generate_latest(self.registry)
            self._scraped_at = now
        return self._text

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> BatchedHistogram:
        histogram = BatchedHistogram(f"splitserve_{name}", text, bounds, {"model_name": self.model_name})
        self.registry.register(histogram)
        return histogram


class _ServerCollector:
    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._metrics = metrics
        self._model_name = model_name

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        metrics, model = self._metrics, [self._model_name]
        requests = CounterMetricFamily("splitserve_requests", "HTTP requests for tokens.", labels=["model_name", "endpoint", "status"])
        for (endpoint, status), count in metrics.requests.items():
            requests.add_metric([*model, endpoint, status], count)
        sequences = CounterMetricFamily("splitserve_sequences", "Sequences that ended.", labels=["model_name", "finished_reason"])
        for reason, count in metrics.sequences.items():
            sequences.add_metric([*model, reason], count)
        yield from (requests, sequences)
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens of the sequences that ended.", metrics.num_prompt_tokens),
            ("prompt_tokens_cached", "Of these, tokens found in a prefix cache.", metrics.num_cached_tokens),
            ("generation_tokens", "Output tokens of the sequences that ended.", metrics.num_output_tokens),
            ("request_retries", "Dispatches after a sequence's first.", metrics.num_retries),
        ):
            counter = CounterMetricFamily(f"splitserve_{name}", text, labels=["model_name"])
            counter.add_metric(model, value)
            yield counter
        open_requests = GaugeMetricFamily(
            "splitserve_open_requests", "HTTP requests for tokens that have not ended.", labels=["model_name"]
        )
        open_requests.add_metric(model, metrics.num_open)
        yield open_requests


class _SystemCollector:
    def __init__(self, system: Callable[[], SystemSnapshot]) -> None:
        self._system = system

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        system = self._system()
        yield GaugeMetricFamily("splitserve_ready", "1 if /ready says yes.", value=float(system.ready))
        workers = GaugeMetricFamily("splitserve_workers", "Live workers.", labels=["role"])
        for role in ("prefill", "decode"):
            workers.add_metric([role], sum(worker.role == role for worker in system.workers))
        yield workers
        yield GaugeMetricFamily("splitserve_num_requests_waiting", "Sequences that wait for a worker.", value=system.num_waiting)
        yield GaugeMetricFamily("splitserve_num_requests_running", "Sequences on workers.", value=system.num_running)
        for name, value in system.counters.items():
            yield CounterMetricFamily(_safe(f"splitserve_{name}"), LIFECYCLE_COUNTERS.get(name, name), value=value)
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
        draining = GaugeMetricFamily("splitserve_worker_draining", "1 where a worker gets no new work and leaves.", labels=labels)
        steps = CounterMetricFamily("splitserve_worker_steps", "Engine steps of a worker.", labels=labels)
        for worker in workers:
            values = [worker.worker_id, worker.role]
            usage.add_metric(values, worker.blocks_used / worker.blocks_total if worker.blocks_total else 0.0)
            running.add_metric(values, worker.num_running)
            waiting.add_metric(values, worker.num_waiting)
            tokens.add_metric(values, worker.num_waiting_tokens)
            draining.add_metric(values, float(worker.draining))
            steps.add_metric(values, worker.steps)
        yield from (usage, running, waiting, tokens, draining, steps)

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
