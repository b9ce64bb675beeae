"""The end of one request and the begin of the next: a proxy and this server must never see it differently."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.server import HttpServer

BODY = json.dumps({"model": "tiny", "prompt": "Hi", "max_tokens": 2, "temperature": 0}).encode()
HOST, KIND = b"host: localhost\r\n", b"content-type: application/json\r\n"
H2C = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAAP__\r\n"
WEBSOCKET = b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
SMUGGLED = b"GET /version HTTP/1.1\r\n" + HOST + b"\r\n"
NEXT = b"GET /health HTTP/1.1\r\n" + HOST + b"connection: close\r\n\r\n"


def post(path: str = "/v1/completions", more: bytes = b"", body: bytes = BODY) -> tuple[bytes, bytes]:
    """Head and body."""
    head = (
        f"POST {path} HTTP/1.1\r\n".encode() + HOST + KIND + more + b"content-length: %d\r\n\r\n" % len(body)
    )
    return head, body


def chunked(
    body: bytes, *, more: bytes = b"", extension: bytes = b"", trailer: bytes = b""
) -> tuple[bytes, bytes]:
    head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + KIND + more + b"transfer-encoding: chunked\r\n\r\n"
    return head, b"%x%b\r\n%b\r\n0\r\n%b\r\n" % (len(body), extension, body, trailer)


async def answers(port: int, *segments: bytes) -> list[tuple[int, Any]]:
    """Status and body of each answer until the server closes; each segment is sent once the one before is
    with the server."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for segment in segments:
            writer.write(segment)
            await writer.drain()
            await asyncio.sleep(0.02)  # so that they are read apart; nothing depends on it
        async with asyncio.timeout(60):
            data = await reader.read()
    finally:
        writer.transport.abort()
    found = []
    while data:
        head, _, data = data.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head)
        size = int(length[1]) if length else 0
        found.append((int(head.split()[1]), json.loads(data[:size]) if size else None))
        data = data[size:]
    return found


def statuses(found: list[tuple[int, Any]]) -> list[int]:
    return [status for status, _ in found]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
@pytest.mark.parametrize(
    "upgrade",
    [
        H2C,
        b"connection: upgrade\r\nupgrade: websocket\r\n",
        b"upgrade: foo\r\nConnection: keep-alive, Upgrade\r\n",
    ],
)
@pytest.mark.parametrize("apart", [False, True])
async def test_an_upgrade_is_ignored_and_the_body_read(
    server: HttpServer, path: str, upgrade: bytes, apart: bool
) -> None:
    head, body = post(path, upgrade)
    for segments in (
        [head, body, NEXT] if apart else [head + body + NEXT],
        [head[:40], head[40:] + body[:5], body[5:] + NEXT],
    ):
        found = await answers(server.port, *segments)
        assert statuses(found) == [200, 200], found
        assert found[1][1]["status"] == "ok"


async def test_a_chunked_body_is_read_after_an_upgrade(server: HttpServer) -> None:
    head, body = chunked(BODY, more=H2C)
    assert statuses(await answers(server.port, head, body + NEXT)) == [200, 200]
    assert statuses(await answers(server.port, head + body + NEXT)) == [200, 200]


@pytest.mark.parametrize("method", [b"POST", b"GET", b"PUT"])
@pytest.mark.parametrize("path", [b"/v1/completions", b"/health", b"/v1/stream", b"/nothing"])
async def test_a_body_behind_an_upgrade_is_no_request(server: HttpServer, method: bytes, path: bytes) -> None:
    """In a segment of its own, too: there it was answered as a second request."""
    for upgrade in (b"foo", b"websocket", b"h2c"):
        more = b"connection: Upgrade\r\nupgrade: %b\r\n" % upgrade + WEBSOCKET
        head = (
            b"%b %b HTTP/1.1\r\n" % (method, path)
            + HOST
            + more
            + b"content-length: %d\r\n\r\n" % len(SMUGGLED)
        )
        found = await answers(server.port, head, SMUGGLED, NEXT)
        assert len(found) == 2, found
        assert "version" not in str(found)
        assert (found[1][0], found[1][1]["status"]) == (200, "ok")


