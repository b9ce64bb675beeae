"""Clients that go away, read slowly or stay while the server stops."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import threading
from collections.abc import Callable
from http.client import HTTPResponse
from typing import Any

import httpx
import pytest
import uvloop
from support.http_fakes import ANSWER, FakeDispatcher
from support.raw_requests import TEXT, connection, request_bytes, soon

from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.lifecycle.request import Ended, Request
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold", [False, True])
async def test_a_client_that_goes_away_is_noticed_at_once(
    server: HttpServer, dispatcher: FakeDispatcher, stream: bool, hold: bool
) -> None:
    """Before its first token and in mid-stream, with all of its choices."""
    dispatcher.hold, dispatcher.step_s = hold, 0.01
    async with connection(server.port) as (reader, writer):
        writer.write(request_bytes({**TEXT, "stream": stream, "n": 3, "ignore_eos": True}))
        await dispatcher.until(lambda: len(dispatcher.running) == 3)
        if stream and not hold:
            assert await reader.readuntil(b"data: ")
    await dispatcher.until(lambda: len(dispatcher.cancelled) == 3)
    await soon(lambda: server.app.metrics.num_open == 0)


async def test_after_200_aborted_requests_a_new_one_answers_at_once(
    server: HttpServer, dispatcher: FakeDispatcher, http: httpx.AsyncClient
) -> None:
    dispatcher.step_s = 0.1  # a hundred seconds for each
    for batch in range(4):
        async with asyncio.TaskGroup() as group:
            for number in range(50):
                group.create_task(abort_one(server.port, stream=bool((batch + number) % 2)))
    await soon(lambda: not dispatcher.running)
    dispatcher.step_s = 0
    response = await http.post("/v1/completions", json=TEXT)
    assert response.json()["choices"][0]["text"] == ANSWER


async def abort_one(port: int, *, stream: bool) -> None:
    async with connection(port) as (_, writer):
        writer.write(request_bytes({**TEXT, "stream": stream, "ignore_eos": True}))
        await writer.drain()
        await asyncio.sleep(0.02)


def slow_client(port: int) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    return client


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_slow_reader_gets_everything_in_order(
    run: Callable[[Any], None], model: ServedModel, dispatcher: FakeDispatcher
) -> None:
    """The socket fills up, ``send`` suspends, text is buffered; when the client reads on, nothing is lost or
    doubled."""

    async def scenario() -> None:
        server = HttpServer(HttpApp(dispatcher, model, AppParts(HttpLimits(max_buffered_bytes=64 << 20))))
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        await server.start()
        client = slow_client(server.port)
        client.sendall(
            request_bytes({**TEXT, "max_tokens": 1500, "n": 8, "stream": True, "ignore_eos": True})
        )
        await dispatcher.until(lambda: bool(dispatcher.requests))
        await dispatcher.until(lambda: not dispatcher.running)
        assert server.app.metrics.num_open == 1  # generated, not yet read
        received = await asyncio.to_thread(read_stream, client)
        texts = ["".join(c["text"] for c in received if c["index"] == index) for index in range(8)]
        expected = model.tokenizer.fast.decode((dispatcher.script(dispatcher.requests[0]) * 40)[:1500])
        assert all(text == expected for text in texts)
        client.close()
        await soon(lambda: server.app.metrics.num_open == 0)
        await server.stop(grace_s=0)

    run(scenario())


def read_stream(client: socket.socket) -> list[dict[str, Any]]:
    client.settimeout(60)
    response = HTTPResponse(client)
    response.begin()
    body = response.read()
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [
        json.loads(event.removeprefix("data: "))["choices"][0]
        for event in events[:-2]
        if not event.startswith(":")
    ]


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_reader_too_slow_for_its_bound_is_cut_off(
    run: Callable[[Any], None],
    model: ServedModel,
    dispatcher: FakeDispatcher,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario() -> None:
        server = HttpServer(HttpApp(dispatcher, model, AppParts(HttpLimits(max_buffered_bytes=100_000))))
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        await server.start()
        client = slow_client(server.port)
        client.sendall(
            request_bytes({**TEXT, "max_tokens": 2000, "n": 8, "stream": True, "ignore_eos": True})
        )
        await dispatcher.until(lambda: len(dispatcher.cancelled) == 8)
        await soon(lambda: server.app.metrics.num_open == 0)
        client.close()
        await server.stop(grace_s=0)

    with caplog.at_level(logging.WARNING):
        run(scenario())
    assert [record.getMessage() for record in caplog.records] == [
        "a client reads its stream too slowly and is cut off"
    ]


async def test_stopping_lets_streams_end(
    server: HttpServer, dispatcher: FakeDispatcher, http: httpx.AsyncClient
) -> None:
    dispatcher.step_s = 0.005
    stream = asyncio.create_task(http.post("/v1/completions", json={**TEXT, "stream": True}))
    await dispatcher.until(lambda: bool(dispatcher.running))
    stopping = asyncio.create_task(server.app.drain(60))
    await asyncio.sleep(0)
    refused = await http.post("/v1/completions", json=TEXT)
    assert refused.status_code == 503
    assert "shutting down" in refused.text
    await stopping
    assert (await stream).text.endswith("data: [DONE]\n\n")


async def test_stopping_answers_a_request_whose_body_is_still_read(
    model: ServedModel, dispatcher: FakeDispatcher
) -> None:
    server = HttpServer(HttpApp(dispatcher, model))
    await server.start()
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        long = {**TEXT, "prompt": "x " * 200_000}
        asked = asyncio.create_task(client.post("/v1/completions", json=long))
        async with asyncio.timeout(60):
            while not server.app.generation.preparing:
                await asyncio.sleep(0)
        await server.app.drain(60)
        assert not server.app.generation.preparing
        assert (await asked).status_code == 400, "it is too long for this model"
    await server.stop(0)


@pytest.mark.parametrize("key", [{}, {"idempotency-key": "k"}])
@pytest.mark.parametrize("stream", [False, True])
async def test_stopping_ends_what_does_not_end_by_itself_and_leaves_workers_what_has_a_key(
    model: ServedModel,
    dispatcher: FakeDispatcher,
    stream: bool,
    key: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    dispatcher.step_s = 0.01
    server = HttpServer(HttpApp(dispatcher, model))
    await server.start()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", verify=False, timeout=60
    ) as http:
        asking = asyncio.create_task(
            http.post("/v1/completions", json={**TEXT, "stream": stream, "ignore_eos": True}, headers=key)
        )
        await dispatcher.until(lambda: bool(dispatcher.running))
        await asyncio.sleep(0.1)
        await server.stop(grace_s=0)
        response = await asking
    assert response.status_code == (200 if stream else 503)
    assert "shutting down" in response.text
    assert len(dispatcher.cancelled) == (0 if key else 1)
    for request_id in list(dispatcher.running):
        dispatcher.cancel(request_id)
    assert caplog.records == []


def test_a_port_in_use_is_said_so(model: ServedModel, dispatcher: FakeDispatcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}"):
            HttpServer(HttpApp(dispatcher, model), port=port)


async def test_a_long_prompt_of_a_client_that_goes_away_is_not_submitted(
    server: HttpServer, dispatcher: FakeDispatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes while a thread tokenizes."""
    generation, begun, gone = server.app.generation, threading.Event(), threading.Event()
    prepare = generation._planners["tiny"].plan

    def prepare_late(*arguments: Any) -> Any:
        begun.set()
        assert gone.wait(60)
        return prepare(*arguments)

    monkeypatch.setattr(generation._planners["tiny"], "plan", prepare_late)
    async with connection(server.port) as (_, writer):
        writer.write(request_bytes({**TEXT, "prompt": "the quick brown fox " * 100}))
        await soon(begun.is_set)
        assert server.app.metrics.num_open == 1
    await soon(lambda: server.app.metrics.num_open == 0)
    gone.set()
    await soon(lambda: not generation.preparing)
    assert server.app.metrics.counts.requests == {("/v1/completions", "cancelled", ""): 1}
    assert dispatcher.requests == []


async def test_dispatchers_that_answer_before_submit_returns(model: ServedModel) -> None:
    """A fake worker that answers at once: everything happens within ``submit``."""

    class Immediate(FakeDispatcher):
        def submit(self, request: Request) -> None:
            for token in self.script(request):
                request.sink.push(token, None)
            request.sink.flush()
            request.sink.end(Ended(finish_reason="stop"))

    ids = model.tokenizer.fast.encode(ANSWER, add_special_tokens=False).ids
    server = HttpServer(HttpApp(Immediate(lambda request: ids), model))
    await server.start()
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{server.port}", verify=False, timeout=60
    ) as http:
        for stream in (False, True):
            response = await http.post("/v1/completions", json={**TEXT, "n": 2, "stream": stream})
            assert response.status_code == 200
            assert response.text.count('finish_reason":"stop"') == 2
    await server.stop()
