"""The coordinator's log of its load is a trace that the planner reads, and holds nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from time import monotonic

import httpx
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.dispatcher import ClosedSink
from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.coordinator.metrics.trace_log import BLOCK_SIZE, TraceLog
from splitserve.coordinator.server import HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel
from splitserve.traces.readers import open_trace
from splitserve.transport.messages.messages import SamplingParams


def request(tokens: list[int], arrival: float, session: str = "", salt: bytes = b"") -> Request:
    sampling = SamplingParams(max_tokens=9)
    return Request(
        "secret-name", tokens, sampling, ClosedSink(), arrival, arrival + 60, session=session, salt=salt
    )


def logged(folder: Path) -> TraceLog:
    """Three turns of a conversation of one tenant, the first ending last, and the same prompt of another
    tenant."""
    log = TraceLog(folder, longest_request_s=60)
    now, prompt = monotonic(), list(range(100, 100 + 2 * BLOCK_SIZE))
    log.note(
        request([*prompt, 7], now + 1.0, session="alice@example.org"), Ended("length", num_output_tokens=5)
    )
    log.note(request(prompt, now, session="alice@example.org"), Ended("stop", num_output_tokens=3))
    log.note(request(prompt, now + 2.0, salt=b"other"), Ended("stop", num_output_tokens=1))
    log.note(request(prompt, now + 3.0), Ended(error="overloaded"))
    (copy := request(prompt, now)).is_copy = True
    log.note(copy, Ended("stop", num_output_tokens=3))
    log.close()
    return log


def test_it_is_read_as_a_trace_in_order_of_arrival(tmp_path: Path) -> None:
    first, second, other = open_trace(logged(tmp_path).path)
    assert [r.num_output_tokens for r in (first, second, other)] == [3, 5, 1]
    assert second.arrival_s - first.arrival_s > 0.9
    assert first.block_hashes == second.block_hashes != other.block_hashes
    assert len(first.block_hashes) == 2
    assert first.session == second.session != ""


def test_it_tells_no_text_and_no_name_and_cannot_be_matched_with_another_file(tmp_path: Path) -> None:
    one, two = logged(tmp_path / "a").path, logged(tmp_path / "b").path
    text = one.read_text()
    assert "alice" not in text
    assert "secret-name" not in text
    ours, theirs = next(iter(open_trace(one))), next(iter(open_trace(two)))
    assert set(ours.block_hashes).isdisjoint(theirs.block_hashes)
    assert ours.session != theirs.session


async def test_it_tells_when_each_token_came_if_asked(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> None:
    log = TraceLog(tmp_path, longest_request_s=60)
    server = HttpServer(HttpApp(dispatcher, model))
    server.app.generation.times_tokens = True
    await server.start()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", verify=False, timeout=60
    ) as http:
        assert (
            await http.post("/v1/completions", json={"prompt": "quick", "max_tokens": 5, "ignore_eos": True})
        ).status_code == 200
    await server.stop(grace_s=0)
    [timed] = dispatcher.requests
    log.note(timed, Ended("length", num_output_tokens=5))
    log.close()
    times = json.loads(log.path.read_text().splitlines()[1])["token_times_s"]
    assert len(times) == 5
    assert times == sorted(times)
    assert times[0] >= 0
    [read] = open_trace(log.path)
    assert read.num_output_tokens == 5
