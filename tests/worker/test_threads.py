"""A thread of a worker that fails ends the worker: half alive it would hang requests."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

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
import importlib, sys
module, name = sys.argv[1:3]
del sys.argv[1:3]
owner, method = name.split(".")

def mistaken(*_):
    raise RuntimeError("a mistake of ours")

setattr(getattr(importlib.import_module(f"splitserve.{module}"), owner), method, mistaken)
from splitserve.cli.main import main
main()
"""


@pytest.mark.parametrize("name", MISTAKEN)
def test_a_thread_that_fails_ends_the_worker(name: str, tmp_path: Path) -> None:
    generate_key(tmp_path / "key")
    options = {
        "--model": DEMO_MODEL,
        "--key-file": tmp_path / "key",
        "--kv-cache-gib": 0.01,
        "--tensor-parallel-size": 2,
        "--kv-store": tmp_path / "kv",
        "--lora-folder": tmp_path,
        "--health-port": free_port(),
        "--coordinator": f"tcp://127.0.0.1:{free_port()},dns://localhost:{free_port()}",
    }
    arguments = [str(word) for option in options.items() for word in option]
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, *MISTAKEN[name], "decode", *arguments],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    assert f"background work has failed ({name})" in ended.stderr
    assert "RuntimeError: a mistake of ours" in ended.stderr


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
