"""The recent past of one coordinator, for the dashboard and ``splitserve top``. Pure; monotonic seconds.

Each ended request is appended to a list; every two seconds the new ones become one point of the history.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..lifecycle.time_ledger import NAMES
from ..metrics.load_window import WINDOW_S, LoadWindow, Window
from ..metrics.objectives import Objectives
from ..metrics.request_record import RequestRecord
from ..metrics.system_snapshot import CounterGrowth, SystemSnapshot, WorkerSnapshot
from .diagnosis import diagnose
from .event_log import EventLog

NUM_POINTS = 450  # 15 minutes
NUM_RECENT = 120
RATE_S = 10.0
"""Window over which the flow between workers is counted."""
MAX_NAMES = 16  # of a worker's adapters
MAX_TENANTS = 200
QUANTILES = (50, 95, 99)
COUNTED = {"output": "output_tokens", "prompt": "prompt_tokens", "cached": "cached_tokens"}


class LiveView:
    """``now`` at its start; ``wall``: that moment in seconds since 1970, for the charts' time axis.
    ``answered``: cumulative counts of requests by endpoint, status and model, refused ones too; owned by the
    HTTP side."""

    def __init__(
        self,
        now: float,
        wall: float,
        answered: Mapping[tuple[str, str, str], int] | None = None,
        objectives: Objectives | None = None,
    ) -> None:
        self._began, self._wall = now, wall
        self._answered = {} if answered is None else answered
        self._sampled_at = now
        self._ended: list[RequestRecord] = []  # not yet counted
        self.note: Callable[[RequestRecord], None] = self._ended.append
        """Takes a request that is over."""
        self._fresh: list[RequestRecord] = []  # since the last point
        self._points: deque[dict[str, Any]] = deque(maxlen=NUM_POINTS)
        self._recent: deque[tuple[int, RequestRecord]] = deque(maxlen=NUM_RECENT)
        self._routes: deque[tuple[float, str, str]] = deque()
        self._tenants: dict[str, Counter[str]] = {}
        self._statuses: Counter[str] = Counter()  # when the last point was made
        self._load = LoadWindow(objectives)
        self._events = EventLog(wall - now)
        self._num_requests = self._num_points = 0
        self._growth = CounterGrowth(*COUNTED.values())

    @property
    def objectives(self) -> Objectives:
        """Return the operator's objectives."""
        return self._load.objectives

    def _count_ended(self) -> None:
        for record in self._ended:
            self._count(record)
        self._ended.clear()

    def _count(self, record: RequestRecord) -> None:
        self._num_requests += 1
        self._fresh.append(record)
        self._recent.append((self._num_requests, record))
        if record.prefill_worker:
            self._routes.append((record.ledger.end, record.prefill_worker, record.decode_worker))
        if record.tenant and (record.tenant in self._tenants or len(self._tenants) < MAX_TENANTS):
            self._tenants.setdefault(record.tenant, Counter()).update(
                requests=1,
                prompt_tokens=record.num_prompt_tokens,
                cached_tokens=record.num_cached_tokens,
                output_tokens=record.num_output_tokens,
            )

    def sample(self, now: float, system: SystemSnapshot) -> None:
        """Add a point to the history."""
        self._count_ended()
        self._forget_routes(now)
        fresh, self._fresh = self._fresh, []
        seconds, grown = max(1e-3, now - self._sampled_at), self._growth.since_last(system.workers)
        self._sampled_at = now
        self._num_points += 1
        statuses = self._by_status()
        refusals = {
            status: count
            for status, count in (statuses - self._statuses).items()
            if status >= "429" and status.isdigit()
        }
        self._statuses = statuses
        tally = self._load.close(now, seconds, fresh, refusals, system)
        self._events.note(now, system, tally.grown, refusals)
        ttft, tpot, _, total = tally.times.T
        self._points.append(
            {
                "n": self._num_points,
                "t": round(self._wall + now - self._began, 2),
                "requests": _rate(len(fresh), seconds),
                "errors": _rate(sum(refusals.values()), seconds),
                **{name: _rate(grown[key], seconds) for name, key in COUNTED.items()},
                "ttft": _quantiles(ttft),
                "tpot": _quantiles(tpot[tpot > 0]),
                "e2e": _quantiles(total),
                "stages": [round(value, 6) for value in tally.stages.tolist()],
                "waiting": system.num_waiting,
                "running": system.num_running,
                "kv_prefill": _usage(system, "prefill"),
                "kv_decode": _usage(system, "decode"),
            }
        )

    def state(
        self,
        now: float,
        system: SystemSnapshot,
        after_point: int = 0,
        after_request: int = 0,
        objectives: Objectives | None = None,
    ) -> dict[str, Any]:
        """Return the state, JSON-ready, with the points and requests that are new to the viewer.

        ``objectives``: the viewer's own.
        """
        self._count_ended()
        self._forget_routes(now)
        window = self._load.window(system, self._events.lost_since(now - WINDOW_S), objectives)
        flows = Counter((prefill, decode) for _, prefill, decode in self._routes)
        return {
            "ready": system.ready,
            "uptime_s": round(now - self._began, 1),
            "num_requests": self._num_requests,
            "statuses": dict(self._by_status()),
            "findings": [finding._asdict() for finding in diagnose(window)],
            "window": _window(window),
            "events": self._events.newest(),
            "totals": dict(self._events.totals),
            "stage_names": NAMES,
            "waiting": system.num_waiting,
            "running": system.num_running,
            "stages": dict(system.stages),
            "steering": system.steering,
            "workers": [_worker(worker) for worker in system.workers],
            "flows": [
                [prefill, decode, round(count / RATE_S, 2)]
                for (prefill, decode), count in sorted(flows.items())
            ],
            "tenants": [{"tenant": tenant, **usage} for tenant, usage in sorted(self._tenants.items())],
            "points": [point for point in self._points if point["n"] > after_point],
            "requests": [
                self._request(number, record, now)
                for number, record in self._recent
                if number > after_request
            ],
        }

    def _by_status(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for (_, status, _), count in self._answered.items():
            found[status] += count
        return found

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


def _window(window: Window) -> dict[str, Any]:
    good = (
        None
        if window.kept is None
        else window.kept * (window.num_measured + window.num_failed + window.num_refused)
    )
    return {
        "seconds": round(window.seconds, 1),
        "requests": window.num_measured,
        "stages": {stage: round(seconds, 6) for stage, seconds in window.stages.items()},
        "ttft_s": round(window.ttft_s, 6),
        **{name: _quantiles(values) for name, values in window.times.items()},
        "kept": None if window.kept is None else round(window.kept, 4),
        "goodput": None if good is None else _rate(good, max(1e-3, window.seconds)),
        "objectives": window.objectives.as_json(),
    }


def _worker(worker: WorkerSnapshot) -> dict[str, Any]:
    return {
        "id": worker.worker_id,
        "role": worker.role,
        "host": worker.host,
        "pid": worker.pid,
        "blocks": [
            worker.blocks_used,
            worker.blocks_leased,
            worker.blocks_cached,
            worker.blocks_free,
            worker.blocks_total,
        ],
        "running": worker.num_running,
        "waiting": worker.num_waiting,
        "waiting_tokens": worker.num_waiting_tokens,
        "busy": None if worker.busy is None else round(worker.busy, 3),
        "draining": worker.draining,
        "num_adapters": len(worker.adapters),
        "adapters": worker.adapters[:MAX_NAMES],
        "counters": dict(worker.counters),
        "gauges": dict(worker.gauges),
    }


def _rate(count: float, seconds: float) -> float:
    return round(count / seconds, 2)


def _quantiles(values: NDArray[np.float64]) -> list[float] | None:
    return [round(value, 6) for value in np.percentile(values, QUANTILES).tolist()] if len(values) else None


def _usage(system: SystemSnapshot, role: str) -> float | None:
    """Share of the role's KV blocks that requests hold; None without such workers."""
    workers = [worker for worker in system.workers if worker.role == role]
    total = sum(worker.blocks_total for worker in workers)
    return round(sum(worker.blocks_used for worker in workers) / total, 4) if total else None
