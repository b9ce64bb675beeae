"""Workers are killed, frozen and drained, one after the other, while clients stream: every byte is as
without a fault.

(Ten minutes of it, with a network that loses packets: ``python -m splitserve.bench.chaos.chaos``.)
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from e2e.cluster import wait_for
from e2e.forked_cluster import ForkedCluster
from e2e.test_exact_streams import BODIES, Answer, Streams

from splitserve.bench.chaos.chaos import chaos_clocks

FAULTS = [
    ("decode", signal.SIGKILL),
    ("prefill", signal.SIGSTOP),
    ("decode", signal.SIGTERM),
    ("prefill", signal.SIGKILL),
    ("decode", signal.SIGSTOP),
    ("prefill", signal.SIGTERM),
]


class Clients:
    """One that streams each of the bodies, again and again, and checks every answer."""

    def __init__(
        self, cluster: ForkedCluster, bodies: dict[str, dict[str, Any]], expected: dict[str, Answer]
    ) -> None:
        self._cluster, self._bodies, self._expected = cluster, bodies, expected
        self._stop = threading.Event()
        self.num_answers = 0
        self._pool = ThreadPoolExecutor(len(bodies))
        self._futures = [self._pool.submit(self._ask, name) for name in bodies]

    def _ask(self, name: str) -> None:
        while not self._stop.is_set():
            answer = Streams(self._cluster, {name: self._bodies[name]}).answers()[name]
            assert answer == self._expected[name], name
            self.num_answers += 1

    def end(self) -> None:
        """Raises what was wrong."""
        self._stop.set()
        self._pool.shutdown()
        for future in self._futures:
            future.result()


@pytest.fixture(scope="module")
def bodies(forked_cluster: ForkedCluster) -> dict[str, dict[str, Any]]:
    """Greedy and sampled, several choices, logprobs, penalties, and a stop string from late in an answer."""
    body = BODIES["sampled, penalties"]
    text = Streams(forked_cluster, {"": body}).answers()[""][0]["text"]
    return {**BODIES, "stop string": {**body, "stop": [text[len(text) * 2 // 3 :][:12]]}}


@pytest.fixture(scope="module")
def expected(forked_cluster: ForkedCluster, bodies: dict[str, dict[str, Any]]) -> dict[str, Answer]:
    """Without faults, one at a time."""
    return {name: Streams(forked_cluster, {name: body}).answers()[name] for name, body in bodies.items()}


def hurt(cluster: ForkedCluster, role: str, number: int) -> None:
    """Does this to the busiest worker of the role; returns when it is gone, and the cluster whole again."""
    wait_for("it has work", lambda: bool(cluster.busy_worker(role)["dispatches"]))
    victim = cluster.busy_worker(role)
    name = (victim["worker_id"], victim["incarnation"])
    os.kill(victim["pid"], number)
    try:
        wait_for(
            f"{name[0]} is gone",
            lambda: name not in [(w["worker_id"], w["incarnation"]) for w in cluster.workers(role)],
        )
    finally:
        if number == signal.SIGSTOP:
            os.kill(victim["pid"], signal.SIGCONT)
    cluster.wait_whole(2, 2)


def test_whatever_befalls_workers_no_byte_differs(
    forked_cluster: ForkedCluster, bodies: dict[str, dict[str, Any]], expected: dict[str, Answer]
) -> None:
    cluster = forked_cluster
    cluster.wait_whole(2, 2)
    before, began = cluster.state()["counters"], time.monotonic()
    clients = Clients(cluster, bodies, expected)
    try:
        for role, number in FAULTS:
            hurt(cluster, role, number)
    finally:
        clients.end()
    cluster.wait_at_rest()
    after = cluster.state()["counters"]
    print(
        f"{clients.num_answers} answers in {time.monotonic() - began:.1f} s, "
        f"{after['recoveries'] - before['recoveries']:g} recoveries"
    )
    assert after["workers_lost"] - before["workers_lost"] >= 4
    assert after["workers_left"] - before["workers_left"] == 2
    assert after["recoveries"] > before["recoveries"]


def test_the_chaos_runs_clocks_jump_while_their_processes_run(tmp_path: Path) -> None:
    if why_not := chaos_clocks.missing():
        pytest.skip(why_not)
    clocks = chaos_clocks.Clocks(tmp_path / "clocks", ["worker"])
    program = (
        "import sys, time\nfor _ in sys.stdin:\n    time.sleep(0.001)\n    print(time.time() - "
        "time.monotonic(), flush=True)"
    )
    environ = {**os.environ, **clocks.environ("worker")}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=-1, stdout=-1, text=True, bufsize=1, env=environ
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def asked() -> float:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            return float(process.stdout.readline())

        right = asked()
        assert right == pytest.approx(time.time() - time.monotonic(), abs=1)
        for seed in range(6):
            offset = clocks.jump(["worker"], random.Random(seed))
            assert asked() - right == pytest.approx(offset, abs=1)
        process.stdin.close()
        assert process.wait(60) == 0
