"""The pool controller's decisions are logged, posted, and carried out where it may act."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.lifecycle_bench import Bench

from splitserve.cli.settings import ServerSettings
from splitserve.coordinator.lifecycle.snapshot import snapshot_of
from splitserve.coordinator.metrics.system_collector import SystemCollector
from splitserve.coordinator.metrics.system_snapshot import SystemSnapshot
from splitserve.planner.simulator.slo import parse_slo
from splitserve.steering.capacity import Pressure
from splitserve.steering.fleet import Decision
from splitserve.steering.options import SteeringOptions
from splitserve.steering.shell import Hooks, SteeringShell
from splitserve.steering.steering import Steering

PATIENCE_S = 60.0


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is believed gone because the machine stood still."""
    monkeypatch.setattr("splitserve.steering.shell.WEBHOOK_S", PATIENCE_S)


class Scripted(Steering):
    """Makes the given decisions, once."""

    def __init__(self, mode: Any, *decisions: Decision) -> None:
        super().__init__(SteeringOptions(1.0, 0.1, mode=mode, every_s=0.01), None)
        self._script = list(decisions)
        self.controller.pressure = Pressure(prefill=0.5, decode=1.1)

    def look(self, snapshot: Any, now: float) -> list[Decision]:
        script, self._script = self._script, []
        return script


class Workers:
    def __init__(self) -> None:
        self.done: list[tuple[str, ...]] = []
        self.lends: list[bool] = []

    def lend_decode(self, allowed: bool) -> None:
        self.lends.append(allowed)

    def flip(self, worker_id: str, role: str, timeout_s: float | None) -> dict[str, object] | str | None:
        self.done.append(("flip", worker_id, role))
        return {}

    def drain(self, worker_id: str, timeout_s: float | None) -> dict[str, object] | None:
        self.done.append(("drain", worker_id))
        return {}


DECISIONS = (
    Decision(1.0, "flip", "w1", "prefill", "because"),
    Decision(1.0, "scale_up", "", "decode", "too few"),
    Decision(1.0, "scale_down", "p2", "prefill", "too many"),
)


