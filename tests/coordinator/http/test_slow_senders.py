"""Clients that begin a request and do not end it, or send what is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.http.protocol import HttpProtocol
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
    b"application/json\r\ncontent-length: %d\r\n\r\n"
)
BODY = json.dumps({"prompt": "Hi", "max_tokens": 1000, "stream": True}).encode()


@pytest.fixture
def receive_timeout_s() -> float:
    """The server's limit, unless a test sets the time itself."""
    return 600.0


@pytest.fixture
async def server(
    dispatcher: FakeDispatcher, model: ServedModel, receive_timeout_s: float
) -> AsyncIterator[HttpServer]:
    server = HttpServer(
        HttpApp(
            dispatcher, model, AppParts(HttpLimits(receive_timeout_s=receive_timeout_s), dispatcher.system)
        )
    )
    await server.start()
    yield server
    await server.stop(grace_s=0)
    assert (server.app.metrics.num_open, dispatcher.running) == (0, {})


@asynccontextmanager
async def connection(server: HttpServer) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(60):
            yield reader, writer
    finally:
        writer.transport.abort()


async def answer_to(server: HttpServer, *pieces: bytes) -> bytes:
    """Return all bytes that the server sends until it closes the connection."""
    async with connection(server) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        return await reader.read()


@pytest.mark.parametrize("receive_timeout_s", [0.2])
async def test_who_sends_nothing_is_refused_in_time(server: HttpServer) -> None:
    assert refused(await answer_to(server))


@pytest.mark.parametrize(
    "sent",
    [
        b"\r\n\r\n",
        b"POST /v1/comp",
        (HEAD % 100)[:-4],
        HEAD % 100 + b'{"prompt"',
        (
            b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
            b"application/json\r\ntransfer-encoding: chunked\r\n\r\n5\r\nab"
        ),
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /he",
    ],
)
async def test_who_does_not_end_a_request_is_refused_in_time(
    server: HttpServer, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock of the test, which goes on once all that is sent has come: what comes after the refusal
    resets the connection."""
    received, num_bytes = HttpProtocol.data_received, 0

    def counted(self: HttpProtocol, data: bytes) -> None:
        nonlocal num_bytes
        num_bytes += len(data)
        received(self, data)

    monkeypatch.setattr(HttpProtocol, "data_received", counted)
    async with connection(server) as (reader, writer):
        writer.write(sent)
        (incoming,) = await connections(server, lambda c: num_bytes == len(sent))
        now = asyncio.get_running_loop().time()
        while not incoming.transport.is_closing():
            now += 0.3
            incoming.hurry(now, 0.2)
            await asyncio.sleep(0)
        assert refused(await reader.read())


def refused(answer: bytes) -> bool:
    """Return whether it ends with the refusal of a slow sender."""
    head, _, body = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 408")
    assert b"connection: close" in head
    return bool(json.loads(body)["error"]["code"] == "request_timeout")


async def test_a_large_body_has_longer(server: HttpServer) -> None:
    async with connection(server) as (reader, writer):
        writer.write(HEAD % (1 << 20) + b" " * (16 << 10))  # worth a second
        (incoming,) = await connections(server, lambda c: c._num_body_bytes == 16 << 10)
        begun = incoming._since
        assert begun is not None
        incoming.hurry(begun + 1.1, 0.2)
        assert not incoming.transport.is_closing()
        incoming.hurry(begun + 1.3, 0.2)
        assert (await reader.readline()).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize(
    "rubbish",
    [
        b"\x00\x01\r\n\r\n",
        b"GET /health HTTP/9.9\r\n\r\n",
        b"POST /tokenize HTTP/1.1\r\ncontent-length: x\r\n\r\n",
    ],
)
async def test_what_is_no_request_gets_an_error_in_openai_shape(server: HttpServer, rubbish: bytes) -> None:
    head, _, body = (await answer_to(server, rubbish)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


async def test_a_broken_body_is_refused_and_counted(server: HttpServer) -> None:
    answer = await answer_to(
        server, HEAD.replace(b"content-length: %d", b"transfer-encoding: chunked"), b"zz\r\n"
    )
    assert answer.count(b"HTTP/1.1 400") == 1
    assert server.app.metrics.counts.requests == {("/v1/completions", "400", ""): 1}


async def test_rubbish_behind_a_request_does_not_get_into_its_answer(
    server: HttpServer, dispatcher: FakeDispatcher
) -> None:
    """The client speaks no HTTP any more: its connection ends, and what it asked for is cancelled."""
    dispatcher.step_s = 0.01
    async with connection(server) as (reader, writer):
        writer.write(HEAD % len(BODY) + BODY)
        answer = await reader.readuntil(b"data: ")
        writer.write(b"\x00rubbish\r\n\r\n")
        answer += await reader.read()
        await dispatcher.until(lambda: not dispatcher.running)
    assert answer.count(b"HTTP/1.1") == 1


async def test_an_answer_that_takes_long_is_no_slow_sender(
    server: HttpServer, dispatcher: FakeDispatcher
) -> None:
    """Neither is a client that has begun its next request meanwhile: that counts from when it can be read."""
    dispatcher.hold = True
    async with connection(server) as (reader, writer):
        writer.write(HEAD % len(BODY) + BODY + b"GET /hea")
        await dispatcher.until(lambda: bool(dispatcher.requests))
        (incoming,) = await connections(server)
        incoming.hurry(asyncio.get_running_loop().time() + 100, 0.2)
        assert not incoming.transport.is_closing()
        dispatcher.hold = False
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        await reader.readuntil(b"[DONE]")
        incoming.hurry(asyncio.get_running_loop().time() + 200, 0.2)
        assert b"HTTP/1.1 408" in await reader.read()


async def connections(
    server: HttpServer, like: Callable[[HttpProtocol], bool] = lambda c: True
) -> list[HttpProtocol]:
    """Those of the server, as soon as there is one like this."""
    async with asyncio.timeout(60):
        while True:
            found = [
                c for c in server._server.server_state.connections if isinstance(c, HttpProtocol) and like(c)
            ]
            if found:
                return found
            await asyncio.sleep(0.005)
