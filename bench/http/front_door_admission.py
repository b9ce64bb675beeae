"""What a request costs at the front door before it is dispatched: key, validation, template, tokens, limits,
journal.

From a complete call to its submission, in this process, with the coordinator's event loop and its settings of
the collector.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

from ...coordinator.errors import Headers
from ...coordinator.generate.api import GenerationApi
from ...coordinator.http.inner_call import InnerCall
from ...coordinator.http.limits import HttpLimits
from ...coordinator.lifecycle.request import Ended, Request
from ...coordinator.metrics.metrics import Metrics
from ...coordinator.metrics.request_trace import end_trace
from ...coordinator.metrics.system_snapshot import SystemSnapshot
from ...coordinator.serving import Serving, Servings
from ...coordinator.tenants.meter import Meter
from ...coordinator.tenants.opening import KeyDirectory
from ...coordinator.tenants.shared_limiter import SharedLimiter
from ...coordinator.tenants.tenancy import Tenancy
from ...coordinator.text.served_model import ServedModel
from ...transport.process.heap import settle_heap
from ...transport.process.otel import Tracing
from .streaming import CHAT, PATH
from .trace_sink import trace_sink

WARM_UP = 500


class Noting:
    """A dispatcher that notes when a request reaches it, and ends it with the next turn of the loop."""

    def __init__(self) -> None:
        self.reached = 0.0
        self.waiting: list[Request] = []

    def submit(self, request: Request) -> None:
        self.reached = time.perf_counter()
        self.waiting.append(request)

    def cancel(self, request_id: str) -> None: ...

    def ready(self) -> bool:
        return True

    def failing(self) -> str:
        return ""

    def gap(self) -> str:
        return ""

    def full(self) -> str:
        return ""

    def drain(self, worker_id: str, timeout_s: float | None) -> None: ...

    def flip(self, worker_id: str, role: str, timeout_s: float | None) -> None: ...

    def flips(self) -> list[dict[str, object]]:
        return []

    def snapshot(self) -> dict[str, object]:
        return {}


class Heard:
    """A client that is in the same process."""

    def answered(self, status: int, headers: Headers, body: bytes) -> None:
        assert status == 200, body

    def started(self, headers: Headers) -> None: ...

    def streamed(self, data: bytes, *, last: bool) -> None: ...


async def admission(model: Path, tenants: Path, key: str, count: int = 20_000) -> dict[str, Any]:
    """Microseconds from a complete call to its submission."""
    served = ServedModel.load(model, "bench")
    settle_heap()
    meter = Meter(
        f"sqlite:///{tenants}-usage",
        tenants.parent,
        "admission-journal-",
        soon=asyncio.get_running_loop().call_soon,
    )
    meter.start()
    limiter = SharedLimiter(tenants.with_name("admission-limits"))
    header, tenancy = f"Bearer {key}".encode(), Tenancy(KeyDirectory(tenants), limiter, meter)
    results = {
        "without_tenants": await _admission(served, Tenancy(), header, count),
        "with_keys_limits_metering": await _admission(served, tenancy, header, count),
    }
    with trace_sink() as endpoint:
        tracing = Tracing.open(endpoint, "coordinator", "bench")
        results["with_keys_limits_metering_tracing"] = await _admission(
            served, tenancy, header, count, tracing
        )
        await asyncio.to_thread(tracing.close)
    await limiter.stop()
    await asyncio.to_thread(meter.stop)
    return results


async def _admission(
    served: ServedModel, tenancy: Tenancy, header: bytes, count: int, tracing: Tracing | None = None
) -> dict[str, float]:
    dispatcher, answers, no_headers = Noting(), Heard(), dict[bytes, bytes]()
    metrics = Metrics("bench", SystemSnapshot)
    metrics.listeners.add("tracing", end_trace)
    serving = Serving(served, dispatcher, SystemSnapshot, metrics)
    api = GenerationApi(Servings([serving]), HttpLimits(), tenancy)
    api.tracing = tracing
    body = json.dumps({**CHAT, "max_tokens": 16}).encode()
    times = []
    for _ in range(count + WARM_UP):
        begin = time.perf_counter()
        account = tenancy.directory.account(header)
        InnerCall(api, PATH, body, account, answers, no_headers).begin()
        await asyncio.sleep(0)  # it is looked at with the next turn of the loop
        times.append(dispatcher.reached - begin)
        for request in dispatcher.waiting:
            request.sink.push(5, None)
            request.sink.end(Ended(finish_reason="length", num_output_tokens=1, num_dispatches=1))
        dispatcher.waiting.clear()
    quantiles = statistics.quantiles([1e6 * t for t in times[WARM_UP:]], n=100)
    return {
        "requests": count,
        "median_us": round(quantiles[49], 1),
        "p90_us": round(quantiles[89], 1),
        "p99_us": round(quantiles[98], 1),
    }