async def carry_out(
    mode: Any, tmp_path: Path, commanded: bool = True, of_model: str = ""
) -> tuple[Workers, list[dict[str, Any]], list[str], dict[str, Any]]:
    """What was done, posted and run."""
    posted: list[dict[str, Any]] = []
    received = asyncio.Event()

    async def receive(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.split("content-length: ")[1].split("\r\n")[0])
        posted.append(json.loads(await reader.readexactly(size)))
        writer.write(b"HTTP/1.1 204 No Content\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()
        if len(posted) == len(DECISIONS):
            received.set()

    server = await asyncio.start_server(receive, "127.0.0.1", 0)
    port, reported = server.sockets[0].getsockname()[1], tmp_path / "reported"
    script = f"import sys; open({str(reported)!r}, 'a').write(' '.join(sys.argv[1:]) + chr(10))"
    bench, workers = Bench(), Workers()
    bench.hello("p2", "prefill")
    command = f'{sys.executable} -c "{script}"' if commanded else None
    hooks = Hooks(mode, f"http://127.0.0.1:{port}/", command, of_model)
    shell = SteeringShell(Scripted(mode, *DECISIONS), lambda: snapshot_of(bench.core), workers, hooks)
    task = asyncio.create_task(shell.run())
    await asyncio.wait_for(received.wait(), PATIENCE_S)
    if mode == "act" and commanded:
        bench.core.process_ended((workers.done[-1][1], 1), bench.now)
        async with asyncio.timeout(PATIENCE_S):
            while not reported.exists() or reported.read_text().count("\n") < 2:
                await asyncio.sleep(0.01)
    async with asyncio.timeout(PATIENCE_S):
        while hooks._tasks:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    server.close()
    await server.wait_closed()
    return workers, posted, reported.read_text().splitlines() if reported.exists() else [], shell.as_json()


async def test_what_it_may_do_is_done(tmp_path: Path) -> None:
    workers, posted, reported, state = await carry_out("act", tmp_path)
    assert workers.done == [("flip", "w1", "prefill"), ("drain", "p2")]
    assert sorted(reported) == ["down p2", "up decode"]
    assert sorted(d["kind"] for d in posted) == ["flip", "scale_down", "scale_up"]
    assert {d["reason"] for d in posted} == {"because", "too few", "too many"}
    assert state["counts"] == {"flip": 1, "scale_up": 1, "scale_down": 1}
    assert workers.lends[0] is False, "decode workers are loaded above 1"
    assert workers.lends[-1] is True, "the controller has ended"


async def test_advice_is_posted_and_nothing_done(tmp_path: Path) -> None:
    workers, posted, reported, _ = await carry_out("advise", tmp_path)
    assert (workers.done, reported, len(posted), {*workers.lends}) == ([], [], 3, {True})
    assert {d["mode"] for d in posted} == {"advise"}
    assert "model" not in posted[0]
    _, posted, _, _ = await carry_out("advise", tmp_path, of_model="small")
    assert {d["model"] for d in posted} == {"small"}


async def test_without_a_command_nobody_is_told_to_leave(tmp_path: Path) -> None:
    workers, posted, reported, _ = await carry_out("act", tmp_path, commanded=False)
    assert (workers.done, reported, len(posted)) == ([("flip", "w1", "prefill")], [], 3)


async def test_decisions_are_logged_with_their_reasons(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    await carry_out("advise", tmp_path)
    assert "steering (advise): w1 should become a prefill worker: because" in caplog.messages
    assert "steering (advise): one prefill worker fewer, p2: too many" in caplog.messages


async def test_an_error_of_its_own_ends_steering_and_is_said(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Scripted):
        def look(self, snapshot: Any, now: float) -> list[Decision]:
            raise ZeroDivisionError("no workers")

    shell = SteeringShell(
        Broken("act"), lambda: snapshot_of(Bench().core), Workers(), Hooks("act", None, None)
    )
    await asyncio.wait_for(shell.run(), PATIENCE_S)
    assert "no workers" in shell.as_json()["state"]
    assert "roles stay as they are" in caplog.text


async def test_a_hook_that_fails_is_said_and_does_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    hooks = Hooks("act", "http://127.0.0.1:9/", "/nowhere/start")
    hooks.decided(DECISIONS[0], {"prefill": 2, "decode": 1})
    hooks.start_worker("decode")
    async with asyncio.timeout(PATIENCE_S):
        while not ("webhook" in caplog.text and "cannot run" in caplog.text):
            await asyncio.sleep(0.01)
    await hooks.close()


async def test_a_command_sees_no_secret_of_the_coordinators_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPLITSERVE_COORDINATOR_REDIS_URL", "redis://:secret@host")
    seen = tmp_path / "seen"
    hooks = Hooks("act", None, f"sh -c 'env >{seen}'")
    hooks.start_worker("decode")
    async with asyncio.timeout(PATIENCE_S):
        while hooks._tasks:
            await asyncio.sleep(0.01)
    assert f"PATH={os.environ['PATH']}" in seen.read_text()
    assert "secret" not in seen.read_text()


def test_metrics() -> None:
    state = {
        "wanted_workers": {"prefill": 4, "decode": 5},
        "load": {"prefill": 1.25, "decode": 0.5},
        "counts": {"flip": 2},
    }
    families = {m.name: m for m in SystemCollector(lambda: SystemSnapshot(steering=state)).collect()}
    assert {s.labels["role"]: s.value for s in families["splitserve_steering_wanted_workers"].samples} == {
        "prefill": 4,
        "decode": 5,
    }
    assert {s.labels["role"]: s.value for s in families["splitserve_steering_load"].samples} == {
        "prefill": 1.25,
        "decode": 0.5,
    }
    assert {s.labels["kind"]: s.value for s in families["splitserve_steering_decisions"].samples}["flip"] == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"steer": "act"}, "--steer-slo"),
        (
            {"steer": "act", "steer_slo": "ttft=1,tpot=0.1", "steer_profile": "x", "processes": 2},
            "processes 1",
        ),
        (
            {"steer_command": "scale", "other_models": [{"model": "n", "served_model_name": "n"}]},
            "steer-command is not asked",
        ),
        ({"steer_slo": "ttft=1@p90"}, "a bound for each, ttft and tpot"),
        ({"steer_slo": "ttft=1,ttft=2"}, "names ttft twice"),
        ({"steer_slo": "ttft=1@p0,tpot=0.1"}, "between p0 and p100"),
    ],
)
def test_settings_that_cannot_work_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServerSettings(model=Path("m"), insecure=True, **more)


@pytest.mark.parametrize(
    ("message", "attainment"),
    [
        ("ttft=2,tpot=0.05", 0.9),
        ("ttft=2,tpot=0.05@p80", 0.8),
        ("ttft=2@p90,tpot=0.05@p90", 0.9),
        ("tpot=0.05@p99.5,ttft=2@p90", 0.995),
    ],
)
def test_objectives_are_read_as_the_planner_reads_them(message: str, attainment: float) -> None:
    settings = ServerSettings(
        model=Path("m"), insecure=True, steer="act", steer_slo=message, steer_profile=Path("x")
    )
    assert settings.steering is not None
    assert (settings.steering.ttft_s, settings.steering.tpot_s, settings.steering.attainment) == (
        2.0,
        0.05,
        attainment,
    )
    level = parse_slo(message)
    assert (level.bounds.ttft_s, level.bounds.tpot_s, level.attainment) == (2.0, 0.05, attainment)


def test_settings_as_options() -> None:
    more: dict[str, Any] = {
        "steer": "advise",
        "steer_slo": "ttft=1.5,tpot=0.05@p95",
        "steer_profile": "x",
        "steer_max_workers": 12,
    }
    options = ServerSettings(model=Path("m"), insecure=True, steer_cooldown_s=5, **more).steering
    assert options is not None
    assert (options.ttft_s, options.tpot_s, options.attainment, options.mode, options.max_workers) == (
        1.5,
        0.05,
        0.95,
        "advise",
        12,
    )
    assert (options.scale_cooldown_s, options.scale_down_below) == (5, 0.6)
