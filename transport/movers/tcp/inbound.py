"""One data connection, receiving end: a generator that yields the memory for the next bytes.

It knows no socket: ``talk`` yields lists of buffers and is resumed once all of them are full. So the same
code runs under the server's selector and under the fuzzer. A body is received straight into the pool where it
travels plain, and is opened into it where it travels sealed. For a pool on GPUs each record of a body is
received into host memory and copied to the first GPU, and the body goes to its blocks as a whole.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from torch import Tensor

from ..block_memory import BlockPool, Staging, memory_of
from ..interface import Arrival, Span
from ..lease_book import Claim, LeaseBook, blocks_per_parcel
from .wire import (
    HELLO_BYTES,
    PLAIN,
    PROOF_BYTES,
    RECORD_BYTES,
    SIZE,
    TAG_BYTES,
    Hello,
    Seal,
    Transcript,
    header_bytes,
    new_nonce,
    records,
    spans,
    unpack_header,
)

Talk: TypeAlias = Generator[list[memoryview], None, None]


class BadPeer(Exception):
    """The bytes are not from a peer of ours, or not in its format: the connection ends. The text names the
    reason."""


@dataclass(frozen=True)
class Desk:
    """State that all connections of a target share. ``lock`` guards ``book`` and the pool's leased blocks."""

    pool: BlockPool
    book: LeaseBook
    lock: AbstractContextManager[object]
    secret: bytes
    takes_plain: bool
    arrived: Callable[[list[Arrival]], None]
    staging: Staging | None = None  # where the pool lies on a GPU; used with the lock held


class Inbound:
    """``send`` sends a few bytes without waiting. Call ``end`` after the last use."""

    def __init__(self, desk: Desk, send: Callable[[bytes], None]) -> None:
        self._desk, self._send = desk, send
        _, num_layers, layer_bytes = desk.pool.shape
        self._block_bytes = num_layers * layer_bytes
        self._max_positions = blocks_per_parcel(layer_bytes)
        self._bytes = desk.pool.reshape(-1).data if isinstance(desk.pool, np.ndarray) else memoryview(b"")
        self._packed: Tensor  # the body under way, for a pool on GPUs
        self._scratch = self._opened = memoryview(b"")
        self._seal: Seal | None = None
        self.authenticated = False
        self._claim: Claim | None = None

    def talk(self) -> Talk:
        """Raises BadPeer. Never returns."""
        yield from self._meet()
        while True:
            yield from self._take_parcel()

    def safe(self, buffers: deque[memoryview]) -> deque[memoryview]:
        """Return ``buffers``, or others of that size if their lease has ended. Call it with the lock held,
        right before bytes are written."""
        receives_into_pool = self._seal is None and self._desk.staging is None
        if not receives_into_pool or self._claim is None or self._claim.valid:
            return buffers
        self._claim, num_bytes = None, sum(len(buffer) for buffer in buffers)
        return deque(
            self._scratch[: min(RECORD_BYTES, num_bytes - at)] for at in range(0, num_bytes, RECORD_BYTES)
        )

    def end(self) -> None:
        """The connection is gone: a parcel that was under way may come over another."""
        if self._claim is not None:
            with self._desk.lock:
                self._desk.book.give_back(self._claim)
            self._claim = None

    def _meet(self) -> Talk:
        data = bytearray(HELLO_BYTES)
        yield [memoryview(data)]
        hello = Hello.unpack(bytes(data))
        if hello is None or (hello.mode == PLAIN and not self._desk.takes_plain):
            raise BadPeer("malformed" if hello is None else "plain")
        transcript = Transcript(self._desk.secret, hello, new_nonce())
        self._send(transcript.server_nonce + transcript.server_proof)
        proof = bytearray(PROOF_BYTES)
        yield [memoryview(proof)]
        if not hmac.compare_digest(bytes(proof), transcript.client_proof):
            raise BadPeer("stranger")
        self._seal, self.authenticated = transcript.seal(), True
        self._scratch = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
        self._opened = memoryview(bytearray(RECORD_BYTES))  # a record on its way to several places

    def _take_parcel(self) -> Talk:
        header = unpack_header((yield from self._header()), self._max_positions)
        if (
            header is None
            or not 0 < header.length <= self._block_bytes
            or len(header.positions) > blocks_per_parcel(header.length)
        ):
            raise BadPeer("malformed")
        with self._desk.lock:
            claim = self._desk.book.claim(header)
        if claim is None:
            yield from self._discard(len(header.positions) * header.length)
            return
        self._claim = claim
        pool, staging = self._desk.pool, self._desk.staging
        if staging is not None:
            runs = [(0, len(header.positions) * header.length)]
            self._packed = staging.empty(runs[0][1])
        else:
            runs = spans(pool.shape, claim.blocks, header.offset, header.length)
        if self._seal is None and staging is None:
            yield [self._bytes[start:end] for start, end in runs]
        else:
            yield from self._take_records(runs, claim)
        self._claim = None
        with self._desk.lock:
            if staging is not None and claim.valid:
                first, end = header.offset, header.offset + header.length
                layers = slice(first // pool.shape[2], end // pool.shape[2])
                memory_of(pool).unpack(self._packed, claim.blocks, layers)
            self._desk.arrived(self._desk.book.complete(claim))
        if staging is not None:
            del self._packed

    def _header(self) -> Generator[list[memoryview], None, memoryview]:
        size = bytearray(SIZE.size)
        yield [memoryview(size)]
        tag = TAG_BYTES if self._seal is not None else 0
        (num_bytes,) = SIZE.unpack(size)
        if not header_bytes(1) <= num_bytes - tag <= header_bytes(self._max_positions):
            raise BadPeer("malformed")
        data = memoryview(bytearray(num_bytes))
        yield [data]
        if self._seal is None:
            return data
        opened = memoryview(bytearray(num_bytes - tag))
        if not self._seal.open_into(data, opened):
            raise BadPeer("forged")
        return opened

    def _take_records(self, runs: Sequence[Span], claim: Claim) -> Talk:
        tag = TAG_BYTES if self._seal is not None else 0
        for record in records(runs):
            received = self._scratch[: sum(end - start for start, end in record) + tag]
            yield [received]
            with self._desk.lock:
                if claim.valid:
                    self._store(received, record)
                elif self._seal is not None:
                    self._seal.skip()

    def _store(self, received: memoryview, record: list[Span]) -> None:
        size, staging = sum(end - start for start, end in record), self._desk.staging
        if staging is not None:
            piece = staging.buffer[:size]
        elif len(record) == 1:
            piece = self._bytes[record[0][0] : record[0][1]]
        else:
            piece = self._opened[:size]
        if self._seal is None:
            piece[:] = received
        elif not self._seal.open_into(received, piece):
            raise BadPeer("forged")
        if staging is not None:
            staging.write(self._packed, record[0])
        elif len(record) > 1:
            at = 0
            for start, end in record:
                self._bytes[start:end] = piece[at : at + end - start]
                at += end - start

    def _discard(self, num_bytes: int) -> Talk:
        while num_bytes > 0:
            size = min(num_bytes, RECORD_BYTES)
            num_bytes -= size
            if self._seal is not None:
                self._seal.skip()
                size += TAG_BYTES
            yield [self._scratch[:size]]
