"""Streams over a WebSocket: the same chunks as by server-sent events, several at a time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from functools import partial
from socket import SO_RCVBUF, SO_SNDBUF, SOL_SOCKET
from socket import socket as Socket
from typing import Any

import httpx
import pytest
from support.http_fakes import ANSWER, FakeDispatcher
from websockets.asyncio import client
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.typing import Origin, Subprotocol

from splitserve.coordinator.errors import Unauthorized
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.tenants.limits import Account
from splitserve.coordinator.tenants.tenancy import Tenancy
from splitserve.coordinator.text.served_model import ServedModel

BODY: Any = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
WRONG: list[str | bytes] = [
    b'{"id": "b", "body": {}}',
    "{",
    "5",
    '{"id": 5}',
    '{"id": ""}',
    '{"id": "b"}',
    '{"id": "b", "endpoint": "/x", "body": {}}',
    '{"id": "b", "endpoint": 5}',
]
connect = partial(client.connect, proxy=None, open_timeout=60, close_timeout=60, ping_timeout=60)


@pytest.fixture
async def socket(server: HttpServer) -> AsyncIterator[ClientConnection]:
    async with connect(f"ws://127.0.0.1:{server.port}/v1/stream") as socket:
        yield socket


async def send(socket: ClientConnection, **message: Any) -> None:
    await socket.send(json.dumps(message))


async def receive(socket: ClientConnection) -> Any:
    return json.loads(await socket.recv())


async def until_done(socket: ClientConnection, *ids: str) -> dict[str, list[Any]]:
    received: dict[str, list[Any]] = {id: [] for id in ids}
    left = set(ids)
    while left:
        message = await receive(socket)
        if "done" in message:
            left.remove(message["id"])
        else:
            received[message["id"]].append(message)
    return received


async def test_text_that_is_none_ends_the_connection_without_a_word_in_the_log(
    socket: ClientConnection, caplog: pytest.LogCaptureFixture
) -> None:
    await socket.send(b"\xff\xfe", text=True)
    with pytest.raises(ConnectionClosed) as closed:
        await receive(socket)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1007
    assert caplog.records == []


async def test_the_same_chunks_as_by_http(socket: ClientConnection, http: httpx.AsyncClient) -> None:
    body = {**BODY, "stream_options": {"include_usage": True}, "stream": True}
    await send(socket, id="a", body=body)
    events = [message["event"] for message in (await until_done(socket, "a"))["a"]]
    lines = (await http.post("/v1/chat/completions", json=body)).text.splitlines()
    by_http = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert [event["choices"] for event in events] == [event["choices"] for event in by_http]
    assert events[-1]["usage"]["completion_tokens"] == by_http[-1]["usage"]["completion_tokens"]
    assert (
        "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
        == ANSWER
    )


async def test_several_at_a_time_and_whole_answers(socket: ClientConnection) -> None:
    for id in "abc":
        await send(socket, id=id, body=BODY)
    await send(
        socket,
        id="whole",
        endpoint="/v1/completions",
        body={"prompt": "Hi", "stream": False, "max_tokens": 500, "temperature": 0},
    )
    received = await until_done(socket, *"abc", "whole")
    texts = {
        "".join(c["delta"].get("content") or "" for m in received[id] for c in m["event"]["choices"])
        for id in "abc"
    }
    assert texts == {ANSWER}
    assert [message["event"]["choices"][0]["text"] for message in received["whole"]] == [ANSWER]


async def test_what_is_wrong_is_said_and_the_connection_lives(socket: ClientConnection) -> None:
    await send(socket, id="a", body={**BODY, "temperature": "warm"})
    (message,) = (await until_done(socket, "a"))["a"]
    assert message["status"] == 400
    assert message["error"]["param"] == "temperature"
    for wrong in WRONG:
        await socket.send(wrong)
        assert (await receive(socket))["status"] == 400
    await send(socket, id="c", body=BODY)
    assert (await until_done(socket, "c"))["c"]


async def test_cancelled_and_gone(socket: ClientConnection, dispatcher: FakeDispatcher) -> None:
    dispatcher.hold = True
    for id in "ab":
        await send(socket, id=id, body=BODY)
    await send(socket, id="a", body=BODY)
    assert "is running" in (await receive(socket))["error"]["message"]
    await dispatcher.until(lambda: len(dispatcher.running) == 2)
    await send(socket, id="a", cancel=True)
    assert await receive(socket) == {"id": "a", "done": True}
    assert len(dispatcher.cancelled) == 1
    await socket.close()
    await dispatcher.until(lambda: len(dispatcher.cancelled) == 2)


async def test_a_server_that_stops_ends_each_request_before_the_connection(
    socket: ClientConnection, server: HttpServer, dispatcher: FakeDispatcher
) -> None:
    """It sent nothing but the Close."""
    await send(socket, id="a", body=BODY)
    await receive(socket)  # it has begun
    dispatcher.hold = True
    await send(socket, id="b", body={**BODY, "stream": False})
    while len(dispatcher.requests) < 2:
        await asyncio.sleep(0.01)
    await server.stop(grace_s=0)
    received = await until_done(socket, "a", "b")
    assert [messages[-1].get("status") for messages in received.values()] == [None, 503]
    assert received["a"][-1]["event"]["error"]["message"] == received["b"][-1]["error"]["message"]
    with pytest.raises(ConnectionClosed):
        await receive(socket)


@pytest.mark.timeout(60)
async def test_a_server_stops_while_a_client_that_does_not_read_closes(
    dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    """The stop broke off with InvalidState: other clients' answers had no end."""
    server = HttpServer(HttpApp(dispatcher, model, AppParts(system=dispatcher.system)))
    server._socket.setsockopt(SOL_SOCKET, SO_SNDBUF, 4096)
    await server.start()
    with Socket() as client:
        client.setsockopt(SOL_SOCKET, SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", server.port))
        head = "GET /v1/stream HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
        more = "sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        body = {**BODY, "n": 8, "max_tokens": 200, "ignore_eos": True}
        text, unmasked = json.dumps({"id": "a", "body": body}).encode(), bytes(4)
        client.sendall((head + more).encode())
        assert (await asyncio.to_thread(client.recv, 12)).endswith(b"101")
        client.sendall(b"\x81" + bytes([0x80 | 126, *len(text).to_bytes(2)]) + unmasked + text)
        await dispatcher.until(lambda: bool(dispatcher.requests) and not dispatcher.running)
        client.sendall(b"\x88\x80" + unmasked)
        (connection,) = server._server.server_state.connections
        async with asyncio.timeout(60):
            while not connection.transport.is_closing():
                await asyncio.sleep(0.01)
        stopping = asyncio.create_task(server.stop(grace_s=0))
        await asyncio.sleep(0.05)
    await stopping


@pytest.mark.timeout(60)
@pytest.mark.parametrize("reads", [True, False])
async def test_what_waits_is_bounded_but_no_single_message(
    dispatcher: FakeDispatcher, model: ServedModel, reads: bool
) -> None:
    """A whole answer above the bound closed the connection, however fast its client read."""
    limits = HttpLimits(max_buffered_bytes=4096)
    server = HttpServer(HttpApp(dispatcher, model, AppParts(system=dispatcher.system, limits=limits)))
    server._socket.setsockopt(SOL_SOCKET, SO_SNDBUF, 4096)
    await server.start()
    body = {**BODY, "n": 8, "max_tokens": 200, "ignore_eos": True, "stream": not reads}
    with Socket() as sock:
        sock.setsockopt(SOL_SOCKET, SO_RCVBUF, 2048)
        sock.connect(("127.0.0.1", server.port))
        async with connect(f"ws://127.0.0.1:{server.port}/v1/stream", sock=sock, max_queue=1) as socket:
            await send(socket, id="a", body=body)
            if reads:
                (message,) = (await until_done(socket, "a"))["a"]
                assert len(json.dumps(message)) > limits.max_buffered_bytes
            else:
                await dispatcher.until(lambda: bool(dispatcher.requests) and not dispatcher.running)
                with pytest.raises(ConnectionClosed, match="too slow a reader"):
                    await until_done(socket, "a")
    await server.stop()


async def test_other_paths_are_no_websockets(server: HttpServer) -> None:
    for path, status in (("/v1/chat/completions", 405), ("/v1/models", 200), ("/nowhere", 404)):
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"ws://127.0.0.1:{server.port}{path}")
        assert refused.value.response.status_code == status


