"""A cluster that `splitserve up --on` starts, as the trials drive and watch it."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import httpx
from e2e.cluster import free_port

from splitserve.coordinator.http.access.operators import admin_key

PHASE = re.compile(r'splitserve_worker_start_seconds{phase="([^"]*)",.*worker="([^"]*)"} (.*)')


class Cluster:
    """The demo model with small caches, on free ports of this machine."""

    def __init__(self, on: str, folder: Path) -> None:
        self._on, self.folder = on, folder
        self._port, self._control = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self._port}"

    def up(self, prefill: int, decode: int, *more: str, by: Sequence[str] = ()) -> float:
        """Return the seconds until it serves, or until it has stopped. ``by``: what runs the command."""
        began = time.monotonic()
        places = f"--host 0.0.0.0 --port {self._port} --control-address tcp://0.0.0.0:{self._control}"
        sizes = f"--prefill {prefill} --decode {decode} --num-blocks 600 --threads 1"
        command = [*by, sys.executable, "-m", "splitserve.cli.main", "up", "--on", self._on, *places.split()]
        command += ["--open-access", "--exact", *sizes.split(), "--run-dir", str(self.folder), *more]
        print(run(*command), file=sys.stderr)
        return round(time.monotonic() - began, 1)

    def chat(self, question: str) -> str:
        """Return what `splitserve chat` streams."""
        command = [
            sys.executable,
            "-m",
            "splitserve.cli.main",
            "chat",
            "--url",
            self.url,
            "--max-tokens",
            "20",
        ]
        done = subprocess.run(command, input=f"{question}\n", capture_output=True, text=True, timeout=120)
        return done.stdout.strip()

    def workers(self) -> dict[str, int]:
        """Process ids of the workers that do not drain, by name."""
        workers = self.state()["workers"]
        return {worker["worker_id"]: worker["pid"] for worker in workers if not worker["draining"]}

    def state(self) -> dict[str, Any]:
        """Return /debug/state. Raises HTTPError."""
        found: dict[str, Any] = self._get("/debug/state").json()
        return found

    def start_phases(self, names: Collection[str]) -> dict[str, dict[str, float]]:
        """Return the seconds of workers' starts, by phase and name."""
        found: dict[str, dict[str, float]] = {}
        for line in self._get("/metrics").text.splitlines():
            if match := PHASE.match(line):
                phase, name, seconds = match.groups()
                if name in names:
                    found.setdefault(phase, {})[name] = float(seconds)
        return found

    def moved(self) -> int:
        """Return how many sequences have moved from one decode worker to another."""
        lines = self._get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith("splitserve_sequences_moved_total")]
        return int(sum(float(line.split()[-1]) for line in found))

    def is_back(self, name: str, old: int) -> float:
        """Wait until a worker runs in another process than ``old``. Return the seconds it took."""
        return wait_for(name, lambda: self.workers().get(name, old) != old)

    def _get(self, path: str) -> httpx.Response:
        headers = {"authorization": f"Bearer {admin_key(self.folder / 'admin.key')}"}
        return httpx.get(f"{self.url}{path}", headers=headers, timeout=30, trust_env=False)


def run(*command: str) -> str:
    """Return a command's output; its failure ends the trial."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float = 180.0) -> float:
    """Return the seconds it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout_s:
            raise SystemExit(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.2)
    return round(time.monotonic() - began, 1)
