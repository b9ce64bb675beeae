"""What the dashboard and ``splitserve top`` show: the recent past of one coordinator, kept small. Pure; times in monotonic seconds.

Each ended request is noted in constant time; every ``PERIOD_S`` what has come since becomes one point of the history. Nothing here is asked
for on the way of a token.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from .counter_growth import CounterGrowth
from .request_record import RequestRecord
from .system_snapshot import SystemSnapshot, WorkerSnapshot

PERIOD_S = 2.0
NUM_POINTS = 450  # 15 minutes
NUM_RECENT = 120
RATE_S = 10.0
"""What the flow between workers is counted over."""
MAX_TENANTS = 200
MAX_MEASURED = 500
"""Requests whose times are looked at for a point: the newest ones, where there were more."""
QUANTILES = (50, 95, 99)
COUNTED = {"output": "output_tokens", "prompt": "prompt_tokens", "cached": "cached_tokens"}


class LiveView:
    """``now`` at its start; ``wall``: that moment in seconds since 1970, for the charts' time axis."""

    def __init__(self, now: float, wall: float) -> None:
        self._began, self._wall = now, wall
        self._sampled_at = now
        self._fresh: list[RequestRecord] = []  # since the last point
        self._points: deque[dict[str, Any]] = deque(maxlen=NUM_POINTS)
        self._recent: deque[tuple[int, RequestRecord]] = deque(maxlen=NUM_RECENT)
        self._routes: deque[tuple[float, str, str]] = deque()
        self._tenants: dict[str, dict[str, int]] = {}
        self._statuses: Counter[str] = Counter()
        self._num_errors = 0  # when the last point was made
        self._num_requests = self._num_points = 0
        self._growth = CounterGrowth(*COUNTED.values())

    def note(self, record: RequestRecord) -> None:
        """A request is over."""
        self._num_requests += 1
        self._fresh.append(record)
        self._recent.append((self._num_requests, record))
        self._statuses[record.status] += 1
        if record.prefill_worker:
            self._routes.append((record.ledger.end, record.prefill_worker, record.decode_worker))
        if record.tenant and (record.tenant in self._tenants or len(self._tenants) < MAX_TENANTS):
            usage = self._tenants.setdefault(record.tenant, {"requests": 0, "prompt_tokens": 0, "cached_tokens": 0, "output_tokens": 0})
            usage["requests"] += 1
            usage["prompt_tokens"] += record.num_prompt_tokens
            usage["cached_tokens"] += record.num_cached_tokens
            usage["output_tokens"] += record.num_output_tokens

    def sample(self, now: float, system: SystemSnapshot) -> None:
        """One more point of the history."""
        self._forget_routes(now)
        fresh, self._fresh = self._fresh, []
        seconds, grown = max(1e-3, now - self._sampled_at), self._growth.since_last(system.workers)
        self._sampled_at = now
        self._num_points += 1
        known, self._num_errors = self._num_errors, sum(self._statuses[s] for s in self._statuses if s >= "429" and s.isdigit())
        answered = [r for r in fresh[-MAX_MEASURED:] if r.status == "200" and r.first_token_at]
        self._points.append(
            {
                "n": self._num_points,
                "t": round(self._wall + now - self._began, 2),
                "requests": _rate(len(fresh), seconds),
                "errors": _rate(self._num_errors - known, seconds),
                **{name: _rate(grown[key], seconds) for name, key in COUNTED.items()},
                "ttft": _quantiles([r.first_token_at - r.ledger.begin for r in answered]),
                "tpot": _quantiles([_per_token(r) for r in answered if r.num_output_tokens > 1]),
                "e2e": _quantiles([r.total for r in answered]),
                "waiting": system.num_waiting,
                "running": system.num_running,
                "kv_prefill": _usage(system, "prefill"),
                "kv_decode": _usage(system, "decode"),
            }
        )

    def state(self, now: float, system: SystemSnapshot, after_point: int = 0, after_request: int = 0) -> dict[str, Any]:
        """JSON-ready; of points and requests only those that the viewer has not seen."""
        self._forget_routes(now)
        flows = Counter((prefill, decode) for _, prefill, decode in self._routes)
        return {
            "ready": system.ready,
            "uptime_s": round(now - self._began, 1),
            "num_requests": self._num_requests,
            "statuses": dict(self._statuses),
            "waiting": system.num_waiting,
            "running": system.num_running,
            "stages": dict(system.stages),
            "steering": system.steering,
            "workers": [_worker(worker) for worker in system.workers],
            "flows": [[prefill, decode, round(count / RATE_S, 2)] for (prefill, decode), count in sorted(flows.items())],
            "tenants": [{"tenant": tenant, **usage} for tenant, usage in sorted(self._tenants.items())],
            "points": [point for point in self._points if point["n"] > after_point],
            "requests": [self._request(number, record, now) for number, record in self._recent if number > after_request],
        }

    def _forget_routes(self, now: float) -> None:
        while self._routes and self._routes[0][0] < now - RATE_S:
            self._routes.popleft()

    def _request(self, number: int, record: RequestRecord, now: float) -> dict[str, Any]:
        return {
            "n": number,
            "id": record.id,
            "status": record.status,
            "begin": round(self._wall + record.ledger.begin - self._began, 6),
            "spans": [
                [stage, round(begin - record.ledger.begin, 6), round(end - record.ledger.begin, 6)]
                for stage, begin, end in record.ledger.spans()
            ],
            "total_s": round(record.total, 6),
            "prompt": record.num_prompt_tokens,
            "cached": record.num_cached_tokens,
            "output": record.num_output_tokens,
            "dispatches": record.num_dispatches,
            "workers": [record.prefill_worker, record.decode_worker],
            "tenant": record.tenant,
        }


def _worker(worker: WorkerSnapshot) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "role": worker.role,
        "host": worker.host,
        "pid": worker.pid,
        "blocks": [worker.blocks_used, worker.blocks_leased, worker.blocks_cached, worker.blocks_free, worker.blocks_total],
        "running": worker.num_running,
        "waiting": worker.num_waiting,
        "waiting_tokens": worker.num_waiting_tokens,
        "busy": None if worker.busy is None else round(worker.busy, 3),
        "draining": worker.draining,
        "counters": dict(worker.counters),
        "gauges": dict(worker.gauges),
    }


def _rate(count: float, seconds: float) -> float:
    return round(count / seconds, 2)


def _per_token(record: RequestRecord) -> float:
    ended = record.ledger.end - record.stages.stream
    return (ended - record.first_token_at) / (record.num_output_tokens - 1)


def _quantiles(values: Sequence[float]) -> list[float] | None:
    return [round(value, 6) for value in np.percentile(values, QUANTILES).tolist()] if values else None


def _usage(system: SystemSnapshot, role: str) -> float | None:
    """Share of the role's KV blocks that requests hold; None without such workers."""
    workers = [worker for worker in system.workers if worker.role == role]
    total = sum(worker.blocks_total for worker in workers)
    return round(sum(worker.blocks_used for worker in workers) / total, 4) if total else None
