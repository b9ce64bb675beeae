"""Processes die, freeze and restart in mid-stream: no stream loses, doubles or changes a token, no block
leaks."""

from __future__ import annotations

import json
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest
from e2e.cluster import HTTP, MODEL_NAME, Cluster, wait_for

NUM_STREAMS = 8
NUM_TOKENS = 900
CAUGHT_WITHIN_S = 200.0  # on a machine where the observer waits longer for a core than the worker
PROMPTS = [f"stream {i} " + "abc" * (5 * i) for i in range(NUM_STREAMS)]


class Streams:
    """Several streams under way, each counting its pieces."""

    def __init__(self, cluster: Cluster, prompts: list[str], num_tokens: int, **more: float) -> None:
        self.counts = [0] * len(prompts)
        self.first = threading.Event()
        self._pool = ThreadPoolExecutor(len(prompts))

        def read(i: int) -> str:
            pieces = []
            for piece in cluster.stream(prompts[i], num_tokens, **more):
                pieces.append(piece)
                self.counts[i] += 1
            return "".join(pieces)

        self._futures: list[Future[str]] = [self._pool.submit(read, i) for i in range(len(prompts))]

    def wait_under_way(self, num_pieces: int = 10) -> None:
        """Or at their end: a slow reader gets many tokens in one event."""

        def under_way() -> bool:
            return all(
                count >= num_pieces or future.done()
                for count, future in zip(self.counts, self._futures, strict=True)
            )

        wait_for("all streams are under way", under_way)

    def wait_ended(self) -> None:
        """However they end. (A stream that breaks off raises; ``Cluster.stream`` sees to that.)"""
        wait_for("all streams have ended", lambda: all(future.done() for future in self._futures))
        self._pool.shutdown()

    def texts(self) -> list[str]:
        texts = [future.result(timeout=200) for future in self._futures]
        self._pool.shutdown()
        return texts


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[str]:
    """The fault-free answers."""
    return Streams(cluster, PROMPTS, NUM_TOKENS).texts()


@pytest.fixture(autouse=True)
def whole_before_and_after(cluster: Cluster) -> None:
    cluster.wait_whole(2, 2)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kill_in_mid_stream(cluster: Cluster, expected: list[str], role: str) -> None:
    streams = Streams(cluster, PROMPTS, NUM_TOKENS)
    streams.wait_under_way()
    victim = cluster.busy_worker(role)
    os.kill(victim["pid"], signal.SIGKILL)
    wait_for(
        "the loss is noticed",
        lambda: victim["incarnation"] not in [w["incarnation"] for w in cluster.workers(role)],
    )
    assert streams.texts() == expected
    cluster.wait_whole(2, 2)
    cluster.wait_at_rest()


def test_a_stream_of_ollamas_outlives_its_worker(cluster: Cluster) -> None:
    options = {"num_predict": NUM_TOKENS, "temperature": 0}
    numbers = {"type": "array", "minItems": NUM_TOKENS, "items": {"type": "integer"}}  # no end before that
    body = {"model": MODEL_NAME, "prompt": PROMPTS[3], "raw": True, "options": options, "format": numbers}
    url = f"{cluster.url}/api/generate"
    whole = HTTP.post(url, json={**body, "stream": False}).json()
    assert whole["done_reason"] == "length", whole

    def caught() -> bool:
        with HTTP.stream("POST", url, json=body) as answer:
            lines = answer.iter_lines()
            parts = [json.loads(next(lines))]
            victim = cluster.busy_worker("decode")
            os.kill(victim["pid"], signal.SIGKILL)
            parts += map(json.loads, lines)
        assert "".join(part["response"] for part in parts) == whole["response"]
        assert (parts[-1]["done_reason"], parts[-1]["eval_count"]) == (whole["done_reason"], NUM_TOKENS)
        cluster.wait_whole(2, 2)
        cluster.wait_at_rest()
        return bool(victim["dispatches"])

    wait_for("its worker was caught in the middle of it", caught, CAUGHT_WITHIN_S)


