"""Real processes: requests that take too long end as promised, and a model that hangs keeps nobody waiting
for ever."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from e2e.cluster import HTTP, MODEL_NAME, wait_for
from e2e.forked_cluster import ForkedCluster
from e2e.test_failure import Streams
from support.worker_nursery import HANGS

NUM_CHOICES = 8
BODY = {
    "model": MODEL_NAME,
    "prompt": "for ever " * 30,
    "max_tokens": 3500,
    "ignore_eos": True,
    "timeout": 0.4,
}


@pytest.fixture(autouse=True)
def whole_before(forked_cluster: ForkedCluster) -> None:
    forked_cluster.wait_whole(2, 2)


def test_past_its_deadline_a_request_gives_back_what_it_has(forked_cluster: ForkedCluster) -> None:
    timeout_s = 0.4
    while (
        answer := HTTP.post(f"{forked_cluster.url}/v1/completions", json={**BODY, "timeout": timeout_s})
    ).status_code == 504:
        timeout_s *= 2  # the machine has other work
        assert timeout_s < 60
    choice, usage = answer.json()["choices"][0], answer.json()["usage"]
    assert (choice["finish_reason"], usage["splitserve"]["timed_out"]) == ("timeout", True)
    assert choice["text"]
    assert 0 < usage["completion_tokens"] < BODY["max_tokens"]
    forked_cluster.wait_at_rest()


def test_or_a_504_where_that_is_wanted(forked_cluster: ForkedCluster) -> None:
    answer = HTTP.post(f"{forked_cluster.url}/v1/completions", json={**BODY, "on_timeout": "error"})
    assert answer.status_code == 504
    assert answer.json()["error"]["code"] == "deadline_exceeded"
    forked_cluster.wait_at_rest()


def events_until(cluster: ForkedCluster, timeout_s: float) -> list[dict[str, Any]]:
    """Return the text of a stream with more tokens than can come in that time; empty without a first one."""
    body = {
        **BODY,
        "timeout": timeout_s,
        "stream": True,
        "n": NUM_CHOICES,
        "logprobs": 5,
        "on_timeout": "error",
    }
    with HTTP.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer:
        assert answer.status_code in (200, 504)
        return [json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {")]


def test_past_its_deadline_a_stream_ends_with_a_finish_reason_and_an_error_event(
    forked_cluster: ForkedCluster,
) -> None:
    timeout_s = 3
    while not (events := events_until(forked_cluster, timeout_s)):
        timeout_s *= 2  # the machine has other work
        assert timeout_s < 60
    *chunks, error = events
    reasons = [
        (choice["index"], choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["finish_reason"]
    ]
    assert sorted(reasons) == [(i, "error") for i in range(NUM_CHOICES)]
    assert error["error"]["code"] == "deadline_exceeded"
    assert (
        f"did not end within its {timeout_s} s (stage: " in error["error"]["message"]
    )  # whether the coordinator or a worker saw it first
    forked_cluster.wait_at_rest()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_model_that_hangs_is_given_up_and_its_streams_go_on(
    forked_cluster: ForkedCluster, role: str
) -> None:
    """Its process answers every heartbeat: only its steps do not end."""
    cluster, prompts = forked_cluster, ["bystander " * 5, "another " * 40]
    expected, bystanders = cluster.complete("hang", 40), Streams(cluster, prompts, 300).texts()
    started = cluster.num_started
    streams = Streams(cluster, prompts, 300)
    assert cluster.complete("hang", 40, seed=HANGS[role]) == expected
    assert streams.texts() == bystanders
    assert re.search(
        f"{role} worker {role}-. is gone: busy without finishing a step for ", cluster.log_of("coordinator")
    )
    wait_for("the hung process was started again", lambda: cluster.num_started > started)
    cluster.wait_whole(2, 2)
    cluster.wait_at_rest()
