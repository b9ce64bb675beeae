"""The ``tcp`` mover, receiving side. One thread serves all data connections; the worker's loop polls complete
blocks.

The name is the option's and the protocol's (``--mover tcp``); the data itself goes over plain TCP sockets:
ZeroMQ copies each byte once more on either side and cannot receive into given memory.

A connection counts for nothing until its peer has proved that it knows the secret of our data address. A
parcel that names an unknown lease, a wrong secret, layers that do not exist or are not missing is dropped and
counted before any byte of it reaches the pool.
"""

from __future__ import annotations

import logging
import secrets
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from ...errors import AddressError, MoverError
from ...messages.messages import PeerId
from ...process.wakeup import Wakeup
from ..block_memory import BlockPool, Staging
from ..interface import Arrival
from ..lease_book import BookedTarget
from .inbound import BadPeer, Desk, Inbound
from .wire import RECORD_BYTES, SECRET_BYTES, DataAddress, endpoint

HANDSHAKE_TIMEOUT_S = 5.0
MAX_STRANGERS = 64  # connections that have not proved anything yet; beyond them the oldest ends
MAX_CONNECTIONS = 1_024
BACKLOG = 1_024
KEEPALIVE_S = 30  # of silence before a peer's host is asked, and then until its connection ends
ACCEPT_PAUSE_S = 0.1
WINDOW_BYTES, WINDOW_BUFFERS = 1 << 20, 64  # most that one read takes, and so for how long it holds the lock
TURN_BYTES = 8 << 20  # read from one connection before the others have their turn
_log = logging.getLogger(__name__)


class TcpTarget(BookedTarget):
    """Every prefill worker connects here. ``dropped`` counts parcels, and ended connections, by reason."""

    def __init__(self, address: str, pool: BlockPool, takes_plain: bool = False):
        """Listens on ``address`` (tcp://host:* takes a free port). Raises AddressError."""
        self._listener = _listening(address)
        super().__init__(pool.shape[1], pool.shape[2])
        self._secret = secrets.token_bytes(SECRET_BYTES)
        desk = Desk(
            pool,
            self._book,
            self._lock,
            self._secret,
            takes_plain,
            self._arrived,
            None if isinstance(pool, np.ndarray) else Staging(pool.device, RECORD_BYTES),
        )
        self._takes_plain = takes_plain
        self._server = _Server(self._listener, desk, self._news.set)
        self._server.start()

    def data_address(self, host: str) -> str:
        """Return the confidential address for a peer that reaches us as ``host``."""
        port: int = self._listener.getsockname()[1]
        return str(DataAddress(host, port, self._secret, self._takes_plain))

    def address(self, peer: PeerId) -> bytes:
        return b""

    def shut_out(self, peer: PeerId) -> bool:
        """Return True: only this process writes, and drops parcels of closed leases."""
        return True

    def poll(self, limit: int) -> list[Arrival]:
        """Raises MoverError where no block can come in any more, by a mistake of ours: only a new process
        helps then."""
        if (error := self._server.failure) is not None:
            raise MoverError(f"nobody receives KV blocks any more: {error!r}") from error
        return super().poll(limit)

    def close_all(self) -> None:
        self._close_book()
        self._server.stop()
        self._news.close()


class _Connection:
    """A socket and the conversation over it."""

    def __init__(self, stream: socket.socket, desk: Desk, now: float):
        stream.setblocking(False)
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, KEEPALIVE_S * 1000)
        self.stream = stream
        self.born = now
        self.inbound = Inbound(desk, self._send)
        self._talk = self.inbound.talk()
        self._buffers = deque(next(self._talk))
        self._lock = desk.lock

    def read(self) -> None:
        """Read the bytes that are there, up to TURN_BYTES. Raises BadPeer, OSError, EOFError."""
        taken = 0
        while taken < TURN_BYTES:
            with self._lock:
                self._buffers = self.inbound.safe(self._buffers)
                window = self._window()
                try:
                    count = self.stream.recvmsg_into(window)[0]
                except BlockingIOError:
                    return
            if count == 0:
                raise EOFError
            taken += count
            self._advance(count)
            if count < sum(map(len, window)):
                return  # that was all there was: to ask again would be to be refused

    def close(self) -> None:
        self._talk.close()
        self.inbound.end()
        self.stream.close()

    def _window(self) -> list[memoryview]:
        window: list[memoryview] = []
        room = WINDOW_BYTES
        for buffer in self._buffers:
            if room == 0 or len(window) == WINDOW_BUFFERS:
                break
            window.append(buffer[:room])
            room -= len(window[-1])
        return window

    def _advance(self, count: int) -> None:
        while count:
            buffer = self._buffers.popleft()
            if count < len(buffer):
                self._buffers.appendleft(buffer[count:])
                return
            count -= len(buffer)
        if not self._buffers:
            self._buffers = deque(next(self._talk))

    def _send(self, data: bytes) -> None:
        if self.stream.send(data) != len(data):
            raise BadPeer("stalled")


