"""Several requests on one connection, and bodies in unusual forms."""

from __future__ import annotations

import asyncio
import gzip
import json
import re

import httpx
import pytest
from support.http_fakes import FakeDispatcher
from support.raw_requests import TEXT, connection, request_bytes, soon

from splitserve.coordinator.server import HttpServer


async def test_pipelined_and_keep_alive_requests(server: HttpServer, dispatcher: FakeDispatcher) -> None:
    async with connection(server.port) as (reader, writer):
        writer.write(
            request_bytes({**TEXT, "max_tokens": 3})
            + request_bytes({**TEXT, "max_tokens": 2, "stream": True})
        )
        async with asyncio.timeout(60):
            data = await reader.readuntil(b"[DONE]")
    assert data.count(b"HTTP/1.1 200 OK") == 2


async def test_hundreds_of_pipelined_requests_are_answered_in_order(server: HttpServer) -> None:
    """Refused ones, which are answered at once; and ordinary ones between them."""
    bad, good = (
        request_bytes({"model": "another", "prompt": "Hi"}),
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n",
    )
    async with connection(server.port) as (reader, writer):
        writer.write((bad + good) * 1000)
        seen = [await read_response(reader) for _ in range(2000)]
    assert [status for status, _ in seen] == [404, 200] * 1000


async def test_a_client_that_leaves_pipelined_requests_behind_is_forgotten(
    server: HttpServer, dispatcher: FakeDispatcher
) -> None:
    dispatcher.hold = True
    async with connection(server.port) as (_, writer):
        writer.write(request_bytes(TEXT) * 3)
        await dispatcher.until(lambda: len(dispatcher.running) == 1)
    await dispatcher.until(lambda: len(dispatcher.cancelled) == 1)
    await soon(lambda: server.app.metrics.num_open == 0)
    assert len(dispatcher.requests) == 1


async def test_a_body_may_come_in_pieces_after_100_continue(server: HttpServer) -> None:
    head, _, body = request_bytes({**TEXT, "max_tokens": 1}).partition(b"\r\n\r\n")
    async with connection(server.port) as (reader, writer):
        writer.write(head + b"\r\nexpect: 100-continue\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        for i in range(len(body)):
            writer.write(body[i : i + 1])
            await writer.drain()
        status, answer = await read_response(reader)
    assert (status, json.loads(answer)["usage"]["completion_tokens"]) == (200, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_old_client_gets_a_body_that_ends_with_its_connection(
    server: HttpServer, stream: bool
) -> None:
    async with connection(server.port) as (reader, writer):
        writer.write(request_bytes({**TEXT, "stream": stream}).replace(b"HTTP/1.1", b"HTTP/1.0"))
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    assert b"connection: close" in head
    assert b"chunked" not in head
    assert body.endswith(b"data: [DONE]\n\n" if stream else b"}")


async def test_a_compressed_body_is_refused_in_words(http: httpx.AsyncClient) -> None:
    for path in ("/v1/completions", "/tokenize"):
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        response = await http.post(path, content=gzip.compress(json.dumps(TEXT).encode()), headers=headers)
        assert response.status_code == 415
        assert "send the body as it is" in response.json()["error"]["message"]


async def read_response(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        assert length is not None
        return int(head.split()[1]), await reader.readexactly(int(length[1]))
