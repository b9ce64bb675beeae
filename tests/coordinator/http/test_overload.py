"""The memory of all clients together is bounded: idle and slow ones give way, and health checks are always
answered."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial
from socket import SO_SNDBUF, SOL_SOCKET
from time import monotonic
from typing import Any

import httpx
import numpy as np
import pytest
from support import http_fakes
from support.http_fakes import FakeDispatcher
from websockets.asyncio import client
from websockets.exceptions import ConnectionClosed

from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.http.overload import RESERVED, Overload, OverloadLimits
from splitserve.coordinator.http.websocket_protocol import WebSocketProtocol
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
    b"application/json\r\ncontent-length: %d\r\n\r\n"
)
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
MOST = 32
HELD = 1 << 20
ENDED: Any = ("answer_bytes", "reading_ended")
Opened = tuple[asyncio.StreamReader, asyncio.StreamWriter]
connect = partial(
    client.connect, proxy=None, open_timeout=60, close_timeout=60, ping_timeout=60, max_size=None
)


@pytest.fixture
async def server(dispatcher: FakeDispatcher, model: ServedModel) -> AsyncIterator[HttpServer]:
    limits, overload = (
        HttpLimits(max_body_bytes=HELD // 2, receive_timeout_s=600),
        Overload(OverloadLimits(MOST, HELD)),
    )
    server = HttpServer(HttpApp(dispatcher, model, AppParts(limits, dispatcher.system, overload=overload)))
    await server.start()
    yield server
    await server.stop(grace_s=0)
    await soon(lambda: set(server.app.overload.used.values()) <= {0})


@pytest.fixture
async def opened(server: HttpServer) -> AsyncIterator[Callable[[bytes], Any]]:
    """Open connections that send this first."""
    writers: list[asyncio.StreamWriter] = []

    async def open_one(sentence: bytes) -> Opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writers.append(writer)
        writer.write(sentence)
        await writer.drain()
        return reader, writer

    yield open_one
    for writer in writers:
        writer.transport.abort()


async def soon(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def health(reader: asyncio.StreamReader) -> bool:
    return (await reader.readuntil(b"}}}")).startswith(b"HTTP/1.1 200")


async def test_the_connection_idle_longest_gives_way_to_a_new_one(
    server: HttpServer, opened: Callable[[bytes], Any], caplog: pytest.LogCaptureFixture
) -> None:
    connections = [await opened(HEALTH) for _ in range(MOST)]
    assert all([await health(reader) for reader, _ in connections])
    connections[0][1].write(HEALTH)  # it is now the one that was idle for the shortest time
    assert await health(connections[0][0])
    for _ in range(2):
        reader, _ = await opened(HEALTH)
        assert await health(reader)
    for reader, _ in connections[1:3]:
        assert await reader.read() == b""
    connections[0][1].write(HEALTH)
    assert await health(connections[0][0])
    assert server.app.overload.actions["connections", "idle_closed"] == 2
    assert [record.levelno for record in caplog.records if "connections are open" in record.message] == [
        logging.WARNING
    ]  # once


async def test_a_client_that_sends_longest_gives_way_where_none_is_idle(
    server: HttpServer, opened: Callable[[bytes], Any]
) -> None:
    connections = [await opened(HEAD % 100 + b"x") for _ in range(MOST)]
    await soon(lambda: len(server.app.overload._sending) == MOST)
    reader, _ = await opened(HEALTH)
    assert await health(reader)
    ended = await connections[0][0].read()
    assert ended.startswith(b"HTTP/1.1 503")


async def test_health_is_answered_where_all_connections_are_at_work(
    server: HttpServer, opened: Callable[[bytes], Any], dispatcher: FakeDispatcher
) -> None:
    dispatcher.hold = True
    body = json.dumps({"prompt": "Hi"}).encode()
    for _ in range(MOST):
        await opened(HEAD % len(body) + body)
    await soon(lambda: len(dispatcher.running) == MOST)
    reader, _ = await opened(HEALTH)
    assert await health(reader)
    assert await reader.read() == b""  # closed behind it
    reader, _ = await opened(HEAD % len(body) + body)
    refused = await reader.read()
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"retry-after: 1" in refused
    assert len(dispatcher.running) == MOST


async def test_unfinished_bodies_are_bounded_in_sum(
    server: HttpServer, opened: Callable[[bytes], Any], http: httpx.AsyncClient
) -> None:
    """Those that have been sending longest are given up; a small request is answered all the same."""
    size = HELD // 2
    readers = [(await opened(HEAD % size + b" " * (size - 1)))[0] for _ in range(6)]
    used = server.app.overload.used
    for reader in readers[:4]:
        assert (await reader.readline()).startswith(b"HTTP/1.1 503")
    await soon(lambda: 0 < used["body_bytes"] <= HELD)
    assert (await http.post("/v1/completions", json={"prompt": "Hi"})).status_code == 200
    text = server.app.scrape.render(monotonic()).decode()
    assert 'splitserve_overload_limit{resource="body_bytes"} 1.048576e+06' in text
    assert 'splitserve_overload_actions_total{action="sending_ended",resource="body_bytes"}' in text
    assert server.app.overload.actions["body_bytes", "sending_ended"] >= 4


async def test_a_body_is_not_held_while_its_answer_is_streamed(
    server: HttpServer, opened: Callable[[bytes], Any]
) -> None:
    body = json.dumps(
        {"prompt": "Hi", "stream": True, "max_tokens": 1000, "ignore_eos": True, "x": "y" * 100_000}
    ).encode()
    reader, _ = await opened(HEAD % len(body) + body)
    await reader.readuntil(b"data: ")
    assert server.app.overload.used["body_bytes"] == 0


async def test_answers_that_are_not_read_are_bounded_in_sum(
    server: HttpServer, opened: Callable[[bytes], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of a hundred bytes has an answer of a megabyte; those that wait longest are given up."""
    monkeypatch.setattr(http_fakes, "hidden_state", lambda _: np.arange(1, 4097, dtype="<f4").tobytes())
    server._socket.setsockopt(SOL_SOCKET, SO_SNDBUF, 4096)
    body = json.dumps({"input": [[7]] * 20}).encode()
    head = HEAD.replace(b"/v1/completions", b"/v1/embeddings") % len(body)
    readers, overload = [], server.app.overload
    for number in range(1, 9):
        readers.append((await opened(head + body))[0])
        await soon(lambda done=number: len(overload._unread) + overload.actions[ENDED] == done)
    assert 0 < overload.used["answer_bytes"] <= overload.limits["answer_bytes"]
    assert overload.actions[ENDED] > 0
    assert len(await readers[0].read()) < HELD // 2, "it is cut off"
    head = await readers[-1].readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
    assert len(json.loads(await readers[-1].readexactly(length))["data"]) == 20
    await soon(lambda: len(overload._unread) + overload.actions[ENDED] == 7)


