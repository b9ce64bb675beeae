"""No background work dies in silence: its failure ends the process, in order and with its traceback."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import free_port
from support.certificates import write_certificate

from splitserve.cli.coordinator import controller_of
from splitserve.cli.settings import DEMO_MODEL, ServerSettings
from splitserve.coordinator import main
from splitserve.coordinator.background import background
from splitserve.coordinator.batch.runner import BatchRunner
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.access.tls import TlsFiles
from splitserve.coordinator.http.listening_server import ListeningServer
from splitserve.coordinator.metrics.body_log import BodyLog
from splitserve.coordinator.processes import Place
from splitserve.coordinator.server import HttpServer
from splitserve.coordinator.socket_dispatcher import SocketDispatcher
from splitserve.coordinator.stored_bytes import StoredBytes
from splitserve.coordinator.tenants.meter import Meter
from splitserve.coordinator.tenants.opening import KeyDirectory
from splitserve.coordinator.tenants.redis_limiter import RedisLimiter
from splitserve.coordinator.tenants.store import TenantStore
from splitserve.steering.shell import SteeringShell
from splitserve.transport.channels.keys import generate_key

TASKS: dict[str, tuple[Any, str]] = {
    "probes": (main, "prove"),
    "cluster key": (main, "follow"),
    "keys of tenants": (KeyDirectory, "follow"),
    "limits in Redis": (RedisLimiter, "_stay_alive"),
    "samples": (HttpServer, "_sample"),
    "slow senders": (HttpServer, "_hurry"),
    "stored bytes": (StoredBytes, "follow"),
    "admin key": (Operators, "refresh"),
    "TLS certificate": (TlsFiles, "refresh"),
    "batches": (BatchRunner, "_run"),
    "steering": (SteeringShell, "run"),
    "HTTP server": (ListeningServer, "main_loop"),
}
"""By name: where the task's work begins."""
THREADS: dict[str, tuple[Any, str]] = {"meter": (Meter, "_keep"), "body log": (BodyLog, "_write_all")}
PROFILE = Path(__file__).parents[2] / "engine" / "profiles" / "llama-125m-cpu.json"


def settings(folder: Path) -> ServerSettings:
    """Everything that has background work."""
    generate_key(folder / "key")
    TenantStore(folder / "tenants.db", create=True).close()
    certificate, key = write_certificate(folder, "localhost")
    return ServerSettings(
        model=DEMO_MODEL,
        port=0,
        admin_port=0,
        control_address=f"tcp://127.0.0.1:{free_port()}",
        key_file=folder / "key",
        tenants_file=folder / "tenants.db",
        redis_url=f"unix://{folder}/no-redis-here.sock",
        batch_file=folder / "batches.db",
        log_bodies=folder / "bodies",
        trace_folder=folder / "traces",
        tls_cert=certificate,
        tls_key=key,
        steer="advise",
        steer_slo="ttft=1,tpot=0.1",
        steer_profile=PROFILE,
    )


def critical(caplog: pytest.LogCaptureFixture) -> logging.LogRecord:
    (record,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert record.exc_info is not None
    return record


def mistaken_at_once(*_: object, **__: object) -> str:
    raise RuntimeError("a mistake of ours")


@pytest.mark.parametrize("name", TASKS)
async def test_a_task_that_fails_ends_the_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def mistaken(*_: object, **__: object) -> None:
        await asyncio.sleep(0)
        raise RuntimeError("a mistake of ours")

    owner, method = TASKS[name]
    is_task = inspect.iscoroutinefunction(getattr(owner, method))
    monkeypatch.setattr(owner, method, mistaken if is_task else mistaken_at_once)
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(60):
            await main.serve(settings(tmp_path), Place(), controller_of)
    assert ended.group_contains(RuntimeError, match="a mistake of ours")
    assert name in critical(caplog).getMessage()
    assert "a mistake of ours" in caplog.text


@pytest.mark.parametrize("name", THREADS)
async def test_a_thread_that_fails_ends_the_process(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(*THREADS[name], mistaken_at_once)
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(60):
            await main.serve(settings(tmp_path), Place(), controller_of)
    assert ended.group_contains(RuntimeError, match=f"the thread {name} has failed")
    assert "a mistake of ours" in caplog.text


async def test_these_are_all_tasks_there_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every background task is listed above; its failure ends the process."""
    serving = asyncio.create_task(main.serve(settings(tmp_path), Place(), controller_of))
    async with asyncio.timeout(60):
        while "probes" not in {task.get_name() for task in asyncio.all_tasks()}:
            await asyncio.sleep(0.01)
    named = {task.get_name() for task in asyncio.all_tasks()}
    assert {name for name in named if not name.startswith("Task-")} == {*TASKS, "threads"}
    serving.cancel()
    await asyncio.wait({serving})


async def test_components_are_closed_in_reverse_order_whatever_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    for name, (owner, method) in {
        "HTTP": (HttpServer, "stop"),
        "dispatcher": (SocketDispatcher, "stop"),
        "bodies": (BodyLog, "close"),
        "limits": (RedisLimiter, "stop"),
        "meter": (Meter, "stop"),
        "keys": (KeyDirectory, "close"),
    }.items():
        monkeypatch.setattr(owner, method, noted(closed, name, getattr(owner, method)))

    async def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(main, "prove", full_disk)
    with pytest.raises(ExceptionGroup):
        await main.serve(settings(tmp_path), Place(), controller_of)
    assert closed == ["HTTP", "dispatcher", "bodies", "limits", "meter", "keys"]


def noted(closed: list[str], name: str, method: Any) -> Any:
    def close(*arguments: Any) -> Any:
        closed.append(name)
        return method(*arguments)

    return close


async def test_an_error_of_the_block_passes_unchanged() -> None:
    async def cannot_start() -> None:
        async with background() as spawn:
            spawn("waiting", asyncio.sleep(1e6))
            raise OSError("the port is in use")

    with pytest.raises(OSError, match="the port is in use"):
        await cannot_start()


MISTAKEN = """
import asyncio, sys
from splitserve.coordinator import main
from splitserve.transport.channels import keys

async def mistaken(*_):
    raise RuntimeError("a mistake of ours")

def mistaken_thread(self):
    with self._socket:
        raise RuntimeError("a mistake of ours")

way = sys.argv.pop(1)
if way == "task":
    main.prove = mistaken
elif way == "thread":
    keys.Authenticator._serve = mistaken_thread
from splitserve.cli.main import main as command
command()
"""


@pytest.mark.parametrize("way", ["task", "thread", "stop"])
def test_the_process_ends_with_a_status(way: str, tmp_path: Path) -> None:
    """1 and a traceback where background work fails, 0 after SIGTERM."""
    generate_key(tmp_path / "key")
    arguments = [
        "coordinator",
        "--model",
        str(DEMO_MODEL),
        "--key-file",
        str(tmp_path / "key"),
        "--port",
        "0",
    ]
    control = ["--control-address", f"tcp://127.0.0.1:{free_port()}"]
    with subprocess.Popen(
        [sys.executable, "-c", MISTAKEN, way, *arguments, *control],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stderr is not None
        message = ""
        while way == "stop" and "workers connect to" not in message:
            message += process.stderr.readline()
        if way == "stop":
            process.send_signal(signal.SIGTERM)
        try:
            message += process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert process.returncode == (0 if way == "stop" else 1), message
    assert ("RuntimeError: a mistake of ours" in message) == (way != "stop")
    assert not list(tmp_path.glob("splitserve-*/run-*")), "its folder is gone"
