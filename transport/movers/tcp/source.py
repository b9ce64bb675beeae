"""The ``tcp`` mover, sending side (see target.py): blocks leave in parcels, over up to MAX_CONNECTIONS
connections at a time.

Each connection has a thread that takes parcels from one queue, so that a further connection opens only when
those before it do not keep up. Bytes go from the pool to the kernel without a copy in between, or through the
cipher into one buffer. Those of a pool on GPUs are packed there and go through one page-locked record
(``Staging``).
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

import numpy as np

from ..block_memory import BlockPool, Staging
from ..lease_book import ParcelHeader
from ..parcel_source import Parcel, ParcelSource
from .wire import (
    ANSWER_BYTES,
    NONCE_BYTES,
    PLAIN,
    RECORD_BYTES,
    SIZE,
    TAG_BYTES,
    DataAddress,
    Hello,
    Seal,
    Transcript,
    new_nonce,
    pack_header,
    quickest_cipher,
    records,
    spans,
)

MAX_CONNECTIONS = 4
BACKLOG_BYTES = 16 << 20  # waiting for one connection: more than that opens another
CONNECT_TIMEOUT_S = 3.0
RETRY_S = 5.0  # a lost connection is tried again until then
RETRY_PAUSE_S = 0.05  # the first pause, doubled for each further one
STALL_S = 20.0  # a peer that takes nothing in for that time is gone
CLOSE_S = 0.2
MAX_BUFFERS = 512  # in one system call (IOV_MAX is 1024)


class TcpSource(ParcelSource):
    """One per decode worker. Safe to close at any time; what cannot be sent becomes a MoverError of ``put``
    or ``poll``."""

    def __init__(self, data_address: str, pool: BlockPool, plain: bool = False, cipher: int | None = None):
        """``plain``: send in the clear if the peer takes that too; ``cipher``: GCM, OCB, or None for the
        quicker. Connects in the background. Raises MoverError for a bad address."""
        self._address = DataAddress.parse(data_address)
        self._mode = PLAIN if plain and self._address.takes_plain else cipher or quickest_cipher()
        self._pool = pool
        super().__init__(pool.shape)
        self._connections: list[_Connection] = []
        self._open_connection()

    def cancel(self, lease: int) -> None:
        with self._changed:
            self._waiting = deque(parcel for parcel in self._waiting if parcel.lease != lease)
            super().cancel(lease)

    def close(self) -> tuple[()]:
        self._close()
        for connection in self._connections:
            connection.interrupt()
        for connection in self._connections:
            connection.join(CLOSE_S)  # one that is still connecting ends by itself, within CONNECT_TIMEOUT_S
        return ()

    def _queued(self, parcels: Sequence[Parcel]) -> None:
        longest, layer_bytes = parcels[0], self._pool.shape[2]
        parcel_bytes = len(longest.blocks) * (longest.layers.stop - longest.layers.start) * layer_bytes
        is_behind = len(self._waiting) * parcel_bytes > BACKLOG_BYTES * len(self._connections)
        if is_behind and len(self._connections) < MAX_CONNECTIONS:
            self._open_connection()

    def _open_connection(self) -> None:
        connection = _Connection(self, self._address, self._mode, self._pool)
        self._connections.append(connection)
        connection.start()

    # --- for the connections' threads ------------------------------------------------------------

    def did_not_leave(self, parcel: Parcel) -> None:
        with self._changed:
            self._leaving.remove(parcel)
            if not self._is_closed:
                self._waiting.appendleft(parcel)

    def pause(self, seconds: float) -> bool:
        """False: the source is closed."""
        with self._changed:
            return not self._changed.wait_for(lambda: self._is_closed, seconds)


class _Connection(threading.Thread):
    """Sends parcels until the source is closed or the peer is beyond reach."""

    def __init__(self, source: TcpSource, address: DataAddress, mode: int, pool: BlockPool):
        super().__init__(name="kv-sender", daemon=True)
        self._source, self._address, self._mode, self._pool = source, address, mode, pool
        self._sealed = memoryview(bytearray(RECORD_BYTES + TAG_BYTES))
        self._stream: socket.socket | None = None
        self._seal: Seal | None = None
        self._staging: Staging

    def interrupt(self) -> None:
        """From another thread: whatever this one waits for fails now."""
        stream = self._stream
        if stream is not None:
            with contextlib.suppress(OSError):  # not connected, or no longer
                stream.shutdown(socket.SHUT_RDWR)

    def run(self) -> None:
        try:
            if self._connect():
                if not isinstance(self._pool, np.ndarray):
                    self._staging = Staging(self._pool.device, RECORD_BYTES)
                while (parcel := self._source.wait_for_next()) is not None:
                    if not self._send_or_connect_again(parcel):
                        break
        except Exception as error:  # whatever it is: what is to leave here would wait for ever
            self._source.fail(f"cannot send KV blocks: {error!r}")
        if self._stream is not None:
            self._stream.close()

    def _send_or_connect_again(self, parcel: Parcel) -> bool:
        try:
            self._send(parcel)
        except OSError:
            self._source.did_not_leave(parcel)
            return self._connect()
        self._source.left(parcel)
        return True

    def _connect(self) -> bool:
        """Return False if the peer cannot be reached; the source has failed then."""
        give_up, wait, pause = time.monotonic() + RETRY_S, 0.0, RETRY_PAUSE_S
        while self._source.pause(wait):
            try:
                self._open_stream()
                return True
            except (OSError, EOFError) as error:
                if time.monotonic() + pause > give_up:
                    host, port = self._address.host, self._address.port
                    self._source.fail(
                        f"cannot reach the decode worker for KV blocks at tcp://{host}:{port}: {error}"
                    )
                    return False
            wait, pause = pause, 2 * pause
        return False

    def _open_stream(self) -> None:
        """Connect and authenticate both ends. Raises OSError, EOFError."""
        if self._stream is not None:
            self._stream.close()
        place = (self._address.host, self._address.port)
        stream = self._stream = socket.create_connection(place, CONNECT_TIMEOUT_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_S * 1000))
        hello = Hello(self._mode, new_nonce())
        stream.sendall(hello.pack())
        answer = _receive(stream, ANSWER_BYTES)
        transcript = Transcript(self._address.secret, hello, answer[:NONCE_BYTES])
        if not hmac.compare_digest(answer[NONCE_BYTES:], transcript.server_proof):
            raise EOFError("whoever listens there is not that decode worker")
        stream.sendall(transcript.client_proof)
        # Without a time-out a call ends when all has left, and Python's lock is not taken in between. The
        # kernel's own time-out ends a stalled one.
        stream.settimeout(None)
        stream.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", *divmod(int(STALL_S * 1e6), 1_000_000))
        )
        self._seal = transcript.seal()

    def _send(self, parcel: Parcel) -> None:
        layer_bytes = self._pool.shape[2]
        offset = parcel.layers.start * layer_bytes
        length = parcel.layers.stop * layer_bytes - offset
        header = pack_header(ParcelHeader(parcel.lease, parcel.secret, offset, length, parcel.positions))
        body: Iterable[list[memoryview]] = self._records(parcel, offset, length)
        if self._seal is not None:
            self._send_sealed(header, body, self._seal)
            return
        if isinstance(self._pool, np.ndarray):  # in as few calls as it takes
            body = [[*chain.from_iterable(body)]]
        before = [SIZE.pack(len(header)) + header]
        for pieces in body:
            self._send_all([*before, *pieces])
            before = []

    def _records(self, parcel: Parcel, offset: int, length: int) -> Iterator[list[memoryview]]:
        """Yield the pieces of each record of the body. Those of a GPU are good until the next record."""
        pool = self._pool
        if isinstance(pool, np.ndarray):
            data = pool.reshape(-1).data
            for record in records(spans(pool.shape, parcel.blocks, offset, length)):
                yield [data[start:end] for start, end in record]
        else:
            packed = pool.pack(parcel.blocks, parcel.layers)
            for (place,) in records([(0, len(packed))]):
                yield [self._staging.read(packed, place)]

    def _send_sealed(self, header: bytes, body: Iterable[list[memoryview]], seal: Seal) -> None:
        sealed = memoryview(bytearray(SIZE.size + len(header) + TAG_BYTES))
        SIZE.pack_into(sealed, 0, len(header) + TAG_BYTES)
        seal.close_into(header, sealed[SIZE.size :])
        self._send_all([sealed])
        for pieces in body:
            content = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            sealed = self._sealed[: len(content) + TAG_BYTES]
            seal.close_into(content, sealed)
            self._send_all([sealed])

    def _send_all(self, buffers: Sequence[bytes | memoryview]) -> None:
        """Raises OSError, also where the peer takes nothing in for STALL_S."""
        assert self._stream is not None
        left = deque(buffers)
        while left:
            count = self._stream.sendmsg([left[i] for i in range(min(len(left), MAX_BUFFERS))])
            while left and count >= len(left[0]):
                count -= len(left.popleft())
            if count:
                left[0] = left[0][count:]


def _receive(stream: socket.socket, num_bytes: int) -> bytes:
    data = b""
    while len(data) < num_bytes:
        part = stream.recv(num_bytes - len(data))
        if not part:
            raise EOFError("it ended the connection")
        data += part
    return data
