"""Sends hostile requests over many connections in one thread, and holds the server to its promises.

Each request that is well framed gets its answers, none of which is a 500; each connection that is broken is
closed; nothing takes longer than ``DEADLINE_S``, not counted while this process itself, in which the workers
are played, got no processor.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import Counter, deque
from dataclasses import dataclass, field

import httptools

from .hostile_parts import Attempt
from .hostile_requests import HostileRequests

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
READ_BYTES = 1 << 18
PIECE_EVERY_S = 0.005
DEADLINE_S = 90.0
STOOD_STILL_S = 0.5
"""Turns take a few milliseconds: after a longer gap this process got no processor."""
MAX_STALLED = 256
MAX_FAILURES = 20
GOOD = frozenset({"valid", "slow", "upgrade"})  # kinds that must be answered with 200
FINE_5XX = frozenset({503, 504})  # no worker, or the deadline that the request asked for


@dataclass(slots=True)
class Tally:
    """What came of it."""

    requests: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    num_failures: int = 0
    slowest_s: float = 0.0
    slowest_kind: str = ""
    stood_still_s: float = 0.0

    def fail(self, attempt: Attempt, what: str) -> None:
        self.num_failures += 1
        if len(self.failures) < MAX_FAILURES:
            self.failures.append(f"{attempt.kind}: {what}; sent {b''.join(attempt.pieces)[:600]!r}")


class _Connection:
    """One socket and the attempt that is on it; its methods are called back by the parser, too."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # ports are free again at once
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
        self.socket.setblocking(False)
        self.unsent = bytearray()

    def begin(self, attempt: Attempt, now: float) -> None:
        self.attempt, self.began, self.pieces = attempt, now, deque(attempt.pieces)
        self.statuses: list[int] = []
        self.num_complete = 0
        self.closes = False
        self.parser = httptools.HttpResponseParser(self)
        self.put()

    def put(self) -> None:
        """The next piece, and what is left of those before."""
        if self.pieces:
            self.unsent += self.pieces.popleft()
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                del self.unsent[: self.socket.send(self.unsent)]

    @property
    def sent(self) -> bool:
        return not self.unsent and not self.pieces

    def on_headers_complete(self) -> None:
        self.statuses.append(self.parser.get_status_code())

    def on_message_complete(self) -> None:
        self.num_complete += self.statuses[-1] >= 200
        self.closes = not self.parser.should_keep_alive()


class HostileClient:
    """``turn`` until ``done``."""

    def __init__(self, port: int, source: HostileRequests, num_requests: int, num_connections: int) -> None:
        self.tally = Tally()
        self._port, self._source, self._num_requests = port, source, num_requests
        self._epoll = select.epoll()
        self._connections: dict[int, _Connection] = {}
        self._unfinished: set[_Connection] = set()  # have more to send
        self._num_stalled = 0
        self._piece_at = self._looked_at = 0.0
        self._turned_at = time.monotonic()
        for _ in range(num_connections):
            self._next(None)

    @property
    def done(self) -> bool:
        return not self._connections

    def send_no_more(self) -> None:
        """What is under way is still answered."""
        self._num_requests = min(self._num_requests, self.tally.requests)

    def turn(self, timeout_s: float) -> None:
        """Sends and receives what can be."""
        self._forgive_own_stall(time.monotonic())
        for fd, _ in self._epoll.poll(timeout_s):
            if (connection := self._connections.get(fd)) is not None:
                self._receive(connection)
        now = time.monotonic()
        if now >= self._piece_at:
            self._piece_at = now + PIECE_EVERY_S
            for connection in list(self._unfinished):
                self._send(connection)
        if now >= self._looked_at + 1:
            self._looked_at = now
            for connection in list(self._connections.values()):
                if now > connection.began + DEADLINE_S:
                    self._over(connection, "no answer, and the connection is open")

    def _forgive_own_stall(self, now: float) -> None:
        """Nobody was slow while nobody listened."""
        if (stall := now - self._turned_at) > STOOD_STILL_S:
            self.tally.stood_still_s += stall
            for connection in self._connections.values():
                connection.began += stall
        self._turned_at = now

    def close(self) -> None:
        for connection in self._connections.values():
            connection.socket.close()
        self._epoll.close()

    def _next(self, connection: _Connection | None) -> None:
        """The next attempt, on this connection or on a new one."""
        if self.tally.requests >= self._num_requests:
            if connection is not None:
                self._forget(connection)
            return
        attempt = self._source.next()
        if connection is None:
            connection = _Connection(self._port)
            self._connections[connection.socket.fileno()] = connection
            self._epoll.register(connection.socket.fileno(), select.EPOLLIN)
        self.tally.requests += attempt.num_requests
        self.tally.kinds[attempt.kind] += attempt.num_requests
        if attempt.ending == "stall" and self._num_stalled < MAX_STALLED:
            self._num_stalled += 1
            self._next(None)  # while this one waits
        try:
            connection.begin(attempt, time.monotonic())
        except OSError as error:
            self._over(connection, f"cannot be sent: {error}")
        else:
            self._after_sending(connection)

    def _send(self, connection: _Connection) -> None:
        try:
            connection.put()
        except OSError:
            self._receive(connection)  # it was closed: read what came before
        else:
            self._after_sending(connection)

    def _after_sending(self, connection: _Connection) -> None:
        if not connection.sent:
            self._unfinished.add(connection)
            return
        self._unfinished.discard(connection)
        if connection.attempt.ending == "abort":
            self._over(connection, None)
        elif connection.attempt.ending == "half_close":
            with contextlib.suppress(OSError):
                connection.socket.shutdown(socket.SHUT_WR)

    def _receive(self, connection: _Connection) -> None:
        try:
            data = connection.socket.recv(READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        attempt = connection.attempt
        try:
            if data:
                connection.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            if attempt.ending == "keep":
                self._over(connection, f"the answer is no HTTP ({error!r}): {data[:300]!r}")
            return  # frames of a WebSocket
        if attempt.ending != "keep":
            if not data:
                self._over(connection, None)
        elif connection.num_complete >= attempt.num_requests and connection.sent:
            self._over(connection, None, keep=bool(data) and not connection.closes)
        elif not data:
            ended_by_error = (
                bool(connection.statuses) and connection.closes and connection.statuses[-1] >= 400
            )
            self._over(
                connection,
                None
                if ended_by_error
                else f"{connection.num_complete} of {attempt.num_requests} answers came",
            )

    def _over(self, connection: _Connection, failure: str | None, keep: bool = False) -> None:
        attempt, seconds = connection.attempt, time.monotonic() - connection.began
        self.tally.statuses.update(connection.statuses)
        bad = [status for status in connection.statuses if status >= 500 and status not in FINE_5XX]
        if attempt.kind in GOOD and failure is None:
            bad += [status for status in connection.statuses if status != 200]
        if failure is not None or bad:
            self.tally.fail(attempt, failure or f"status {bad[0]}")
        if attempt.ending == "stall":
            self._num_stalled -= 1
        elif seconds > self.tally.slowest_s:
            self.tally.slowest_s, self.tally.slowest_kind = seconds, attempt.kind
        if keep:
            self._next(connection)
            return
        self._forget(connection)
        if attempt.ending != "stall":
            self._next(None)

    def _forget(self, connection: _Connection) -> None:
        self._unfinished.discard(connection)
        del self._connections[connection.socket.fileno()]
        connection.socket.close()