async def test_pages_of_other_sites_are_kept_out(server: HttpServer) -> None:
    host = f"127.0.0.1:{server.port}"
    async with connect(f"ws://{host}/v1/stream", origin=Origin(f"http://{host}")) as socket:
        await send(socket, id="a", body=BODY)
        await until_done(socket, "a")
    with pytest.raises(InvalidStatus) as refused:
        await connect(f"ws://{host}/v1/stream", origin=Origin("http://elsewhere.example"))
    assert refused.value.response.status_code == 403


class OneKey:
    """A ``Directory`` with one tenant."""

    revoked = False

    def account(self, authorization: bytes) -> Account:
        if authorization != b"Bearer secret":
            raise Unauthorized("no")
        return Account(tenant="t", tenant_id=1, key_id=1)

    def account_of_key(self, key_id: int) -> Account | None:
        assert key_id == 1
        return None if self.revoked else self.account(b"Bearer secret")

    def close(self) -> None: ...


async def test_a_browser_gives_its_key_as_a_subprotocol(
    dispatcher: FakeDispatcher, model: ServedModel
) -> None:
    directory = OneKey()
    server = HttpServer(
        HttpApp(dispatcher, model, AppParts(system=dispatcher.system, tenancy=Tenancy(directory)))
    )
    await server.start()
    url = f"ws://127.0.0.1:{server.port}/v1/stream"
    protocols = [Subprotocol("splitserve"), Subprotocol("openai-insecure-api-key.secret")]
    async with connect(url, subprotocols=protocols, origin=Origin("http://elsewhere.example")) as socket:
        assert socket.subprotocol == "splitserve"
        await send(socket, id="a", body=BODY)
        await until_done(socket, "a")
        directory.revoked = True  # also for a connection that is open
        await send(socket, id="b", body=BODY)
        assert (await receive(socket))["status"] == 401
    assert [request.tenant for request in dispatcher.requests] == ["t"]
    for wrong in (None, [Subprotocol("openai-insecure-api-key.wrong")]):
        with pytest.raises(InvalidStatus) as refused:
            await connect(url, subprotocols=wrong)
        assert refused.value.response.status_code == 401
    await server.stop(grace_s=0)