def test_kill_the_fork_server_in_mid_stream(cluster: Cluster, expected: list[str]) -> None:
    up = psutil.Process(cluster.process.pid)
    before = {worker["worker_id"]: worker["pid"] for worker in cluster.state()["workers"]}
    streams = Streams(cluster, PROMPTS, NUM_TOKENS)
    streams.wait_under_way()
    others = [child for child in up.children() if child.pid not in before.values()]
    (server,) = (child for child in others if "multiprocessing.forkserver" in str(child.cmdline()))
    server.kill()
    assert streams.texts() == expected
    assert {worker["worker_id"]: worker["pid"] for worker in cluster.state()["workers"]} == before, (
        "no worker has ended"
    )
    cluster.wait_log(f" WARNING the fork server (process {server.pid}) has ended")
    os.kill(before["decode-1"], signal.SIGKILL)
    wait_for(
        "its loss is noticed", lambda: before["decode-1"] not in [w["pid"] for w in cluster.workers("decode")]
    )
    cluster.wait_whole(2, 2)  # another server has forked it
    cluster.wait_at_rest()


def test_kill_the_prefill_worker_in_mid_prompt(cluster: Cluster) -> None:
    prompts = [
        [(i * 13 + i // 7 + start) % 250 for i in range(3500)] for start in range(6)
    ]  # one alone may be over between two looks
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(cluster.complete, prompt, 8) for prompt in prompts]
        wait_for(
            "a prompt is dispatched, or all are answered",
            lambda: (
                any(w["dispatches"] for w in cluster.workers("prefill")) or all(a.done() for a in answers)
            ),
        )
        os.kill(cluster.busy_worker("prefill")["pid"], signal.SIGKILL)
        texts = [answer.result(timeout=200) for answer in answers]
    cluster.wait_whole(2, 2)
    assert texts == [cluster.complete(prompt, 8) for prompt in prompts]
    cluster.wait_at_rest()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_freeze_in_mid_stream_then_thaw(cluster: Cluster, expected: list[str], role: str) -> None:
    streams = Streams(cluster, PROMPTS, NUM_TOKENS)
    streams.wait_under_way()
    victim = cluster.busy_worker(role)
    os.kill(victim["pid"], signal.SIGSTOP)
    try:
        assert streams.texts() == expected
        wait_for(
            "the loss is noticed", lambda: victim["pid"] not in [w["pid"] for w in cluster.workers(role)]
        )
    finally:
        os.kill(victim["pid"], signal.SIGCONT)
    # Thawed, and back under a new incarnation; or under the old one, where it has dropped its work by itself.
    cluster.wait_whole(2, 2)
    back = next(w for w in cluster.workers(role) if w["pid"] == victim["pid"])
    if back["incarnation"] == victim["incarnation"]:  # it stood still until it gave up the coordinator
        cluster.wait_log("freeing all it had asked for")
    cluster.wait_at_rest()


def test_sampled_streams_survive_too(cluster: Cluster) -> None:
    sampled = {"temperature": 1.0, "seed": 11}
    undisturbed = Streams(cluster, PROMPTS[:4], 600, **sampled).texts()
    streams = Streams(cluster, PROMPTS[:4], 600, **sampled)
    streams.wait_under_way()
    os.kill(cluster.busy_worker("decode")["pid"], signal.SIGKILL)
    assert streams.texts() == undisturbed
    cluster.wait_whole(2, 2)
    cluster.wait_at_rest()


def test_coordinator_restart(cluster: Cluster) -> None:
    streams = Streams(cluster, PROMPTS[:2], 3000)
    streams.wait_under_way()
    before = cluster.state()["coordinator"]
    os.kill(before["pid"], signal.SIGKILL)
    streams.wait_ended()  # the clients see broken connections, and wait for nothing
    wait_for("the coordinator is back", cluster.ready)
    assert cluster.state()["coordinator"]["incarnation"] != before["incarnation"]
    cluster.wait_whole(2, 2)
    cluster.wait_at_rest()  # what the old coordinator's requests held is free
    answer = cluster.client.completions.create(model=MODEL_NAME, prompt="again", max_tokens=4)
    assert answer.choices[0].finish_reason in ("length", "stop")
