"""Ends of the tcp mover's data connections, well-behaved ones and others."""

from __future__ import annotations

import socket
from contextlib import ExitStack, suppress

import pytest
from support.kv_pools import BLOCK_BYTES, DEADLINE_S, SECRET, empty_pool

from splitserve.transport.movers.interface import Pool
from splitserve.transport.movers.lease_book import ParcelHeader
from splitserve.transport.movers.tcp.source import TcpSource
from splitserve.transport.movers.tcp.target import TcpTarget
from splitserve.transport.movers.tcp.wire import (
    ANSWER_BYTES,
    GCM,
    NONCE_BYTES,
    OCB,
    PLAIN,
    RECORD_BYTES,
    SIZE,
    TAG_BYTES,
    DataAddress,
    Hello,
    Seal,
    Transcript,
    pack_header,
)

MODES = pytest.mark.parametrize("mode", [PLAIN, GCM, OCB], ids=["plain", "gcm", "ocb"])


def new_target(stack: ExitStack, takes_plain: bool = True) -> tuple[TcpTarget, Pool]:
    pool = empty_pool()
    target = TcpTarget("tcp://127.0.0.1:*", pool, takes_plain)
    stack.callback(target.close_all)
    return target, pool


def new_source(stack: ExitStack, target: TcpTarget, pool: Pool, mode: int = GCM) -> TcpSource:
    source = TcpSource(target.data_address("127.0.0.1"), pool, mode == PLAIN, mode or None)
    stack.callback(source.close)
    return source


class RawPeer:
    """A connection that sends any bytes, by default after a proper handshake."""

    def __init__(
        self, stack: ExitStack, target: TcpTarget, mode: int = PLAIN, secret: bytes | None = None
    ) -> None:
        address = DataAddress.parse(target.data_address("127.0.0.1"))
        self.stream = stack.enter_context(socket.create_connection((address.host, address.port), DEADLINE_S))
        hello = Hello(mode, bytes(NONCE_BYTES))
        self.stream.sendall(hello.pack())
        answer = receive(self.stream, ANSWER_BYTES)
        transcript = Transcript(secret or address.secret, hello, answer[:NONCE_BYTES])
        self.seal = transcript.seal()
        self.stream.sendall(transcript.client_proof)

    def send(self, header: bytes, body: bytes) -> None:
        with suppress(ConnectionError):  # the target may have hung up on us
            self.stream.sendall(frame(header, body, self.seal))

    def ended(self) -> bool:
        """Whether the target hangs up; with a deadline."""
        try:
            return self.stream.recv(1) == b""
        except ConnectionError:
            return True


def receive(stream: socket.socket, num_bytes: int) -> bytes:
    """Return ``count`` bytes, or fewer if the stream ends before."""
    data = b""
    while len(data) < num_bytes and (part := stream.recv(num_bytes - len(data))):
        data += part
    return data


def frame(header: bytes, body: bytes, seal: Seal | None) -> bytes:
    if seal is None:
        return SIZE.pack(len(header)) + header + body
    parts = [header, *(body[at : at + RECORD_BYTES] for at in range(0, len(body), RECORD_BYTES))]
    sealed = [bytearray(len(part) + TAG_BYTES) for part in parts]
    for part, into in zip(parts, sealed, strict=True):
        seal.close_into(part, memoryview(into))
    return SIZE.pack(len(sealed[0])) + b"".join(sealed)


def header(
    lease: int = 9,
    secret: bytes = SECRET,
    offset: int = 0,
    length: int = BLOCK_BYTES,
    positions: tuple[int, ...] = (0,),
) -> bytes:
    return pack_header(ParcelHeader(lease, secret, offset, length, positions))


def body(num_blocks: int = 1) -> bytes:
    return bytes([7]) * BLOCK_BYTES * num_blocks
