"""Exactly one terminal event for each request, whatever fails beside it."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from pathlib import Path
from time import monotonic

import httpx
import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.generate.choice import Choice
from splitserve.coordinator.lifecycle.actions import Action, End, Push
from splitserve.coordinator.lifecycle.lifecycle import Lifecycle
from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.coordinator.listeners import LOG_EVERY_S, ListenerFailures, Listeners
from splitserve.coordinator.metrics.request_record import RequestRecord
from splitserve.coordinator.metrics.trace_log import TraceLog
from splitserve.coordinator.server import HttpServer
from splitserve.coordinator.socket_dispatcher import SocketDispatcher
from splitserve.transport.messages.messages import SamplingParams

BODY = {"prompt": "quick", "max_tokens": 5}


def full(*_: object) -> None:
    raise OSError(28, "No space left on device", "/traces/requests.jsonl")


def broken(*_: object) -> None:
    raise RuntimeError("a mistake of ours")


def test_one_that_raises_is_counted_and_the_others_are_called(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    listeners: Listeners[[int]] = Listeners(ListenerFailures(lambda: now))
    reported: list[int] = []
    listeners.add("trace file", full)
    listeners.add("dashboard", reported.append)
    for number in range(300):
        listeners(number)
    now += LOG_EVERY_S
    listeners(300)
    assert reported == list(range(301))
    assert listeners.failures.counts == Counter({"trace file": 301})
    first, later = (record.getMessage() for record in caplog.records)
    assert first.startswith(
        "trace file has failed, requests go on without it: [Errno 28] No space left on device: '/traces/"
    )
    assert later.startswith("trace file has failed 300 times more")
    assert all(record.exc_info is None for record in caplog.records), (
        "the sentence of a full disk needs no traceback"
    )


def test_a_mistake_of_ours_is_logged_with_its_traceback_once(caplog: pytest.LogCaptureFixture) -> None:
    failures = ListenerFailures()
    for _ in range(3):
        failures.call("steering", broken)
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None


class Recorded:
    """A sink."""

    def __init__(self, breaks_at: str = "") -> None:
        self.received: list[object] = []
        self._breaks_at = breaks_at

    def push(self, token_id: int, logprobs: object) -> None:
        self._record("push", token_id)

    def push_prompt_logprobs(self, logprobs: object) -> None: ...

    def flush(self) -> None:
        self._record("flush", "flush")

    def end(self, ended: Ended) -> None:
        self._record("end", ended.error or ended.finish_reason)

    def _record(self, what: str, message: object) -> None:
        if what == self._breaks_at:
            raise RuntimeError("a mistake of ours")
        self.received.append(message)


def request_to(sink: Recorded, name: str) -> Request:
    now = monotonic()
    return Request(name, [1, 2], SamplingParams(max_tokens=3, temperature=0.0), sink, now, now + 60)


def dispatcher_that_does(actions: list[Action], monkeypatch: pytest.MonkeyPatch) -> SocketDispatcher:
    core = Lifecycle(7, "hybrid")
    monkeypatch.setattr(core, "submit", lambda request, now: actions)
    return SocketDispatcher(core, "tcp://127.0.0.1:*", None)


async def test_a_trace_file_that_cannot_be_written_ends_no_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sinks = [Recorded(), Recorded()]
    one, two = (request_to(sink, f"request-{number}") for number, sink in enumerate(sinks))
    dispatcher = dispatcher_that_does(
        [End(one, Ended("stop", num_output_tokens=3)), End(two, Ended("length"))], monkeypatch
    )
    trace_log = TraceLog(tmp_path, 60)
    trace_log.close()  # whatever it writes now raises
    dispatcher.listeners.add("trace file", trace_log.note)
    dispatcher.submit(one)
    dispatcher.stop()
    assert [sink.received for sink in sinks] == [["stop"], ["length"]]
    assert dispatcher.listeners.failures.counts == Counter({"trace file": 1})


@pytest.mark.parametrize(
    ("breaks_at", "received"), [("push", ["failed"]), ("flush", [5, "failed"]), ("end", [5, 6])]
)
async def test_a_sink_that_raises_ends_alone(
    breaks_at: str, received: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, whole = Recorded(breaks_at), Recorded()
    one, two = request_to(broken, "broken"), request_to(whole, "whole")
    actions: list[Action] = [
        Push(one, 5, None),
        Push(two, 5, None),
        Push(one, 6, None),
        Push(two, 6, None),
        End(two, Ended("stop")),
    ]
    if breaks_at == "end":
        actions.append(End(one, Ended("stop")))
    dispatcher = dispatcher_that_does(actions, monkeypatch)
    dispatcher.submit(one)
    dispatcher._carry_out([Push(one, 7, None), End(one, Ended("length"))])
    dispatcher.stop()
    assert whole.received == [5, 6, "stop"]
    assert broken.received == ([5, 6, "failed"] if breaks_at == "flush" else received)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_response_ends_soon_after_its_deadline_though_nothing_else_ends_it(
    streamed: bool,
    http: httpx.AsyncClient,
    server: HttpServer,
    dispatcher: FakeDispatcher,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("splitserve.coordinator.generate.api.OVERDUE_S", 0.0)
    dispatcher.step_s = 0.1  # some text is here by then; this dispatcher knows no deadlines
    body = {**BODY, "max_tokens": 600, "ignore_eos": True, "stream": streamed, "timeout": 0.5}
    response = await http.post("/v1/completions", json=body)
    if streamed:
        assert response.text.count("data: [DONE]") == 1
        assert response.text.count('"deadline_exceeded"') == 1
    else:
        assert response.status_code == 504
    await dispatcher.until(lambda: not dispatcher.running)
    assert not server.app.generation.open


async def test_a_response_is_given_back_by_limits_though_its_sequence_never_ends(
    http: httpx.AsyncClient, server: HttpServer, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("splitserve.coordinator.generate.api.OVERDUE_S", 0.0)
    monkeypatch.setattr(dispatcher, "submit", lambda request: None)  # it forgets everything
    monkeypatch.setattr(dispatcher, "cancel", lambda request_id: None)
    settled: list[int] = []
    monkeypatch.setattr(
        server.app.generation._tenancy.limiter, "settle", lambda admission, tokens: settled.append(tokens)
    )
    response = await http.post("/v1/completions", json={**BODY, "timeout": 0.1})
    assert response.status_code == 504
    assert settled == [0]


async def test_a_late_response_to_a_slow_reader_is_given_back_once_its_sequence_and_its_reader_have_ended(
    http: httpx.AsyncClient, server: HttpServer, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its sequence was taken off the count of those that run twice, and never again was that count 0."""
    monkeypatch.setattr("splitserve.coordinator.generate.api.OVERDUE_S", 0.0)
    dispatcher.step_s = 0.1
    body = {**BODY, "max_tokens": 600, "ignore_eos": True, "stream": True, "timeout": 0.5}
    reading = asyncio.create_task(http.post("/v1/completions", json=body))
    await dispatcher.until(lambda: bool(dispatcher.running))
    (call,) = server.app.generation.open
    call._flow.write_paused = True
    await dispatcher.until(lambda: not dispatcher.running)
    call.writable()
    await reading
    assert server.app.overload.used["prompt_bytes"] == 0


async def test_listeners_of_metrics_touch_no_request(http: httpx.AsyncClient, server: HttpServer) -> None:
    records: list[RequestRecord] = []
    server.app.metrics.listeners.add("broken", broken)
    server.app.metrics.listeners.add("records", records.append)
    assert (await http.post("/v1/completions", json=BODY)).status_code == 200
    assert [record.status for record in records] == ["200"]
    metrics = (await http.get("/metrics")).text
    assert 'splitserve_listener_failures_total{listener="broken"} 1.0' in metrics


@pytest.mark.parametrize("streamed", [False, True])
async def test_an_answer_whose_end_cannot_be_written_ends_with_an_error(
    streamed: bool, http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Choice, "_rest", broken)
    response = await http.post("/v1/completions", json={**BODY, "stream": streamed})
    assert ("data: [DONE]" in response.text) is streamed
    assert response.text.count('"server_error"') == 1
    assert response.status_code == (200 if streamed else 500)
