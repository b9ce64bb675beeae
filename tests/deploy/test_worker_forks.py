"""Forked workers: the promises that the supervisor has of any child, without its imports."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from splitserve.cli.main import ENTRY
from splitserve.cli.settings import DEMO_MODEL
from splitserve.deploy.child_process import NOT_STARTED, ChildProcess, Command, reap_adopted
from splitserve.deploy.early_signals import ENDING
from splitserve.deploy.worker_forks import FORK_SERVER, WorkerForks
from splitserve.deploy.worker_forks import WORKER as WORKER_MODULE

ENVIRON = {"PATH": os.environ["PATH"], "SPLITSERVE_LOG_LEVEL": "info"}
WORKER = (
    "prefill",
    "--model",
    str(DEMO_MODEL),
    "--insecure",
    "--coordinator",
    "tcp://127.0.0.1:9",
    "--num-blocks",
    "128",
)
UP = "KV cache: 128 blocks"


def test_what_the_fork_server_imports_asks_nothing_of_a_gpu() -> None:
    """CUDA that was asked before a fork serves no worker."""
    code = f"""
import importlib, sys, torch
def refuse(*_, **__): raise AssertionError("CUDA is asked before the fork")
for name in ("init", "_lazy_init", "is_available", "device_count", "mem_get_info"):
    setattr(torch.cuda, name, refuse)
for module in ("{FORK_SERVER}", "{ENTRY.partition(":")[0]}", "{WORKER_MODULE}"):
    importlib.import_module(module)
assert "triton" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


class Said:
    """A process's output, with a way to wait for it."""

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
    forks = WorkerForks(ENTRY)
    yield forks
    forks.close()


async def test_output_and_status_are_the_command_s_own(forks: WorkerForks) -> None:
    message = Said()
    assert await ChildProcess(Command("asks", ["version"], ENVIRON, forks.start), message).run() == 0
    assert message.lines[0].startswith("splitserve "), "the command's own words come first"
    assert (
        await ChildProcess(
            Command("wrong", ["prefill", "--blocks", "8"], ENVIRON, forks.start), message
        ).run()
        == 2
    )
    assert "No such option" in message.lines[-1]


async def test_a_worker_has_torch_from_its_server_and_an_environment_of_its_own(forks: WorkerForks) -> None:
    message = Said()
    child = ChildProcess(
        Command("prefill-0", WORKER, ENVIRON | {"SPLITSERVE_LOG_FORMAT": "json"}, forks.start), message
    )
    running = asyncio.create_task(child.run())
    await message.until(UP)
    assert child.pid is not None
    worker = psutil.Process(child.pid)
    assert worker.name() == "prefill-0"
    shown = subprocess.check_output(["ps", "-ww", "-o", "args=", str(child.pid)], text=True)
    assert shown.split() == ["splitserve", *WORKER]
    assert os.getsid(child.pid) == child.pid  # Ctrl-C in the supervisor's terminal does not reach it
    assert message.lines[0].startswith('{"time"'), message.lines
    child.signal(signal.SIGKILL)
    assert await running == -signal.SIGKILL
    assert not child.running


async def test_a_signal_before_the_start_is_over_is_not_lost(forks: WorkerForks) -> None:
    child = ChildProcess(Command("early", WORKER, ENVIRON, forks.start), Said())
    running = asyncio.create_task(child.run())
    await asyncio.sleep(0)  # it has begun; the fork has not happened
    child.signal(signal.SIGKILL)
    assert await running == -signal.SIGKILL


def server_of(forks: WorkerForks) -> psutil.Process:
    """The fork server that the last worker came from."""
    assert forks._server is not None
    return psutil.Process(forks._server)


def held(pid: int) -> set[int]:
    """Which of the signals that end a process group this process does not take."""
    (mask,) = re.findall(r"SigBlk:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return {number for number in ENDING if int(mask, 16) & 1 << number - 1}


async def test_what_ends_the_process_group_does_not_end_the_fork_server(forks: WorkerForks) -> None:
    """Ctrl-C, a closed terminal, a service manager's SIGTERM. A worker has a group of its own, and takes
    them."""
    message = Said()
    child = ChildProcess(Command("prefill-0", WORKER, ENVIRON, forks.start), message)
    running = asyncio.create_task(child.run())
    await message.until(UP)
    assert child.pid is not None
    server = server_of(forks).pid
    async with asyncio.timeout(60):
        while held(child.pid):  # for a moment: libc holds every signal while it starts a thread
            await asyncio.sleep(0.01)
    child.signal(signal.SIGKILL)
    await running
    assert held(server) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}


