"""Clusters and coordinators of real processes, for as long as a benchmark needs them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

from ..cli.up import free_port

PROGRAM = (sys.executable, "-m", "splitserve.cli.main")
START_S = 300.0  # also where others have the processor: a process that has ended is seen at once
STOP_S = 60.0


def words(**options: object) -> list[str]:
    """Return options as words of a command line. True is a switch; None and False are left out."""
    found = []
    for name, value in options.items():
        if value is not None and value is not False:
            found.append("--" + name.replace("_", "-"))
            found += [] if value is True else [str(value)]
    return found


def coordinator_command(model: Path, port: int, control: str, **more: object) -> list[str]:
    """A coordinator for played workers. ``more``: options by their names, also other than these."""
    options = {"model": model, "served_model_name": "bench", "port": port, "control_address": control}
    options |= {"insecure": True, "log_level": "warning", "max_queue": 100_000}
    return [*PROGRAM, "coordinator", *words(**{**options, **more})]


@contextlib.contextmanager
def live_cluster(options: Sequence[str], log: Path) -> Iterator[str]:
    """``splitserve up`` with these options until the block ends; yields its address. Its output goes to
    ``log``."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    with started([*PROGRAM, "up", "--port", str(port), *options], f"{url}/ready", log):
        yield url


@contextlib.contextmanager
def started(
    command: Sequence[str], url: str, log: Path, **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """The process of this command, once it answers at ``url``, until the block ends. It is killed if it is
    still there ``STOP_S`` after SIGTERM."""
    with log.open("wb") as file:
        process = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        )
    try:
        await_up(url, process, log)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def stop(process: subprocess.Popen[bytes], log: Path) -> None:
    """End it. Raises RuntimeError where it had ended before, or ends with another status than 0."""
    process.terminate()
    if (status := process.wait(STOP_S)) != 0:
        raise RuntimeError(f"the server ended with {status}:\n{log.read_text(errors='replace')[-2000:]}")


def await_up(
    url: str, process: subprocess.Popen[Any], log: Path | None = None, within_s: float = START_S
) -> None:
    """Return once a GET of ``url`` is answered with 200. Raises RuntimeError where the process ends before,
    or that takes longer."""
    deadline = time.monotonic() + within_s
    while not is_up(url):
        if process.poll() is not None or time.monotonic() > deadline:
            output = "" if log is None else f":\n{log.read_text(errors='replace')[-3000:]}"
            raise RuntimeError(f"the server did not start{output}")
        time.sleep(0.1)


def is_up(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False