async def test_many_pipelined_upgrades(server: HttpServer) -> None:
    """In one read; the connection goes on behind them."""
    one = b"GET /health HTTP/1.1\r\n" + HOST + H2C + b"\r\n"
    assert statuses(await answers(server.port, one * 300 + NEXT)) == [200] * 301


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"content-length: 5\r\ncontent-length: 6\r\n", id="two lengths"),
        pytest.param(b"content-length: 5\r\ncontent-length: 5\r\n", id="one length twice"),
        pytest.param(b"content-length: 5, 5\r\n", id="a list of lengths"),
        pytest.param(b"content-length: +5\r\n", id="a signed length"),
        pytest.param(b"content-length: 0x5\r\n", id="a hexadecimal length"),
        pytest.param(b"content-length: 5\r\ntransfer-encoding: chunked\r\n", id="length and chunks"),
        pytest.param(b"transfer-encoding: chunked\r\ncontent-length: 5\r\n", id="chunks and length"),
        pytest.param(b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n", id="two encodings"),
        pytest.param(b"transfer-encoding: chunked, identity\r\n", id="chunks not last"),
        pytest.param(b"transfer-encoding: xchunked\r\n", id="another encoding"),
        pytest.param(b"transfer-encoding : chunked\r\n", id="a space before the colon"),
        pytest.param(b"transfer-encoding:\x0bchunked\r\n", id="a vertical tab"),
        pytest.param(b"x: y\r\n transfer-encoding: chunked\r\n", id="a folded line"),
        pytest.param(b"content-length: \r\n 5\r\n", id="a folded length"),
        pytest.param(b"x: y\ncontent-length: 5\r\n", id="a bare line feed"),
        pytest.param(b"x: y\rcontent-length: 5\r\n", id="a bare carriage return"),
        pytest.param(b"x\x00: y\r\n", id="a zero byte"),
        pytest.param(b"host: other\r\n", id="two hosts"),
        pytest.param(b"authorization: a\r\nauthorization: b\r\n", id="two keys"),
        pytest.param(b"content-type: text/plain\r\n", id="two content types"),
        pytest.param(b"origin: http://a\r\norigin: http://localhost\r\n", id="two origins"),
    ],
)
@pytest.mark.parametrize("upgrade", [b"", H2C])
async def test_ambiguous_heads_are_refused_and_the_connection_closed(
    server: HttpServer, head: bytes, upgrade: bytes
) -> None:
    request = (
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + KIND + head + upgrade + b"\r\n0\r\n\r\n" + SMUGGLED
    )
    found = await answers(server.port, request)
    assert statuses(found) == [400], found
    assert found[0][1]["error"]["type"] == "invalid_request_error"


async def test_a_request_has_one_host(server: HttpServer) -> None:
    found = await answers(server.port, b"GET /health HTTP/1.1\r\n\r\n" + SMUGGLED)
    assert statuses(found) == [400]
    assert "Host" in found[0][1]["error"]["message"]
    found = await answers(server.port, b"GET /health HTTP/1.1\r\n" + HOST + HOST + b"\r\n" + SMUGGLED)
    assert "only one Host" in found[0][1]["error"]["message"]
    assert statuses(await answers(server.port, b"GET /health HTTP/1.0\r\n\r\n")) == [
        200
    ]  # balancers probe like this


async def test_connect_is_refused_in_words(server: HttpServer) -> None:
    found = await answers(server.port, b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + b"\r\n" + SMUGGLED)
    assert statuses(found) == [400]
    assert "no proxy" in found[0][1]["error"]["message"]


async def test_chunk_extensions_are_bounded(server: HttpServer) -> None:
    head, body = chunked(BODY, extension=b";a=b")
    assert statuses(await answers(server.port, head + body + NEXT)) == [200, 200]
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(head + b"%x;" % len(BODY))
    with pytest.raises(ConnectionError):
        await asyncio.wait_for(send_for_ever(writer), 60)
    writer.transport.abort()


async def send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"x" * 65536)
        await writer.drain()


async def test_a_body_of_one_byte_chunks_is_read(server: HttpServer, dispatcher: FakeDispatcher) -> None:
    """No chunk extensions, however much framing."""
    body = BODY[:-1] + b" " * 200_000 + b"}"
    head, _ = chunked(b"")
    pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert statuses(await answers(server.port, head, pieces + NEXT)) == [200, 200]


async def test_trailers_are_not_believed(server: HttpServer) -> None:
    """They would come behind the checks of the headers."""
    head, body = chunked(BODY, trailer=b"host: other\r\nauthorization: Bearer x\r\n")
    assert statuses(await answers(server.port, head + body + NEXT)) == [200, 200]
    head = head.replace(b"/v1/completions", b"/tokenize")
    assert statuses(await answers(server.port, head, body + NEXT)) == [200, 200]


async def test_a_refused_websocket_ends_its_connection(server: HttpServer) -> None:
    """A proxy that takes it for open would send on what is no frame."""
    ask = b"GET /v1/stream HTTP/1.1\r\n" + HOST + b"connection: Upgrade\r\nupgrade: websocket\r\n"
    for wrong in (b"", WEBSOCKET.replace(b"13", b"777"), WEBSOCKET):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(ask + wrong + b"\r\n" + (SMUGGLED if wrong == WEBSOCKET else b""))
        async with asyncio.timeout(60):
            answer = await reader.read()
        writer.transport.abort()
        assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 426"))
        assert answer.count(b"HTTP/1.1") == 1
