"""Spans read off the messages that pass a worker."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from splitserve.transport.messages.messages import (
    Cancel,
    FirstToken,
    Handoff,
    Joined,
    Peer,
    Prefill,
    RequestFailed,
    RequestSpec,
    SamplingParams,
    StepTokens,
    u32,
)
from splitserve.transport.process import worker_trace
from splitserve.transport.process.worker_trace import WorkerSpan, WorkerTrace

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PEER = Peer(worker_id="d", incarnation=1, address="tcp://x:1")


def spec(dispatch: int, traceparent: str = PARENT) -> RequestSpec:
    tokens = u32([1, 2, 3])
    return RequestSpec(
        request_id=f"r{dispatch}",
        epoch=0,
        dispatch=dispatch,
        coordinator=7,
        token_ids=tokens,
        num_prompt_tokens=3,
        sampling=SamplingParams(max_tokens=5),
        deadline_s=9.0,
        traceparent=traceparent,
    )


def handoff(dispatch: int) -> Handoff:
    return Handoff(spec=spec(dispatch), lease=1, token=5, checksums=b"")


def step(*rows: tuple[int, int], **more: object) -> StepTokens:
    dispatches, indices = u32([row[0] for row in rows]), u32([row[1] for row in rows])
    return StepTokens(
        coordinator=7, dispatches=dispatches, indices=indices, tokens=u32([4] * len(rows)), **more
    )  # type: ignore[arg-type]


def summary(spans: list[WorkerSpan]) -> list[tuple[str, float, float, str]]:
    assert all(span.traceparent == PARENT for span in spans)
    return [(span.name, span.begin, span.end, span.error) for span in spans]


def test_a_prefill_worker() -> None:
    spans: list[WorkerSpan] = []
    trace = WorkerTrace(spans.append)
    trace.received(Prefill(spec=spec(1), decode=PEER), 1.0)
    trace.sent(
        [FirstToken(coordinator=7, dispatch=1, index=0, token=5, queue_s=0.5, num_cached_tokens=2)], 3.0
    )
    assert summary(spans) == [("prefill queue", 1.0, 1.5, ""), ("prefill", 1.5, 3.0, "")]
    assert spans[1].attributes == {
        "request_id": "r1",
        "epoch": 0,
        "dispatch": 1,
        "prompt_tokens": 3,
        "cached_tokens": 2,
    }


def test_a_decode_worker() -> None:
    spans: list[WorkerSpan] = []
    trace = WorkerTrace(spans.append)
    trace.received(handoff(1), 1.0)
    trace.received(handoff(2), 1.0)
    trace.sent([Joined(coordinator=7, dispatch=1, index=0, token=5, num_cached_blocks=4)], 1.25)
    trace.sent([Joined(coordinator=7, dispatch=2, index=0, token=5)], 1.5)
    trace.sent([step((1, 1), (2, 1))], 2.0)
    trace.sent([step((1, 2), (2, 2), finished={1: "stop"})], 3.0)
    trace.received(Cancel(coordinator=7, dispatches=u32([1, 99])), 4.0)
    assert summary(spans) == [
        ("handoff", 1.0, 1.25, ""),
        ("handoff", 1.0, 1.5, ""),
        ("decode", 1.5, 3.0, ""),
        ("decode", 1.25, 4.0, ""),
    ]
    assert spans[0].attributes["cached_blocks"] == 4
    assert (spans[2].attributes["output_tokens"], spans[2].attributes["finish_reason"]) == (3, "stop")
    assert spans[3].attributes["cancelled"] is True


def test_a_failure_is_an_error() -> None:
    spans: list[WorkerSpan] = []
    trace = WorkerTrace(spans.append)
    trace.received(Prefill(spec=spec(1), decode=PEER), 1.0)
    trace.sent([RequestFailed(coordinator=7, dispatch=1, kind="internal", message="broke")], 2.0)
    assert summary(spans) == [("prefill", 1.0, 2.0, "internal: broke")]


def test_what_is_not_traced_leaves_nothing_and_what_never_ends_is_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_trace, "MAX_OPEN", 10)
    spans: list[WorkerSpan] = []
    trace = WorkerTrace(spans.append)
    trace.received(Prefill(spec=spec(1, traceparent=""), decode=PEER), 1.0)
    trace.sent([FirstToken(coordinator=7, dispatch=1, index=0, token=5)], 2.0)
    assert spans == []
    lost = Prefill(spec=spec(2), decode=PEER)
    for dispatch in range(50):
        trace._begin("prefill", replace(lost.spec, dispatch=dispatch), 1.0)
    assert len(trace._open) == 10