class _Server(threading.Thread):
    """Accepts connections and reads them all."""

    def __init__(self, listener: socket.socket, desk: Desk, wake: Callable[[], None]):
        """``wake`` is called, from the thread, if it ends by itself: ``failure`` is the reason."""
        super().__init__(name="kv-receiver", daemon=True)
        self._listener, self._desk, self._wake = listener, desk, wake
        self.failure: Exception | None = None
        self._ending = Wakeup()
        self._selector = selectors.DefaultSelector()
        self._connections: dict[object, _Connection] = {}  # by socket
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(self._ending.fd, selectors.EVENT_READ)

    def stop(self) -> None:
        self._ending.set()
        self.join()
        self._ending.close()

    def run(self) -> None:
        try:
            self._serve()
        except Exception as error:  # whatever it is: handoffs would wait for blocks that nobody takes in
            self.failure = error
            self._wake()
        for connection in list(self._connections.values()):
            self._end(connection)
        self._selector.close()
        self._listener.close()

    def _serve(self) -> None:
        stopping = False
        while not stopping:
            strangers = any(not connection.inbound.authenticated for connection in self._connections.values())
            for key, _ in self._selector.select(HANDSHAKE_TIMEOUT_S / 4 if strangers else None):
                if key.fileobj is self._listener:
                    self._accept()
                elif key.fileobj == self._ending.fd:
                    stopping = True
                elif (connection := self._connections.get(key.fileobj)) is not None:
                    self._read(connection)  # else ended in this very turn, for a newer one
            self._end_silent_strangers(time.monotonic() - HANDSHAKE_TIMEOUT_S)

    def _accept(self) -> None:
        try:
            stream, _ = self._listener.accept()
        except OSError as error:  # it has gone again, or we have no descriptor left
            _log.warning("cannot accept a connection for KV blocks: %s", error.strerror)
            # the listener stays readable; descriptors take time to come back
            select.select([self._ending.fd], [], [], ACCEPT_PAUSE_S)
            return
        if len(self._connections) >= MAX_CONNECTIONS:
            stream.close()
            self._desk.book.dropped["full"] += 1
            return
        connection = _Connection(stream, self._desk, time.monotonic())
        self._connections[stream] = connection
        self._selector.register(stream, selectors.EVENT_READ)
        strangers = [other for other in self._connections.values() if not other.inbound.authenticated]
        if len(strangers) > MAX_STRANGERS:
            self._refuse(strangers[0], "stranger")

    def _read(self, connection: _Connection) -> None:
        try:
            connection.read()
        except BadPeer as error:
            self._refuse(connection, str(error))
        except (OSError, EOFError):
            self._end(connection)

    def _refuse(self, connection: _Connection, reason: str) -> None:
        self._desk.book.dropped[reason] += 1
        self._end(connection)

    def _end(self, connection: _Connection) -> None:
        self._selector.unregister(connection.stream)
        del self._connections[connection.stream]
        connection.close()

    def _end_silent_strangers(self, born_before: float) -> None:
        for connection in list(self._connections.values()):
            if not connection.inbound.authenticated and connection.born < born_before:
                self._refuse(connection, "stranger")


def _listening(address: str) -> socket.socket:
    end = endpoint(address)
    if end is None:
        raise AddressError(f"cannot listen on {address} for KV blocks: expected tcp://host:port, or port *")
    host, port = end
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server(("" if host == "*" else host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise AddressError(
            f"cannot listen on {address} for KV blocks: {error.strerror}; choose another address or port *"
        ) from None
