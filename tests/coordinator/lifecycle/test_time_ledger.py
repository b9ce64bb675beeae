"""The time ledger: whatever happens to a request, its stages sum to its end-to-end time."""

from __future__ import annotations

import re
from itertools import pairwise
from time import monotonic
from typing import get_args

import httpx
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.lifecycle_bench import Bench, ends

from splitserve.coordinator.lifecycle.time_ledger import AttemptTimes, Milestone, Stage, Stages, TimeLedger
from splitserve.transport.messages.messages import RequestFailed, StepTokens, u32

SECONDS = st.floats(-1.0, 100.0, allow_nan=False)
STAGE = st.sampled_from(get_args(Stage))
ANYTHING = st.floats(allow_nan=True, allow_infinity=True)
BOOKINGS = st.lists(st.tuples(STAGE, SECONDS), max_size=30)
WORDS = st.lists(
    st.tuples(
        st.sampled_from(["first", "joined", "moved", "ended"]),
        st.floats(0, 10),
        st.floats(0, 10),
        ANYTHING,
        ANYTHING,
    ),
    max_size=8,
)
BODY = {"prompt": "Hi", "temperature": 0, "max_tokens": 4}


@given(BOOKINGS, st.floats(0, 1e6))
def test_stages_sum_to_the_whole_whatever_is_booked(
    bookings: list[tuple[Stage, float]], start: float
) -> None:
    now, ledger = start, TimeLedger("parse", start)
    ledger.enter("queue", now)
    for stage, seconds in bookings:
        now += seconds  # clocks that step back a little are allowed for
        ledger.enter(stage, now)
    ledger.close(now)
    _is_whole(ledger, start)


@given(WORDS)
def test_stages_sum_to_the_whole_whatever_workers_say(
    words: list[tuple[str, float, float, float, float]],
) -> None:
    now, ledger = 3.0, TimeLedger("parse", 1.0)
    ledger.enter("queue", 2.0)
    ledger.enter("prefill", now)
    times = AttemptTimes(ledger)
    for kind, later_s, ago_s, seconds, more in words:
        now += later_s
        received = Milestone(now, now - ago_s, seconds)
        if kind == "first":
            times.first_token(received, more)
        elif kind == "joined":
            times.joined(received)
        elif kind == "moved":
            ledger.enter("decode", now)
            times.moved()
        else:
            times.ended(received)
        assert ledger.newest_began <= now, "no stage begins in the future"
    ledger.close(now)
    _is_whole(ledger, 1.0)


def _is_whole(ledger: TimeLedger, start: float) -> None:
    stages = ledger.stages()
    assert stages.total == pytest.approx(ledger.end - start, rel=1e-9, abs=1e-6)
    assert all(getattr(stages, name) >= 0 for name in get_args(Stage))
    spans = list(ledger.spans())
    assert all(a.end == b.begin for a, b in pairwise(spans))


def dispatched() -> tuple[TimeLedger, AttemptTimes]:
    ledger = TimeLedger("parse", 10.0)
    ledger.enter("queue", 10.5)
    ledger.enter("prefill", 11.0)
    return ledger, AttemptTimes(ledger)


@pytest.mark.parametrize("joined_first", [False, True])
@pytest.mark.parametrize("blocked_until", [11.0, 20.0])
def test_a_coordinator_that_hears_late_makes_no_stage_of_the_workers_longer(
    joined_first: bool, blocked_until: float
) -> None:
    """All in one breath, or each as it happens: 0.25 s of waiting, 1 s of prefill, 0.5 s of handoff, 2 s of
    decode."""
    ledger, times = dispatched()
    words = [
        lambda: times.first_token(Milestone(max(12.25, blocked_until), 11.0, 1.25), 1.0),
        lambda: times.joined(Milestone(max(12.75, blocked_until), 11.0, 0.5)),
    ]
    for send in reversed(words) if joined_first else words:
        send()
    end = max(14.75, blocked_until)
    times.ended(Milestone(end, 11.0, 2.0))
    ledger.close(end)
    assert list(ledger.spans()) == [
        ("parse", 10.0, 10.5),
        ("queue", 10.5, 11.25),
        ("prefill", 11.25, 12.25),
        ("handoff", 12.25, 12.75),
        ("decode", 12.75, 14.75),
        *([("coordinator", 14.75, end)] if end > 14.75 else []),
    ]


def test_a_worker_that_stands_still_makes_nobody_else_late() -> None:
    """It froze before it read the prompt; the coordinator had read every message until 13.9 s."""
    ledger, times = dispatched()
    times.first_token(Milestone(14.0, 13.9, 0.5), 0.5)
    ledger.close(14.0)
    assert ledger.stages() == pytest.approx(Stages(parse=0.5, queue=2.9, prefill=0.5, handoff=0.1))


def test_a_blocked_event_loop_is_charged_to_the_coordinator() -> None:
    """The lifecycle with real milestones, all read when the loop goes on."""
    bench = Bench()
    bench.core.tick(0.0)
    bench.submit()
    bench.now = 3.0  # the loop was blocked since 0
    bench.first(1, queue_s=0.125, prefill_s=0.25)
    bench.joined(1, transfer_s=0.125)
    rows = {"dispatches": u32([1]), "indices": u32([1]), "tokens": u32([7])}
    (ended,) = ends(
        bench.send("d", StepTokens(coordinator=7, finished={0: "stop"}, decode_s={0: 0.5}, **rows))
    )
    assert ended.stages == Stages(queue=0.125, prefill=0.25, handoff=0.125, decode=0.5, coordinator=2.0)


