"""A cluster of real processes for as long as a benchmark needs it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx

from ..cli.up import free_port

READY_S = 300.0


@contextlib.contextmanager
def live_cluster(options: Sequence[str], log: Path) -> Iterator[str]:
    """``splitserve up`` with these options until the block ends; yields its address. Its output goes to
    ``log``."""
    port = free_port("127.0.0.1")
    command = [sys.executable, "-m", "splitserve.cli.main", "up", "--port", str(port), *options]
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_ready(url, process, log)
        yield url
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def _wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/ready", timeout=5).status_code == 200:
                return
        time.sleep(0.1)
    raise SystemExit(f"the cluster did not start:\n{log.read_text()[-3000:]}")