async def test_unfinished_messages_are_bounded_in_sum(server: HttpServer) -> None:
    sockets = [await connect(f"ws://127.0.0.1:{server.port}/v1/stream") for _ in range(5)]
    for socket in sockets:
        socket.transport.write(frame(HELD // 2 - 100)[:-1])
    await soon(lambda: server.app.overload.actions["websocket_bytes", "sending_ended"] >= 3)
    left = sum(len(c.conn.reader.buffer) for c in gc.get_objects() if issubclass(type(c), WebSocketProtocol))
    assert left <= HELD  # those that are ended hold nothing, even before the collector finds them
    for socket in sockets[:3]:
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1013
    assert server.app.overload.used["websocket_bytes"] <= HELD
    for socket in sockets:
        socket.transport.abort()


async def test_a_message_that_does_not_arrive_in_time_ends_its_connection(server: HttpServer) -> None:
    async with connect(f"ws://127.0.0.1:{server.port}/v1/stream") as socket:
        socket.transport.write(frame(100)[:-1])
        await soon(lambda: any(c._since is not None for c in websockets_of(server)))
        (incoming,) = websockets_of(server)
        assert incoming._since is not None
        incoming.hurry(incoming._since + 0.9, 1.0)
        incoming.hurry(incoming._since + 1.1, 1.0)
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        assert closed.value.rcvd is not None
        assert closed.value.rcvd.code == 1008


async def test_a_large_message_is_answered(server: HttpServer) -> None:
    async with connect(f"ws://127.0.0.1:{server.port}/v1/stream") as socket:
        body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "x": "é" * 100_000}
        await socket.send(json.dumps({"id": "a", "body": body}, ensure_ascii=False))
        received = [json.loads(await socket.recv())]
        while "done" not in received[-1]:
            received.append(json.loads(await socket.recv()))
        assert received[0]["event"]["object"] == "chat.completion.chunk"
        await socket.send(json.dumps({"id": "a", "body": 5, "x": "y" * 100_000}))
        refused = json.loads(await socket.recv())
        assert (refused["status"], refused["error"]["param"]) == (400, "body")


def test_connections_fit_into_the_files_that_a_process_may_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("splitserve.coordinator.http.overload._most_files", lambda: 200)
    assert Overload().limits["connections"] < 200 - RESERVED


def websockets_of(server: HttpServer) -> list[WebSocketProtocol]:
    return [c for c in server._server.server_state.connections if isinstance(c, WebSocketProtocol)]


def frame(size: int) -> bytes:
    """A masked text frame of blanks; its mask is zero."""
    return b"\x81\xff" + size.to_bytes(8) + bytes(4) + b" " * size


async def test_prompts_of_requests_that_wait_or_run_are_bounded_in_sum(
    server: HttpServer, dispatcher: FakeDispatcher
) -> None:
    overload = server.app.overload
    assert overload.limits["prompt_bytes"] == 4 * HELD
    overload.limits["prompt_bytes"] = 10_000
    dispatcher.hold = True
    body = {"prompt": [5] * 700, "max_tokens": 2, "n": 2}
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as http:
        first = asyncio.create_task(http.post("/v1/completions", json=body))
        await dispatcher.until(lambda: len(dispatcher.running) == 2)
        assert overload.used["prompt_bytes"] == 8 * 700, "once, however many choices it has"
        assert dispatcher.requests[0].prompt_token_ids is dispatcher.requests[1].prompt_token_ids
        refused = await http.post("/v1/completions", json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "overloaded")
        assert "--max-body-mib" in refused.json()["error"]["message"]
        assert overload.actions["prompt_bytes", "refused"] == 1
        dispatcher.hold = False
        assert (await first).status_code == 200
        await soon(lambda: overload.used["prompt_bytes"] == 0)
        assert (await http.post("/v1/completions", json=body)).status_code == 200