@pytest.mark.parametrize("ticks", [[5.0], [5.0, 5.05, 5.1]])
def test_messages_that_arrive_after_a_stall_are_charged_to_the_coordinator(ticks: list[float]) -> None:
    """It ticks before ZeroMQ's thread, which was stopped with it, delivers the last token."""
    bench = Bench()
    bench.core.tick(0.0)
    bench.submit()
    bench.first(1)
    bench.joined(1)
    for now in ticks:
        bench.core.tick(now)
    bench.now = 5.125
    rows = {"dispatches": u32([1]), "indices": u32([1]), "tokens": u32([7])}
    (ended,) = ends(
        bench.send("d", StepTokens(coordinator=7, finished={0: "stop"}, decode_s={0: 0.125}, **rows))
    )
    assert ended.stages == Stages(decode=0.125, coordinator=5.0)


def test_a_stall_is_the_coordinators_also_where_no_worker_says_what_it_took() -> None:
    """One waits for room; one is tried again, since its connection did not outlast the stall; one arrives
    once it is over."""
    bench = Bench(max_num_seqs=1)
    bench.core.tick(0.0)
    bench.submit("tried again")
    bench.submit("waits")
    bench.first(1)
    bench.joined(1)
    bench.core.tick(5.0)
    bench.now = 5.125
    bench.submit("new")
    bench.send("d", RequestFailed(coordinator=7, dispatch=1, kind="internal", message="broke"))
    bench.now = 5.25
    ended = {
        name: ends(bench.core.cancel(name, bench.now))[0].stages for name in ("tried again", "waits", "new")
    }
    assert ended["tried again"] == Stages(decode=0.125, coordinator=5.0, prefill=0.125)
    assert ended["waits"] == Stages(queue=0.25, coordinator=5.0)
    assert ended["new"] == Stages(queue=0.125)


def test_once_a_stall_is_caught_up_a_late_message_is_its_workers_own() -> None:
    bench = Bench()
    for now in (0.0, 0.5, 0.75, 1.0):
        bench.core.tick(now)
    bench.now = 1.0
    bench.submit()
    for now in (1.25, 1.5, 1.75, 2.0):
        bench.core.tick(now)
    bench.now = 2.0
    bench.first(1, prefill_s=0.25)
    bench.joined(1)
    (ended,) = ends(bench.step(1, 1, 7, "stop"))
    assert ended.stages == Stages(prefill=0.25, queue=0.75)


def test_a_request_that_is_tried_again_has_all_of_its_attempts_in_the_ledger() -> None:
    bench = Bench()
    bench.submit()
    bench.now = 1.0
    bench.first(1, prefill_s=1.0)
    bench.now = 2.0
    bench.joined(1, transfer_s=1.0)
    bench.now = 3.0
    bench.send("d", RequestFailed(coordinator=7, dispatch=1, kind="internal", message="broke"))
    bench.now = 5.0
    bench.first(2, index=1, prefill_s=2.0)
    bench.joined(2, index=1)
    bench.now = 6.0
    (ended,) = ends(bench.step(2, 2, 7, "stop"))
    assert ended.ledger is not None
    assert [span.stage for span in ended.ledger.spans()] == [
        "prefill",
        "handoff",
        "decode",
        "prefill",
        "decode",
    ]
    assert (ended.stages.prefill, ended.stages.handoff, ended.stages.decode) == (3.0, 1.0, 2.0)
    assert (ended.prefill_worker, ended.decode_worker) == ("p", "d")


async def test_the_server_timing_header_adds_up(http: httpx.AsyncClient) -> None:
    began = monotonic()
    response = await http.post("/v1/completions", json=BODY)
    took = monotonic() - began
    seconds = parsed(response.headers["server-timing"])
    assert list(seconds) == [*get_args(Stage), "total"]
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total, rel=0.01, abs=ROUNDED_S)
    assert total <= took + ROUNDED_S


async def test_a_stream_has_the_stages_in_its_usage(http: httpx.AsyncClient) -> None:
    began = monotonic()
    asked = {**BODY, "stream": True, "stream_options": {"include_usage": True}}
    response = await http.post("/v1/completions", json=asked)
    took = monotonic() - began
    usage = orjson.loads(response.text.split("\n\n")[-3].removeprefix("data: "))["usage"]["splitserve"]
    seconds = [usage[f"{stage}_s"] for stage in get_args(Stage)]
    assert min(seconds) >= 0
    assert 0 < sum(seconds) <= took + ROUNDED_S


async def test_the_metrics_agree(http: httpx.AsyncClient) -> None:
    for _ in range(3):
        await http.post("/v1/completions", json=BODY)
    text = (await http.get("/metrics")).text
    of = {
        name: float(value)
        for name, value in re.findall(r"^splitserve_(\w+)_seconds_sum\{.*\} (\S+)$", text, re.M)
    }
    stages = [of[f"request_{stage}_time"] for stage in get_args(Stage)]
    assert sum(stages) == pytest.approx(of["e2e_request_latency"], rel=0.01)
    assert min(stages) > 0


ROUNDED_S = 4e-6
"""Seven numbers, each to a thousandth of a millisecond: of a request that takes a fraction of one that is
more than a hundredth."""


def parsed(header: str) -> dict[str, float]:
    """Seconds by name."""
    return {name: float(ms) / 1e3 for name, ms in re.findall(r"(\w+);dur=([\d.]+)", header)}
