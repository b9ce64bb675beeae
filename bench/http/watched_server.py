"""A server for attacks, of any build, and the memory of its coordinator."""

from __future__ import annotations

import shlex
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ...cli.settings import DEMO_MODEL
from ...cli.up import free_port
from ..live_cluster import started, words

SAMPLE_S = 0.05


@contextmanager
def served(command: list[str], max_files: int | None) -> Iterator[tuple[int, psutil.Process]]:
    """The port, and the coordinator's process."""
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory() as folder:
        options = words(model=DEMO_MODEL, port=port, run_dir=Path(folder) / "run")
        limit = f"ulimit -n {max_files}; " if max_files else ""
        shell = ["bash", "-c", f"{limit}exec {shlex.join([*command, 'up', *options])}"]
        with started(shell, f"http://127.0.0.1:{port}/ready", Path(folder) / "log") as process:
            yield port, coordinator_of(process.pid, port)


def coordinator_of(pid: int, port: int) -> psutil.Process:
    """The process that listens."""
    parent = psutil.Process(pid)
    for process in [parent, *parent.children(recursive=True)]:
        with suppress(psutil.Error):
            if any(
                c.laddr.port == port and c.status == psutil.CONN_LISTEN
                for c in process.net_connections("tcp")
            ):
                return process
    raise RuntimeError("no process of the server listens")


class Watch(threading.Thread):
    """Samples the memory of a coordinator and its own processes; kills it beyond a bound."""

    def __init__(self, process: psutil.Process, most_mb: float) -> None:
        super().__init__(daemon=True)
        self.most, self.killed = 0.0, ""
        self._process, self._most_mb, self._stopping = process, most_mb, threading.Event()

    def run(self) -> None:
        while not self._stopping.wait(SAMPLE_S):
            self.most = max(self.most, now := memory_mb(self._process))
            if now > self._most_mb:
                self.killed = f"killed at {now:.0f} MB"
                self._process.kill()
                return
            if not self._process.is_running():
                self.killed = "died"
                return

    def stop(self) -> None:
        self._stopping.set()
        self.join()


def memory_mb(process: psutil.Process) -> float:
    total = 0
    with suppress(psutil.Error):
        for one in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                total += one.memory_info().rss
    return total / 1e6
