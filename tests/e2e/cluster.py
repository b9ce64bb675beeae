"""A real cluster for tests: `splitserve up` in its own process, talked to over HTTP, hurt by signals."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from e2e.nursery import Forked, the_nursery
from openai import OpenAI

from splitserve.bench.operator_auth import OperatorAuth

MODEL_NAME = "tiny"
START_S = 200.0  # five processes that all read torch from a disk; a test has 300
PATIENCE_S = 60.0
"""For what happens in a moment, on a machine that may stand still for seconds: against hanging alone."""
DEAD_AFTER_S = 4.0
"""Silence after which a worker is dead to these clusters (to others sooner): it may just have waited for a
core."""
# to end in good order; a coordinator with an open stream takes five where it need not wait for a core
GRACE_S = 40.0
MOST_PROCESSES = 2  # of a coordinator
NEVER_DEAD = ("--dead-after-s", "60")
"""For clusters in which nobody is frozen: no worker is ever dead for having waited."""
HTTP = httpx.Client(
    verify=False, timeout=PATIENCE_S, limits=httpx.Limits(max_keepalive_connections=0), auth=OperatorAuth()
)
"""For all questions: to read certificates takes longer than an answer. No connection outlives the process
that it leads to."""


_BESIDE = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
_NUM_PORTS = 12_000 // _BESIDE
_FIRST_PORT = 20_000 + _NUM_PORTS * int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
PORTS = range(_FIRST_PORT, _FIRST_PORT + _NUM_PORTS)
"""This process's own: each of the processes that share a test run has others."""
_next_port = random.choice(PORTS)


def free_port(count: int = 1) -> int:
    """Return the first of ``count`` free ports in a row, outside the kernel's range: the process that gets it
    listens there only seconds later. No other call gets one of them, nor any beside it in a test run."""
    global _next_port
    while True:
        port, _next_port = _next_port, _next_port + count
        if _next_port > PORTS.stop:
            _next_port = PORTS.start
        elif all(map(_is_free, range(port, port + count))):
            return port


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def wait_for(what: str, condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    """Polls for an event, with a deadline."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(0.02)


def answers(url: str) -> bool:
    """Whether somebody is there, and content."""
    try:
        return HTTP.get(url, timeout=2).status_code == 200
    except httpx.TransportError:
        return False


class Cluster:
    """What tests see of a running cluster."""

    def __init__(self, url: str, process: subprocess.Popen[bytes] | Forked, log: Path) -> None:
        self.url, self.process, self.log = url, process, log
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=90)

    def wait_log(self, line: str) -> None:
        """Wait until the log has this line: a process's output comes there through `up`, later than the event
        itself."""
        wait_for(f"the log says: {line}", lambda: line in self.log.read_text())

    def ready(self) -> bool:
        return answers(f"{self.url}/ready")

    def state(self) -> dict[str, Any]:
        answer: dict[str, Any] = HTTP.get(f"{self.url}/debug/state").json()
        return answer

    def workers(self, role: str) -> list[dict[str, Any]]:
        return [w for w in self.state()["workers"] if w["role"] == role]

    def busy_worker(self, role: str) -> dict[str, Any]:
        """The worker of this role that holds most requests."""
        return max(self.workers(role), key=lambda w: len(w["dispatches"]))

    def at_rest(self) -> bool:
        """No request anywhere, and every block free or cached on every worker."""
        state = self.state()
        idle = state["requests"] == {"queued": 0, "running": 0}
        return idle and all(
            w["blocks"]["used"] == 0
            and w["blocks"]["free"] + w["blocks"]["cached"] == w["blocks"]["total"]
            and not w["held"]
            for w in state["workers"]
        )

    def wait_at_rest(self) -> None:
        wait_for("all blocks free or cached, no request anywhere", self.at_rest)

    def wait_reported(self) -> None:
        """Wait until the coordinator knows what every worker has cached by now: until each has sent two more
        heartbeats, since the report of its cache follows the first one."""
        for _ in range(2):
            since = time.monotonic()

            def has_come(since: float = since) -> bool:
                elapsed = time.monotonic() - since
                return all(w["silent_s"] < elapsed for w in self.state()["workers"])

            wait_for("a heartbeat of every worker", has_come)

    def wait_whole(self, num_prefill: int, num_decode: int) -> None:
        """Until all workers are (back) here and alive."""

        def whole() -> bool:
            return len(self.workers("prefill")) == num_prefill and len(self.workers("decode")) == num_decode

        wait_for(f"{num_prefill} prefill and {num_decode} decode workers", whole)

    def complete(self, prompt: str | list[int], max_tokens: int = 32, **more: Any) -> str:
        """An unstreamed completion's text; of exact length by default."""
        extra = {"ignore_eos": True, **more.pop("extra_body", {})}
        answer = self.client.completions.create(
            model=MODEL_NAME,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=more.pop("temperature", 0),
            extra_body=extra,
            **more,
        )
        return answer.choices[0].text

    def stream(self, prompt: str | list[int], max_tokens: int = 32, **more: Any) -> Iterator[str]:
        """A streamed completion's pieces; the last chunk must carry a finish reason."""
        extra = {"ignore_eos": True, **more.pop("extra_body", {})}
        stream = self.client.completions.create(
            model=MODEL_NAME,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=more.pop("temperature", 0),
            stream=True,
            extra_body=extra,
            **more,
        )
        reasons = []
        with stream:
            for chunk in stream:
                for choice in chunk.choices:
                    yield choice.text
                    reasons += [choice.finish_reason] if choice.finish_reason else []
        assert reasons == ["length"], f"one terminal event, by length: {reasons}"


@contextmanager
def running(model: Path, folder: Path, *arguments: str, anew: bool = False) -> Iterator[Cluster]:
    """`splitserve up` with these arguments, once it prints that it is ready: it ends if a worker dies before.
    When the block ends it must stop cleanly.

    ``anew``: in a new interpreter, as the coordinator that it starts, not in forks of the nursery: that takes
    three seconds longer."""
    port, control = free_port(), free_port(MOST_PROCESSES)
    log = folder / "up.log"
    log.write_bytes(b"")
    argv = ["up", "--model", str(model), "--served-model-name", MODEL_NAME]
    argv += ["--control-address", f"tcp://127.0.0.1:{control}"]
    argv += ["--dead-after-s", str(DEAD_AFTER_S), "--hung-after-s", "600"]  # the test thaws a frozen one
    # as transformers beside it, also where the processor multiplies bfloat16; the last one given counts
    argv += ["--dtype", "float32", "--grace-s", str(GRACE_S), "--port", str(port), *arguments]
    process = _new_program(argv, log) if anew else the_nursery().start(argv, log)
    cluster = Cluster(f"http://127.0.0.1:{port}", process, log)
    try:
        wait_for(
            f"the cluster is ready (log: {log})",
            lambda: b"\nready at " in log.read_bytes() or process.poll() is not None,
            START_S,
        )
        assert process.poll() is None, log.read_text()[-4000:]
        yield cluster
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, log.read_text()[-4000:]
    finally:
        cluster.client.close()
        if process.poll() is None:
            process.kill()
            process.wait(10)


def _new_program(argv: list[str], log: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "splitserve.cli.main", *argv]
    with log.open("ab") as sink:
        return subprocess.Popen(command, stdout=sink, stderr=sink, env={**os.environ, "OMP_NUM_THREADS": "1"})
