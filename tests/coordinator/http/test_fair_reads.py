"""No connection keeps the event loop by sending much."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest
import uvloop
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.http.fair_reads import TURN_BYTES
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.http.protocol import HttpProtocol
from splitserve.coordinator.http.websocket_protocol import WebSocketProtocol
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel

BODY_BYTES = 8 << 20
UVLOOP_BYTES = 256_000
"""Its read buffer."""
HTTP = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: "
    b"application/json\r\ncontent-length: %d\r\n\r\n"
) % BODY_BYTES
UPGRADE = (
    b"GET /v1/stream HTTP/1.1\r\nhost: localhost\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
FRAME = b"\x81\xff" + BODY_BYTES.to_bytes(8) + bytes(4)


@pytest.mark.parametrize("kind", [HttpProtocol, WebSocketProtocol])
def test_what_a_turn_of_the_loop_reads_of_a_connection_is_bounded(
    kind: type[HttpProtocol | WebSocketProtocol],
    dispatcher: FakeDispatcher,
    model: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the loop of the coordinator, once as much waits in the kernel as it holds."""
    reads = Reads(kind.data_received)
    monkeypatch.setattr(kind, "data_received", lambda protocol, data: reads.note(protocol, data))
    server = HttpServer(HttpApp(dispatcher, model, AppParts(HttpLimits())))

    async def run() -> None:
        await server.start()
        with socket.create_connection(("127.0.0.1", server.port)) as client:
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            if kind is WebSocketProtocol:
                await loop.sock_sendall(client, UPGRADE)
                assert b" 101 " in await loop.sock_recv(client, 4096)
            reads.count_turns()
            await loop.sock_sendall(client, HTTP if kind is HttpProtocol else FRAME)
            unsent = memoryview(bytes(BODY_BYTES))
            async with asyncio.timeout(60):
                while reads.num_bytes < BODY_BYTES:
                    with contextlib.suppress(BlockingIOError):
                        while unsent:  # no turn of the loop before the kernel takes no more
                            unsent = unsent[client.send(unsent) :]
                    await asyncio.sleep(0)
        await server.stop(grace_s=0)

    uvloop.run(run())
    assert reads.most_in_a_turn <= TURN_BYTES + UVLOOP_BYTES


class Reads:
    """Counts bytes."""

    def __init__(self, received: Callable[..., None]) -> None:
        self.num_bytes = self.most_in_a_turn = self._in_this_turn = 0
        self._received = received

    def note(self, protocol: object, data: bytes) -> None:
        self.num_bytes += len(data)
        self._in_this_turn += len(data)
        self.most_in_a_turn = max(self.most_in_a_turn, self._in_this_turn)
        self._received(protocol, data)

    def count_turns(self) -> None:
        self._in_this_turn = 0
        asyncio.get_running_loop().call_soon(self.count_turns)
