"""Where the time goes: whatever happens to a request, its stages sum to its end-to-end time."""

from __future__ import annotations

import re
from itertools import pairwise
from time import monotonic
from typing import get_args

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai import AsyncOpenAI
from support.lifecycle_bench import Bench, ends

from splitserve.coordinator.time_ledger import Stage, TimeLedger
from splitserve.transport.messages import RequestFailed

SECONDS = st.floats(-1.0, 100.0, allow_nan=False)
STAGE = st.sampled_from(get_args(Stage))
BOOKINGS = st.lists(st.tuples(st.sampled_from(["enter", "later", "was"]), STAGE, SECONDS), max_size=30)
BODY = {"prompt": "Hi", "temperature": 0, "max_tokens": 4}


@given(BOOKINGS, st.floats(0, 1e6))
def test_stages_sum_to_the_whole_whatever_is_booked(bookings: list[tuple[str, Stage, float]], start: float) -> None:
    now, ledger = start, TimeLedger("parse", start)
    ledger.enter("queue", now)
    for kind, stage, seconds in bookings:
        if kind == "enter":
            now += seconds  # clocks that step back a little are allowed for
            ledger.enter(stage, now)
        elif kind == "later":
            ledger.previous_began_later(seconds)
        else:
            ledger.previous_was(stage, seconds)
    ledger.close(now)
    stages = ledger.stages()
    assert stages.total == pytest.approx(ledger.end - start, rel=1e-9, abs=1e-6)
    assert all(getattr(stages, name) >= 0 for name in get_args(Stage))
    spans = list(ledger.spans())
    assert all(a.end == b.begin for a, b in pairwise(spans))


def test_workers_correct_what_the_coordinator_saw() -> None:
    ledger = TimeLedger("parse", 10.0)
    for stage, at in (("queue", 10.5), ("prefill", 11.0), ("handoff", 13.0)):
        ledger.enter(stage, at)  # type: ignore[arg-type]
    ledger.previous_began_later(0.25)  # the worker says: waited a quarter of a second before its first chunk
    ledger.enter("decode", 13.0)  # heard in one breath with the first token
    ledger.previous_was("handoff", 0.5)
    ledger.close(15.0)
    assert list(ledger.spans()) == [
        ("parse", 10.0, 10.5),
        ("queue", 10.5, 11.25),
        ("prefill", 11.25, 12.5),
        ("handoff", 12.5, 13.0),
        ("decode", 13.0, 15.0),
    ]


def test_a_request_that_is_tried_again_has_all_of_its_attempts_in_the_ledger() -> None:
    bench = Bench()
    bench.submit()
    bench.now = 1.0
    bench.first(1)
    bench.now = 2.0
    bench.joined(1)
    bench.now = 3.0
    bench.say("d", RequestFailed(coordinator=7, dispatch=1, kind="internal", message="broke"))
    bench.now = 5.0
    bench.first(2, index=1)
    bench.joined(2, index=1)
    bench.now = 6.0
    (ended,) = ends(bench.step(2, 2, 7, "stop"))
    assert ended.ledger is not None
    assert [span.stage for span in ended.ledger.spans()] == ["prefill", "handoff", "decode", "prefill", "decode"]
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


async def test_a_stream_ends_with_it_as_a_comment(http: httpx.AsyncClient, client: AsyncOpenAI) -> None:
    response = await http.post("/v1/completions", json={**BODY, "stream": True})
    comment, done, rest = response.text.split("\n\n")[-3:]
    assert (done, rest) == ("data: [DONE]", "")
    seconds = parsed(comment.removeprefix(": server-timing "))
    total = seconds.pop("total")
    assert sum(seconds.values()) == pytest.approx(total, rel=0.01, abs=ROUNDED_S)
    stream = await client.completions.create(model="tiny", stream=True, **BODY)  # type: ignore[call-overload]
    assert "".join([chunk.choices[0].text async for chunk in stream])  # the client of OpenAI reads over it


async def test_the_metrics_agree(http: httpx.AsyncClient) -> None:
    for _ in range(3):
        await http.post("/v1/completions", json=BODY)
    text = (await http.get("/metrics")).text
    of = {name: float(value) for name, value in re.findall(r"^splitserve_(\w+)_seconds_sum\{.*\} (\S+)$", text, re.M)}
    stages = [of[f"request_{stage}_time"] for stage in get_args(Stage)]
    assert sum(stages) == pytest.approx(of["e2e_request_latency"], rel=0.01)
    assert min(stages) > 0


ROUNDED_S = 4e-6
"""Seven numbers, each to a thousandth of a millisecond: of a request that takes a fraction of one that is more than a hundredth."""


def parsed(header: str) -> dict[str, float]:
    """Seconds by name."""
    return {name: float(ms) / 1e3 for name, ms in re.findall(r"(\w+);dur=([\d.]+)", header)}
