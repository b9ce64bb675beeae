"""Every stage has a deadline, and so has the whole: past it a request ends, and its error names the stage and
the remedy."""

from __future__ import annotations

import pytest
from support.lifecycle_bench import Bench, ends, sent

from splitserve.coordinator.errors import InvalidRequest
from splitserve.coordinator.generate.plan import timeout_of
from splitserve.transport.messages.messages import Cancel, RequestFailed

LIMITS = {
    "queue_timeout_s": 3.0,
    "prefill_timeout_s": 4.0,
    "handoff_timeout_s": 5.0,
    "token_timeout_s": 6.0,
    "dead_after_s": 99.0,
}


@pytest.mark.parametrize(
    ("stage", "patience"), [("queue", 3.0), ("prefill", 4.0), ("handoff", 5.0), ("decode", 6.0)]
)
def test_each_stage(stage: str, patience: float) -> None:
    bench = Bench(**LIMITS)
    if stage == "queue":
        bench.submit("other", prompt_token_ids=[1] * 40)
        bench.submit("r", prompt_token_ids=[1] * 40)
    else:
        bench.submit()
    if stage in ("handoff", "decode"):
        bench.first(1)
    if stage == "decode":
        bench.joined(1)
    for _ in range(3):  # heartbeats: nothing is lost
        bench.now += patience / 3 - 0.01
        bench.load("p", [1])
        bench.load("d", [1])
        assert not ends(bench.core.tick(bench.now))
    bench.now += 0.1
    actions = bench.core.tick(bench.now)
    (ended,) = ends(actions)
    assert ended.error == "deadline"
    assert f"stage: {stage}" in ended.message
    assert bench.core.counters()[f"deadlines_{stage}"] == 1
    assert stage == "queue" or len(sent(actions, Cancel)) == 2


def test_in_total_and_tokens_push_the_gap_out() -> None:
    bench = Bench(**LIMITS)
    bench.submit(deadline=20.0)
    bench.first(1)
    bench.joined(1)
    for index in range(1, 5):
        bench.now += 4.0
        bench.step(1, index, 6)
        bench.load("p", [])
        bench.load("d", [1])
        assert not ends(bench.core.tick(bench.now))
    bench.now = 20.0
    (ended,) = ends(bench.core.tick(bench.now))
    assert (ended.error, ended.num_output_tokens) == ("deadline", 5)
    assert "20 s (stage: decode)" in ended.message


def test_a_request_may_ask_for_less() -> None:
    header = {b"x-request-timeout": b"2.5"}
    assert timeout_of(None, {}, 600.0) == 600.0
    assert timeout_of(None, header, 600.0) == 2.5
    assert timeout_of(7.0, header, 600.0) == 7.0  # the body is nearer
    with pytest.raises(InvalidRequest, match="at most 600 seconds"):
        timeout_of(601.0, {}, 600.0)
    for bad in (b"soon", b"-1", b"0", b"nan", b"inf"):
        with pytest.raises(InvalidRequest, match="no number of seconds"):
            timeout_of(None, {b"x-request-timeout": bad}, 600.0)


def test_a_worker_that_sees_it_first_changes_nothing_in_what_the_client_reads() -> None:
    bench = Bench(**LIMITS)
    bench.submit(deadline=20.0)
    bench.first(1)
    bench.joined(1)
    late = RequestFailed(coordinator=7, dispatch=1, kind="deadline", message="the deadline passed here")
    (ended,) = ends(bench.send("d", late))
    assert ended.error == "deadline"
    assert (
        ended.message
        == "the request did not end within its 20 s (stage: decode); allow more time or ask for fewer tokens"
    )
    assert bench.core.counters()["deadlines_decode"] == 1
