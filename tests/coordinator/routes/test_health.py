"""/health: 200 while the process serves, and what is wrong with it."""

from __future__ import annotations

import asyncio
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.listeners import ListenerFailures
from splitserve.coordinator.routes import health as module
from splitserve.coordinator.routes.health import RECENT_S, Health
from splitserve.coordinator.server import HttpServer


async def test_all_is_well(http: httpx.AsyncClient) -> None:
    answer = await http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")
    assert set(answer.json()["checks"]) == {"serving", "listeners", "disk"}


async def test_without_workers_it_is_degraded_and_alive(
    http: httpx.AsyncClient, dispatcher: FakeDispatcher
) -> None:
    dispatcher.is_ready = dispatcher.workers = False
    answer = await http.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
    assert answer.json()["checks"]["serving"] == {"status": "degraded", "reason": "no worker is connected"}
    assert (await http.get("/ready")).status_code == 503


async def test_a_server_that_stops_says_so(http: httpx.AsyncClient, server: HttpServer) -> None:
    await server.app.drain(0)
    assert (await http.get("/health")).json()["checks"]["serving"]["reason"] == "the server is shutting down"
    assert (await http.get("/ready")).status_code == 503, "a load balancer must send no more requests"


async def test_a_listener_that_fails_degrades_it_for_a_minute(dispatcher: FakeDispatcher) -> None:
    failures = ListenerFailures(lambda: 0.0)
    health = Health({"tiny": dispatcher}, failures)
    failures.note("trace file", OSError(28, "No space left on device", "/secret/path"))
    [reason] = [
        c["reason"] for c in (await health.report(100.0))["checks"].values() if c["status"] == "degraded"
    ]
    assert "trace file" in reason
    assert "/secret" not in reason
    assert (await health.report(100.0 + RECENT_S - 1))["status"] == "degraded"
    assert (await health.report(100.0 + RECENT_S + 1))["status"] == "ok"


async def test_a_disk_that_is_nearly_full_is_named_by_its_option(
    dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    health = Health({"tiny": dispatcher}, ListenerFailures())
    health.folders = {"--trace-folder": Path("/nowhere/traces")}
    assert (await health.report(0.0))["status"] == "ok", (
        "a folder that is to be made lies where its parent does"
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=5 << 20))
    assert (await health.report(0.0))["checks"]["disk"][
        "reason"
    ] == "the disk is nearly full: --trace-folder has 5 MiB free"


async def test_a_disk_that_hangs_holds_nobody_up(
    dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    health, released = Health({"tiny": dispatcher}, ListenerFailures()), threading.Event()
    health.folders = {"--batch-file": Path("/")}
    monkeypatch.setattr(module, "DISK_PATIENCE_S", 0.01)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: released.wait(60) and SimpleNamespace(free=1 << 40))
    try:
        for _ in range(2):  # the second finds the first still asking
            assert (await health.report(0.0))["checks"]["disk"][
                "reason"
            ] == "the file system of --batch-file does not answer"
    finally:
        released.set()
    async with asyncio.timeout(60):
        while (await health.report(0.0))["status"] != "ok":
            await asyncio.sleep(0)
