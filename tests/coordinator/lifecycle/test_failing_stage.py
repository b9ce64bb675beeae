"""Not ready while requests fail: workers of both roles are here, and nothing gets through."""

from __future__ import annotations

import asyncio

import pytest
from support.lifecycle_bench import Bench

from splitserve.coordinator.lifecycle.lifecycle import Lifecycle, LifecycleLimits
from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.coordinator.readiness import prove
from splitserve.coordinator.socket_dispatcher import SocketDispatcher
from splitserve.transport.messages.messages import RequestFailed

BROKEN = "the decode worker has been started anew"


def _fail(bench: Bench, name: str, kind: str = "handoff_failed", message: str = BROKEN) -> None:
    """Every attempt at it fails before its first token."""
    bench.submit(name, arrival=bench.now, deadline=bench.now + 500.0)
    for _ in range(20):
        bench.now += 5.0
        bench.core.tick(bench.now)
        for request in list(bench.core.requests.values()):
            if request.state == "prefill":
                bench.send(
                    "p", RequestFailed(coordinator=7, dispatch=request.dispatch, kind=kind, message=message)
                )  # type: ignore[arg-type]
    assert not bench.core.requests


def _pass(bench: Bench, name: str) -> None:
    bench.submit(name)
    (request,) = bench.core.requests.values()
    bench.first(request.dispatch)
    bench.joined(request.dispatch)
    bench.step(request.dispatch, 1, 6, "stop")


def _patient() -> Bench:
    return Bench(dead_after_s=1e6, progress_timeout_s=1e6, lost_after_s=1e6)


def test_the_last_requests_all_failed_in_one_stage() -> None:
    bench = _patient()
    _pass(bench, "r0")
    for number in range(3):
        assert bench.core.outcomes.failing == ""
        _fail(bench, f"f{number}")
    assert bench.core.outcomes.failing == f"the last 3 requests failed in the stage prefill: {BROKEN}"
    _pass(bench, "r1")
    assert bench.core.outcomes.failing == ""


def test_a_path_in_the_reason_is_for_the_log_alone() -> None:
    bench = _patient()
    for number in range(3):
        _fail(bench, f"f{number}", "internal", "cannot read /home/me/model")
    assert bench.core.outcomes.failing == "the last 3 requests failed in the stage prefill: see the log"


@pytest.mark.parametrize(
    ("allowed_s", "tokens", "counts"), [(30.0, 0, True), (5.0, 0, False), (30.0, 1, False)]
)
def test_a_deadline_counts_where_there_was_time_and_nothing_came(
    allowed_s: float, tokens: int, counts: bool
) -> None:
    bench = _patient()
    for number in range(3):
        bench.submit(f"r{number}", arrival=bench.now, deadline=bench.now + allowed_s)
        (request,) = bench.core.requests.values()
        if tokens:
            bench.first(request.dispatch)
        bench.now += allowed_s + 1.0
        bench.core.tick(bench.now)
        assert not bench.core.requests
    assert bool(bench.core.outcomes.failing) is counts


async def test_probes_are_sent_until_one_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    core = Lifecycle(7, "hybrid", LifecycleLimits())
    dispatcher = SocketDispatcher(core, "tcp://127.0.0.1:*", None)
    is_ready, probes = True, asyncio.Queue[Request]()
    monkeypatch.setattr(dispatcher, "ready", lambda: is_ready)
    monkeypatch.setattr(dispatcher, "gap", lambda: "")
    monkeypatch.setattr(dispatcher, "submit", probes.put_nowait)

    task = asyncio.create_task(prove(dispatcher, 7, every_s=0.001))
    await asyncio.sleep(0.01)
    assert probes.empty(), "it is ready"
    is_ready = False
    for number in (1, 2):
        probe = await asyncio.wait_for(probes.get(), 60)
        assert probe.request_id == f"probe-7-{number}"
        is_ready = number == 2
        probe.sink.end(Ended())
    await asyncio.sleep(0.01)
    assert probes.empty(), "it is ready again"
    task.cancel()
    dispatcher.stop()
