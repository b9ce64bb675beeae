"""Forked workers: the promises that the supervisor has of any child, without its imports."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from splitserve.deploy.child_process import ChildProcess, Command
from splitserve.deploy.settings import DEMO_MODEL
from splitserve.deploy.worker_forks import WorkerForks

ENVIRON = {"PATH": os.environ["PATH"], "SPLITSERVE_LOG_LEVEL": "info"}
WORKER = ("prefill", "--model", str(DEMO_MODEL), "--insecure", "--coordinator", "tcp://127.0.0.1:9", "--num-blocks", "128")
UP = "KV cache: 128 blocks"


class Said:
    """What a process said, with a way to wait for it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, name: str, line: str) -> None:
        self.lines.append(line)

    async def until(self, text: str) -> None:
        async with asyncio.timeout(60):
            while not any(text in line for line in self.lines):
                await asyncio.sleep(0.01)


@pytest.fixture(scope="module")
def forks() -> Iterator[WorkerForks]:
    """One for all: its server imports torch once."""
    forks = WorkerForks()
    yield forks
    forks.close()


async def test_output_and_status_are_the_command_s_own(forks: WorkerForks) -> None:
    said = Said()
    assert await ChildProcess(Command("asks", ["version"], ENVIRON, forks.start), said).run() == 0
    assert said.lines[0].startswith("splitserve "), "the command's own words come first"
    assert await ChildProcess(Command("wrong", ["prefill", "--blocks", "8"], ENVIRON, forks.start), said).run() == 2
    assert "No such option" in said.lines[-1]


async def test_a_worker_has_torch_from_its_server_and_an_environment_of_its_own(forks: WorkerForks) -> None:
    said = Said()
    child = ChildProcess(Command("prefill-0", WORKER, ENVIRON | {"SPLITSERVE_LOG_FORMAT": "json"}, forks.start), said)
    running = asyncio.create_task(child.run())
    await said.until(UP)
    assert child.pid is not None
    worker = psutil.Process(child.pid)
    assert worker.name() == "prefill-0"
    assert os.getsid(child.pid) == child.pid  # Ctrl-C in the supervisor's terminal does not reach it
    assert said.lines[0].startswith('{"time"'), said.lines
    child.signal(signal.SIGKILL)
    assert await running == -signal.SIGKILL
    assert not child.running


async def test_a_signal_before_the_start_is_over_is_not_lost(forks: WorkerForks) -> None:
    child = ChildProcess(Command("early", WORKER, ENVIRON, forks.start), Said())
    running = asyncio.create_task(child.run())
    await asyncio.sleep(0)  # it has begun; the fork has not happened
    child.signal(signal.SIGKILL)
    assert await running == -signal.SIGKILL


KILLED = f"""
import asyncio
from splitserve.deploy.child_process import ChildProcess, Command
from splitserve.deploy.worker_forks import WorkerForks

child = ChildProcess(Command("left", {WORKER!r}, {ENVIRON!r}, WorkerForks().start), lambda name, line: print(child.pid, line, flush=True))
asyncio.run(child.run())
"""


def test_nobody_outlives_a_killed_supervisor(tmp_path: Path) -> None:
    program = tmp_path / "supervisor.py"
    program.write_text(KILLED)
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        line = next(line for line in killed.stdout if UP in line)
        family = [psutil.Process(killed.pid), *psutil.Process(killed.pid).children(recursive=True)]
        worker = psutil.Process(int(line.split()[0]))
        assert worker in family
        killed.kill()
        killed.wait()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive, [p.cmdline() for p in alive]
