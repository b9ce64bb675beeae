"""Processes of ``splitserve`` that are forked from one that has imported everything."""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent
ENDS_WITHIN_S = 60.0


class Forked:
    """A process that is not a child of this one. Its methods are those of ``subprocess.Popen``."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self.pid, self.returncode = pid, None
        self._nursery, self._fd, self._lock = nursery, os.pidfd_open(pid), threading.Lock()

    def poll(self) -> int | None:
        return self._look(0)

    def wait(self, timeout: float | None = None) -> int:
        if (status := self._look(timeout)) is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
        return status

    def send_signal(self, number: int) -> None:
        with self._lock:
            if self.returncode is None:
                signal.pidfd_send_signal(self._fd, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """Send this signal, and wait for the end. Return the exit status."""
        self.send_signal(number)
        return self.wait(ENDS_WITHIN_S)

    def _look(self, timeout: float | None) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._fd], [], [], timeout)[0]:
                self.returncode = self._nursery.status_of(self.pid)
                os.close(self._fd)
            return self.returncode


class Nursery:
    """Starts them: ``support/worker_nursery.py``."""

    def __init__(self) -> None:
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        environ["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "support.worker_nursery", " " * 400],  # room for what `ps` is to show
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ,
        )
        self._lock = threading.Lock()

    def start(self, argv: list[str], log: Path, environ: Mapping[str, str] | None = None) -> Forked:
        """`splitserve ARGV`, with its output added to ``log``; the environment is this process's."""
        env = {**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})}
        return Forked(self, self._ask(argv=argv, log=str(log), env=env))

    def status_of(self, pid: int) -> int:
        """Return the exit status of a process that has ended; once only."""
        return self._ask(ended=pid)

    def close(self) -> None:
        """Ends what it has started, too."""
        self._process.communicate(timeout=ENDS_WITHIN_S)

    def _ask(self, **order: Any) -> int:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return int(self._process.stdout.readline())


@cache
def the_nursery() -> Nursery:
    """The one of this test process, which ends with it."""
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery
