"""Clients that hang up, at random moments: every block of their requests is free again at once, on prefill
and decode workers."""

from __future__ import annotations

import json
import random
import socket
import statistics
import time
from collections.abc import Iterator

import pytest
from e2e import paced
from e2e.cluster import MODEL_NAME, wait_for
from e2e.forked_cluster import HEARTBEAT_S, ForkedCluster, forked
from e2e.nursery import Nursery

NUM_MOMENTS = 30
NUM_TOKENS, DECODE_STEP_S = 1000, 0.06
"""A minute: a worker that goes on after a Cancel is noticed."""
PREFILL_STEP_S = 0.08
LONGEST_WAIT_S = 0.4  # prompt, handoff and the first tokens
WITHIN_S = 0.1  # from the worker's next loop turn
BESIDE_S = 0.05 + 0.1 + HEARTBEAT_S + 0.15
"""What is measured begins earlier and ends later: the client closes its socket, the worker's turn comes (an
idle loop waits, or a step is under way), it frees the blocks, a heartbeat reports it, a poll reads it; and
three processes may each have to wait for a core."""
NUM_PROCESSES = 4
"""The coordinator, a prefill worker, a decode worker and this one: where other programs have the cores, each
waits for its turn about as long as a poll of the idle cluster takes."""
STARVED_S = 30.0
"""There one turn of a loop may come late: only the median is held to the promise, and no single case to more
than half an answer. (tests/decode/test_cancellation.py holds every case to it, in every state, on a clock of
its own.)"""
STARVED_P50_S = 3.0
"""And where nothing is fast: much sooner than by waiting for the answer's end."""


@pytest.fixture(scope="module")
def slow(nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedCluster]:
    """Two prefill and two decode workers whose answers take a minute."""
    folder = tmp_path_factory.mktemp("slow")
    runner = paced.paced_runner(folder / "profile.json", PREFILL_STEP_S, DECODE_STEP_S)
    with forked(nursery, paced.MODEL, folder, "--runner", runner) as cluster:
        yield cluster


def hang_up_after(cluster: ForkedCluster, body: dict[str, object], wait_s: float) -> None:
    """Asks for a stream, and closes the connection after some seconds."""
    host, _, port = cluster.url.removeprefix("http://").partition(":")
    data = json.dumps({"model": MODEL_NAME, "stream": True, "ignore_eos": True, **body}).encode()
    with socket.create_connection((host, int(port)), STARVED_S) as client:
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-type: "
            f"application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        )
        client.sendall(head.encode() + data)
        time.sleep(wait_s)


def test_who_hangs_up_holds_no_block(slow: ForkedCluster, record_property: pytest.RecordProperty) -> None:
    cluster, draw = slow, random.Random(3)
    seconds, polls = [], []
    for number in range(NUM_MOMENTS):
        asked = time.monotonic()
        cluster.state()
        polls.append(time.monotonic() - asked)
        prompt = [draw.randrange(250) for _ in range(draw.choice([5, 100, 1000]))]
        hang_up_after(
            cluster,
            {"prompt": prompt, "max_tokens": NUM_TOKENS, "n": 1 + number % 2},
            draw.uniform(0, LONGEST_WAIT_S),
        )
        closed = time.monotonic()
        wait_for("no block is held for it", cluster.at_rest, STARVED_S)
        seconds.append(time.monotonic() - closed)
    p50, p99 = statistics.median(seconds), statistics.quantiles(seconds, n=100, method="inclusive")[98]
    record_property("freed_after_s", {"p50": round(p50, 4), "p99": round(p99, 4)})
    print(f"freed after: p50 {p50:.3f} s, p99 {p99:.3f} s; a poll: {statistics.median(polls):.3f} s")
    assert p50 <= min(WITHIN_S + BESIDE_S + NUM_PROCESSES * statistics.median(polls), STARVED_P50_S)
