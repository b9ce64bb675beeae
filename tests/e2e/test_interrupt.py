"""Ctrl-C on ``splitserve up`` while it streams; and what is noticed when a process of it dies."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e import paced
from e2e.cluster import (
    HTTP,
    MODEL_NAME,
    NEVER_DEAD,
    PATIENCE_S,
    START_S,
    Cluster,
    answers,
    free_port,
    running,
    wait_for,
)
from psutil import Process
from transformers import PreTrainedModel

from splitserve.coordinator.run_folder import RunFolder

STEP_S = 0.05  # of decode workers: a stream is under way for long, and takes next to nothing of a core
ENDLESS = {
    "model": MODEL_NAME,
    "prompt": "x",
    "max_tokens": 1900,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
}


def paced_options(folder: Path, *more: str) -> list[str]:
    return ["--runner", paced.paced_runner(folder / "profile.json", 0.01, STEP_S), *more, *NEVER_DEAD]


def test_ctrl_c_ends_an_open_stream_and_everything_else(tmp_path: Path) -> None:
    with (
        running(paced.MODEL, tmp_path, *paced_options(tmp_path)) as cluster,
        HTTP.stream("POST", f"{cluster.url}/v1/completions", json=ENDLESS) as response,
    ):
        workers = [worker["pid"] for worker in cluster.state()["workers"]]
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        cluster.process.send_signal(signal.SIGINT)
        events = [line for line in lines if line and not line.startswith(":")]
        assert events[-1] == "data: [DONE]"
        assert "shutting down" in events[-2]
        assert cluster.process.wait(PATIENCE_S) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_second_ctrl_c_ends_open_streams_at_once_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processes: str
) -> None:
    """It leaves nothing behind. Without it, a stream would have a minute."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    options = paced_options(tmp_path, "--shutdown-timeout-s", "60", "--processes", processes)
    with (
        running(paced.MODEL, tmp_path, *options) as cluster,
        HTTP.stream("POST", f"{cluster.url}/v1/completions", json=ENDLESS | {"n": 16}) as response,
    ):
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        cluster.process.send_signal(signal.SIGINT)
        wait_for("it says so", lambda: "streams have 60 s to end. Ctrl-C again" in cluster.log.read_text())
        cluster.process.send_signal(signal.SIGINT)
        events = [line for line in lines if line and not line.startswith(":")]
        assert events[-1] == "data: [DONE]"
        assert "shutting down" in events[-2]
        assert cluster.process.wait(PATIENCE_S) == 0
    assert [path.name for path in tmp_path.rglob("run-*")] == []


@pytest.fixture
def two_processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A coordinator of two processes, whose streams have a minute to end."""
    folder = tmp_path_factory.mktemp("two")
    options = paced_options(folder, "--shutdown-timeout-s", "60", "--processes", "2")
    with running(paced.MODEL, folder, *options) as cluster:
        yield cluster


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_each_of_several_coordinator_processes_is_one(
    two_processes: Cluster, number: signal.Signals
) -> None:
    """A terminal, systemd and Slurm signal each process. An open stream goes on."""
    cluster = two_processes
    body = ENDLESS | {"max_tokens": 60}
    with HTTP.stream("POST", f"{cluster.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        [coordinator] = [
            child for child in Process(cluster.process.pid).children() if "coordinator" in child.cmdline()
        ]
        os.killpg(coordinator.pid, number)
        events = [line for line in lines if line and not line.startswith(":")]
        assert events[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in events[-2]
    wait_for("the next coordinator serves", lambda: not coordinator.is_running() and cluster.ready())


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_killed_worker_is_noticed_before_it_is_missed(cluster: Cluster, role: str) -> None:
    cluster.wait_whole(2, 2)
    victim, begins = cluster.workers(role)[0], cluster.log.stat().st_size
    os.kill(victim["pid"], signal.SIGKILL)

    def reasons() -> list[str]:
        message = cluster.log.read_bytes()[begins:].decode()
        return re.findall(f"{role} worker {victim['worker_id']} is gone: (.*)\n", message)

    wait_for("the loss is noticed", lambda: bool(reasons()))
    assert reasons()[0] == "its process has ended", "and not: silent for so many seconds"
    cluster.wait_whole(2, 2)


def test_what_a_killed_up_leaves_behind_goes_with_the_next_start(
    tiny: tuple[Path, PreTrainedModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """The cluster's key, the workers' settings, multiprocessing's sockets: all lie in one folder."""
    places = Path(tempfile.mkdtemp())  # a short path: names of sockets are bounded
    request.addfinalizer(lambda: shutil.rmtree(places))
    monkeypatch.setattr(tempfile, "tempdir", str(places))
    port, log = free_port(), tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "splitserve.cli.main",
        "up",
        "--model",
        str(tiny[0]),
        "--port",
        str(port),
        "--kv-cache-gib",
        "0.05",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(places)}
    with log.open("wb") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environment)
    try:
        wait_for(
            f"the cluster is ready (log: {log})", lambda: answers(f"http://127.0.0.1:{port}/ready"), START_S
        )
        assert list(places.glob("*/run-*/cluster.key"))
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    wait_for("its processes have ended", lambda: not answers(f"http://127.0.0.1:{port}/health"))
    next_one = RunFolder()
    wait_for(
        "nothing is left",
        lambda: RunFolder().close() is None and [path.name for path in places.rglob("*.key")] == [],
    )
    next_one.close()
    assert [path for path in places.rglob("*") if path.name.startswith("pymp-")] == []
