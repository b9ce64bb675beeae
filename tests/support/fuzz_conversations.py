"""Inputs for the fuzzer of decoders that are conversations: several messages of one data connection."""

from __future__ import annotations

import threading

import numpy as np

from splitserve.transport.movers.lease_book import LeaseBook, ParcelHeader
from splitserve.transport.movers.tcp.inbound import Desk, Inbound
from splitserve.transport.movers.tcp.wire import (
    ANSWER_BYTES,
    GCM,
    HELLO_BYTES,
    NONCE_BYTES,
    OCB,
    PLAIN,
    SIZE,
    TAG_BYTES,
    Hello,
    Transcript,
    pack_header,
)

SECRET, GRANT = bytes(32), b"0123456789abcdef"
LAYER_BYTES = 512


def converse(data: bytes) -> bool:
    """One whole connection, from a peer that knows the secret if its first byte is even: after its proof it
    sends ``data``."""
    pool = np.zeros((8, 4, LAYER_BYTES), dtype=np.uint8)
    book, arrived = LeaseBook(4, LAYER_BYTES), list[tuple[int, int]]()
    book.open(9, GRANT, {0: 3, 1: 5})
    message = bytearray()
    inbound = Inbound(Desk(pool, book, threading.Lock(), SECRET, True, arrived.extend), message.extend)
    talk = inbound.talk()
    buffers = next(talk)
    member, mode, rest = (
        bool(data) and data[0] % 2 == 0,
        {0: PLAIN, 1: OCB}.get(data[1] if len(data) > 1 else 2, GCM),
        data[2:],
    )
    if member:
        hello = Hello(mode, bytes(NONCE_BYTES))
        buffers = _feed(talk, buffers, hello.pack())
        transcript = Transcript(SECRET, hello, bytes(message[:NONCE_BYTES]))
        assert len(message) == ANSWER_BYTES
        buffers = _feed(talk, buffers, transcript.client_proof)
        assert inbound.authenticated
        seal = transcript.seal()
        if seal is not None and len(rest) > SIZE.size:  # as a member that seals nonsense
            sealed = bytearray(len(rest) + TAG_BYTES)
            seal.close_into(rest, memoryview(sealed))
            rest = SIZE.pack(len(sealed)) + bytes(sealed)
    try:
        _feed(talk, buffers, rest)
    finally:
        inbound.end()
        written = {block for block in range(8) if pool[block].any()}
        assert written <= {3, 5}, "a block that nobody granted was written"
        assert member or not written, "a stranger wrote"
    return bool(arrived)


def _feed(talk: object, buffers: list[memoryview], data: bytes) -> list[memoryview]:
    """Fills buffer after buffer, as the server does; returns those still to be filled."""
    while data:
        while data and buffers:
            count = min(len(data), len(buffers[0]))
            buffers[0][:count] = data[:count]
            data = data[count:]
            buffers = [buffers[0][count:], *buffers[1:]] if count < len(buffers[0]) else buffers[1:]
        if not buffers:
            buffers = next(talk)  # type: ignore[call-overload]
    return buffers


def conversations(header: bytes) -> list[bytes]:
    parcel = SIZE.pack(len(header)) + header + bytes([7]) * (8 * LAYER_BYTES)
    single = pack_header(ParcelHeader(9, GRANT, LAYER_BYTES, LAYER_BYTES, (1,)))
    small = SIZE.pack(len(single)) + single + bytes([8]) * LAYER_BYTES
    hello = Hello(GCM, bytes(NONCE_BYTES)).pack()
    assert len(hello) == HELLO_BYTES
    return [
        b"\0\0" + parcel,
        b"\0\0" + small + parcel,
        b"\0\1" + header,
        b"\1\0" + hello + bytes(32) + parcel,
    ]
