"""A thread of a worker that fails ends the worker: half alive it would hang requests."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from e2e.cluster import free_port

from splitserve.cli.settings import DEMO_MODEL
from splitserve.engine.step.constraint import CompileGrammar
from splitserve.engine.step.grammar import GrammarThread
from splitserve.transport.channels.keys import generate_key
from splitserve.worker.gpu_telemetry import GpuTelemetry

ROOT = Path(__file__).parents[2]
MISTAKEN = {
    "zmq-authenticator": ("transport.channels.keys", "Authenticator._serve"),
    "coordinators' names": ("transport.channels.coordinator_links", "NameWatch._run"),
    "step": ("engine.step.step_thread", "StepThread._run"),
    "probes": ("worker.health", "_Server.serve_forever"),
    "kv-store": ("worker.threads", "Threads._run"),
    "adapters": ("worker.adapters", "AdapterFolder._follow"),
    "rank": ("engine.ranks.threads", "AllRanks._run"),
}
"""By the thread's name: where its work begins."""
ON_DEMAND = {"grammar", "gpu-telemetry"}
COMMAND = """
import importlib, json, os, sys
import splitserve.worker.main
from splitserve.cli.main import main

def mistaken(*_):
    raise RuntimeError("a mistake of ours")

for work, log, argv in json.load(sys.stdin):
    if os.fork() == 0:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        module, owner, method = work
        setattr(getattr(importlib.import_module(f"splitserve.{module}"), owner), method, mistaken)
        sys.argv[1:] = argv
        main()
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
"""Run one worker after the other, and print their exit statuses. Each is a fork, as workers of ``up`` are:
torch is imported once."""


class Ended(NamedTuple):
    """How a worker has ended."""

    status: int
    log: str


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Ended]:
    """How a worker ends when one of its threads makes a mistake, by the thread's name."""
    folder = tmp_path_factory.mktemp("threads")
    generate_key(folder / "key")
    orders, logs = [], {name: folder / name for name in MISTAKEN}
    for name, (module, function) in MISTAKEN.items():
        options = {
            "--model": DEMO_MODEL,
            "--key-file": folder / "key",
            "--kv-cache-gib": 0.01,
            "--tensor-parallel-size": 2,
            "--kv-store": folder / "kv",
            "--lora-folder": folder,
            "--health-port": free_port(),
            "--coordinator": f"tcp://127.0.0.1:{free_port()},dns://localhost:{free_port()}",
        }
        argv = ["decode", *(str(word) for option in options.items() for word in option)]
        orders.append(([module, *function.split(".")], str(logs[name]), argv))
    run = subprocess.run(
        [sys.executable, "-c", COMMAND],
        input=json.dumps(orders),
        stdout=-1,
        text=True,
        timeout=280,
        check=True,
    )
    statuses = map(int, run.stdout.split())
    return {
        name: Ended(status, logs[name].read_text()) for name, status in zip(MISTAKEN, statuses, strict=True)
    }


@pytest.mark.parametrize("name", MISTAKEN)
def test_a_thread_that_fails_ends_the_worker(name: str, ended: dict[str, Ended]) -> None:
    assert ended[name].status == 1, ended[name].log
    assert f"background work has failed ({name})" in ended[name].log
    assert "RuntimeError: a mistake of ours" in ended[name].log


def test_threads_that_start_on_demand_hide_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[str] = []

    def hook(args: threading.ExceptHookArgs) -> None:
        assert args.thread is not None
        failed.append(args.thread.name)

    def mistaken() -> None:
        raise RuntimeError("a mistake of ours")

    monkeypatch.setattr(threading, "excepthook", hook)
    grammars = GrammarThread(None, mistaken)
    grammars.submit(CompileGrammar((1, 2), b"{}"))
    grammars.stop()
    telemetry = GpuTelemetry(SimpleNamespace(nvmlDeviceGetHandleByUUID=lambda uuid: uuid), "GPU-0")
    telemetry.start()
    telemetry.stop()
    assert {*failed} == ON_DEMAND


def test_these_are_all_threads_there_are() -> None:
    """Those of movers report their failures to the handoffs."""
    calls = [
        node
        for folder in ("transport", "engine", "worker")
        for path in (ROOT / folder).rglob("*.py")
        if "movers" not in path.parts
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "threading.Thread"
    ]
    names = {ast.literal_eval(word.value) for call in calls for word in call.keywords if word.arg == "name"}
    assert len(calls) == len(names)
    assert names == {*MISTAKEN, *ON_DEMAND, "role-end"}
