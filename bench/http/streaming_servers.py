"""Servers of the bench of streams: a coordinator with played workers, and bare ones, each on its own
cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...cli.settings import DEMO_MODEL
from ...cli.up import free_port
from ...coordinator.text.tokenizer import Tokenizer
from ..fake_workers import FakeWorkers
from ..live_cluster import await_up, coordinator_command, is_up

TEXT = (
    "The quick brown fox explains what os.path.join does, and why list comprehensions are read from "
    "left to right. "
)


@dataclass(frozen=True)
class Server:
    """A server process under measurement."""

    port: int
    control: str
    process: psutil.Process

    def cpu_s(self) -> float:
        times = self.process.cpu_times()
        return times.user + times.system

    def rss_mb(self) -> float:
        return float(self.process.memory_info().rss) / 1e6


def model_folder(folder: Path, context: int = 1_000_000) -> Path:
    """The demo model's tokenizer; ``context``, in tokens, is long enough that no stream ends while it is
    measured."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": context}))
    return folder


@contextmanager
def workers_of(server: Server, model: Path) -> Iterator[FakeWorkers]:
    """Fake workers that generate words of TEXT; the client counts tokens by their blanks."""
    tokenizer = Tokenizer.load(model)
    texts = tokenizer.table.texts
    tokens = [
        t for t in tokenizer.encode([TEXT], add_special_tokens=False)[0] if (texts[t] or "").count(" ") == 1
    ]
    tokenizer.close()
    workers = FakeWorkers(server.control, tokens)
    try:
        deadline = time.monotonic() + 30
        while not _ready(server, workers):
            if time.monotonic() > deadline:
                raise TimeoutError("the coordinator did not become ready")
        yield workers
    finally:
        workers.close()


def _ready(server: Server, workers: FakeWorkers) -> bool:
    for _ in range(20):
        workers.poll()
        if len(workers.dispatches):
            workers.step()
        time.sleep(0.01)
    return is_up(f"http://127.0.0.1:{server.port}/ready")


@contextmanager
def coordinator(
    model: Path, cores: list[int], key_file: Path | None = None, **more: object
) -> Iterator[Server]:
    """The real one, by its command. ``key_file``: the cluster's key, if it is to have one; ``more``: other
    options."""
    port, control = free_port("127.0.0.1"), f"tcp://127.0.0.1:{free_port('127.0.0.1')}"
    keys = {"key_file": key_file, "insecure": key_file is None}
    with pinned(coordinator_command(model, port, control, **keys, **more), cores) as process:
        await_up(f"http://127.0.0.1:{port}/health", process)
        yield Server(port, control, psutil.Process(process.pid))


@contextmanager
def bare_server(module: str, cores: list[int]) -> Iterator[Server]:
    """A floor."""
    with pinned([sys.executable, "-m", f"splitserve.bench.http.{module}"], cores) as process:
        assert process.stdout is not None
        port, control = process.stdout.readline().split()
        yield Server(int(port), control, psutil.Process(process.pid))


@contextmanager
def pinned(command: list[str], cores: list[int], all_cores: bool = False) -> Iterator[subprocess.Popen[str]]:
    """A server on the first core (or wherever it likes), while this process keeps to the last."""
    os.sched_setaffinity(0, cores if all_cores else cores[:1])
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    os.sched_setaffinity(0, cores[-1:])
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)
        if process.stdout is not None:
            process.stdout.close()
        os.sched_setaffinity(0, cores)