@pytest.mark.parametrize("is_to_end", [False, True])
async def test_a_fork_server_that_ends_costs_no_worker(
    forks: WorkerForks, monkeypatch: pytest.MonkeyPatch, is_to_end: bool
) -> None:
    message, sentences = Said(), list[str]()
    monkeypatch.setattr(forks, "_notify", sentences.append)
    forks._unwatch()  # the loop of the test before this one
    child = ChildProcess(Command("prefill-0", WORKER, ENVIRON, forks.start), message)
    running = asyncio.create_task(child.run())
    await message.until(UP)
    assert child.pid is not None
    server = server_of(forks)
    forks.renew() if is_to_end else server.kill()
    assert await ChildProcess(Command("later", ["version"], ENVIRON, forks.start), message).run() == 0
    assert server_of(forks).pid != server.pid, "another one made the later worker"
    assert [str(server.pid) in sentence for sentence in sentences] == [True] * (not is_to_end)
    worker = psutil.Process(child.pid)
    assert worker.is_running()
    assert worker.ppid() == os.getpid()
    child.signal(signal.SIGTERM)
    child.signal(signal.SIGTERM)  # it leaves at once
    assert await running == 0, "its own exit status"


async def test_a_fork_server_that_always_dies_fails_the_start_and_not_the_supervisor(
    forks: WorkerForks, monkeypatch: pytest.MonkeyPatch
) -> None:
    def died(*_: object) -> tuple[int, int]:
        raise EOFError

    message = Said()
    monkeypatch.setattr(forks, "_fork", died)
    monkeypatch.setattr("splitserve.deploy.worker_forks.PAUSES_S", (0.0, 0.0, 0.0))
    assert (
        await ChildProcess(Command("never", ["version"], ENVIRON, forks.start), message).run() == NOT_STARTED
    )
    assert message.lines == ["it cannot be started: the fork server ended 3 times while it started never"]


ORPHANS = "import os, sys; sys.exit(0) if os.fork() else os._exit(7)"


async def test_orphans_are_reaped_and_no_exit_status_is_taken_from_its_waiter(forks: WorkerForks) -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS], start_new_session=True) as parent:
        async with asyncio.timeout(60):
            while len(mine := orphans(parent.pid)) < 2:  # the parent has ended, and its child after it
                await asyncio.sleep(0.01)
        reap_adopted()
        assert parent.wait() == 0, "left to its waiter"
        async with asyncio.timeout(60):
            while any(map(psutil.pid_exists, mine)):
                reap_adopted()
                await asyncio.sleep(0.01)


def orphans(session: int) -> list[int]:
    """Ended children of this process in that session."""
    ended = [child.pid for child in psutil.Process().children() if child.status() == psutil.STATUS_ZOMBIE]
    return [pid for pid in ended if os.getsid(pid) == session]


KILLED = f"""
import asyncio
from splitserve.deploy.child_process import ChildProcess, Command
from splitserve.deploy.worker_forks import WorkerForks

command = Command("left", {WORKER!r}, {ENVIRON!r}, WorkerForks({ENTRY!r}).start)
child = ChildProcess(command, lambda name, line: print(child.pid, line, flush=True))
asyncio.run(child.run())
"""


@pytest.mark.parametrize("without_server", [False, True])
def test_nobody_outlives_a_killed_supervisor(tmp_path: Path, without_server: bool) -> None:
    program = tmp_path / "supervisor.py"
    program.write_text(KILLED)
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as killed:
        assert killed.stdout is not None
        line = next(line for line in killed.stdout if UP in line)
        family = [psutil.Process(killed.pid), *psutil.Process(killed.pid).children(recursive=True)]
        worker = psutil.Process(int(line.split()[0]))
        assert worker in family
        if without_server:
            servers = [
                p for p in family if "multiprocessing.forkserver" in " ".join(p.cmdline()) and p != worker
            ]
            assert [p.kill() for p in servers] == [None]
        killed.kill()
        killed.wait()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive, [p.cmdline() for p in alive]
