"""Workers leave under load: streams go on without a lost, doubled or different token."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest
from e2e import paced
from e2e.cluster import HTTP, MODEL_NAME, NEVER_DEAD, Cluster, running, wait_for
from e2e.test_failure import Streams

NUM_TOKENS = 3000  # a second and more: time to be caught in the middle
CAUGHT_WITHIN_S = 200.0  # on a machine where the observer waits longer for a core than the worker
RENEWED_WITHIN_S = 200.0  # four processes that start one after the other beside streams
PROMPTS = [f"number {i} " + "xyz" * (7 * i) for i in range(3)]

DECODE_STEP_S = 0.1
NUM_TOKENS_OF_MINUTES, NUM_TOKENS_OF_SECONDS = 1800, 30
LEAVES_WITHIN_S, DRAIN_TIMEOUT_S = 60.0, 150.0
"""A moment, on a machine that may stand still; and what a worker would take that waits for its answers, which
last longer than either."""


@pytest.fixture(scope="module")
def expected(cluster: Cluster) -> list[str]:
    """The undisturbed answers."""
    return Streams(cluster, PROMPTS, NUM_TOKENS).texts()


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two prefill and two decode workers, a tenth of a second a token."""
    folder = tmp_path_factory.mktemp("slow")
    arguments = (
        "--prefill",
        "2",
        "--decode",
        "2",
        "--runner",
        paced.paced_runner(folder / "profile.json", 0.01, DECODE_STEP_S),
        "--decode-drain-timeout-s",
        str(DRAIN_TIMEOUT_S),
        *NEVER_DEAD,
    )
    with running(paced.MODEL, folder, *arguments) as cluster:
        yield cluster


@pytest.fixture
def whole_before(cluster: Cluster) -> None:
    cluster.wait_whole(2, 2)


def counters(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.state()["counters"]
    return found


@pytest.mark.usefixtures("whole_before")
def test_a_decode_worker_leaves_within_seconds_and_nothing_is_computed_twice(
    cluster: Cluster, expected: list[str]
) -> None:
    before = counters(cluster)

    def moved() -> bool:
        streams = Streams(cluster, PROMPTS, NUM_TOKENS)
        streams.wait_under_way()
        victim = cluster.busy_worker("decode")
        answer = HTTP.post(f"{cluster.url}/admin/drain/{victim['worker_id']}")
        assert (answer.status_code, answer.json()["draining"]) == (202, True)
        wait_for("it has left", lambda: victim["pid"] not in [w["pid"] for w in cluster.workers("decode")])
        assert streams.texts() == expected
        after = counters(cluster)
        assert after["redispatches"] == before["redispatches"], cluster.state()["last_retries"]
        cluster.wait_whole(2, 2)
        return bool(after["sequences_moved"] > before["sequences_moved"])

    wait_for("it was caught in the middle of some, and they moved", moved, CAUGHT_WITHIN_S)


def test_an_answer_of_minutes_keeps_no_worker(slow: Cluster) -> None:
    """Its process is gone seconds after SIGTERM; the answers go on elsewhere, one of them to its end."""
    undisturbed = "".join(slow.stream("minutes", NUM_TOKENS_OF_SECONDS, seed=7))
    before = counters(slow)
    lengths = [NUM_TOKENS_OF_MINUTES] * 2 + [NUM_TOKENS_OF_SECONDS] * 2  # on each worker one of either kind
    streams = [slow.stream("minutes", num_tokens, seed=7) for num_tokens in lengths]
    texts = [next(stream) for stream in streams]
    victim = slow.busy_worker("decode")
    assert victim["dispatches"]
    with os.fdopen(os.pidfd_open(victim["pid"])) as process:
        os.kill(victim["pid"], signal.SIGTERM)
        assert select.select([process], [], [], LEAVES_WITHIN_S)[0], "it waits for its answers"
    for number, stream in enumerate(streams[:2]):
        with closing(stream):
            while len(texts[number]) < len(undisturbed):
                texts[number] += next(stream)
    whole = [text + "".join(stream) for text, stream in zip(texts[2:], streams[2:], strict=True)]
    assert [text[: len(undisturbed)] for text in texts[:2]] + whole == [undisturbed] * 4
    after = counters(slow)
    assert after["sequences_moved"] > before["sequences_moved"]
    assert after["redispatches"] == before["redispatches"], slow.state()["last_retries"]
    slow.wait_whole(2, 2)
    slow.wait_at_rest()


@pytest.mark.usefixtures("whole_before")
def test_all_of_a_requests_state_moves(cluster: Cluster) -> None:
    """Penalties, seeds, n > 1, logprobs and stop strings, before and after a move."""
    more: dict[str, Any] = {
        "n": 2,
        "seed": 5,
        "temperature": 0.8,
        "logprobs": 2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "stop": ["zq0"],
        "extra_body": {"ignore_eos": True, "repetition_penalty": 1.05, "min_tokens": 20},
    }

    def ask() -> Any:
        answer = cluster.client.completions.create(
            model=MODEL_NAME, prompt="state " * 20, max_tokens=1500, **more
        )
        return [(choice.text, choice.finish_reason, choice.logprobs) for choice in answer.choices]

    def running() -> list[int]:
        return [w["pid"] for w in cluster.workers("decode") if w["running"]]

    undisturbed = ask()
    cluster.wait_at_rest()
    wait_for("nobody's last report is of the first answer", lambda: not running())
    before = counters(cluster)

    def moved() -> bool:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(ask)
            wait_for("it runs", lambda: bool(running()) or answer.done())
            runs_it = running()
            if runs_it:
                os.kill(runs_it[0], signal.SIGTERM)
                wait_for(
                    "it has left", lambda: runs_it[0] not in [w["pid"] for w in cluster.workers("decode")]
                )
            assert answer.result(timeout=200) == undisturbed
        cluster.wait_whole(2, 2)
        cluster.wait_at_rest()
        return bool(counters(cluster)["sequences_moved"] > before["sequences_moved"])

    wait_for("it was caught in the middle, and moved", moved, CAUGHT_WITHIN_S)


def test_rolling_restart_of_every_worker_under_load(slow: Cluster) -> None:
    """With steps of a given length: beside real ones, streams without a pause take the cores that the
    workers start on."""
    slow.wait_whole(2, 2)
    pids = {w["worker_id"]: w["pid"] for w in slow.state()["workers"]}
    before = counters(slow)
    undisturbed = "".join(slow.stream("roll", NUM_TOKENS_OF_SECONDS, seed=7))
    stop = [False]

    def load() -> int:
        count = 0
        while not stop[0]:
            assert "".join(slow.stream("roll", NUM_TOKENS_OF_SECONDS, seed=7)) == undisturbed
            count += 1
        return count

    def renewed() -> bool:
        now = {w["worker_id"]: w["pid"] for w in slow.state()["workers"]}
        return set(now) == set(pids) and all(now[name] != pid for name, pid in pids.items())

    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(load) for _ in range(4)]
        slow.process.send_signal(signal.SIGUSR1)
        try:
            wait_for("every worker is new", renewed, RENEWED_WITHIN_S)
        finally:
            stop[0] = True
        assert all(stream.result(timeout=200) > 0 for stream in streams)
    after = counters(slow)
    assert after["workers_lost"] == before["workers_lost"], slow.log.read_text()
    assert after["sequences_moved"] > before["sequences_moved"]
    slow.wait_at_rest()
