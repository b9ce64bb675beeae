"""An HTTP client that costs next to nothing: many keep-alive connections in one thread, answers counted, not
parsed."""

from __future__ import annotations

import json
import resource
import select
import socket
from typing import Any

EVENT = b"data: "


def allow_many_files() -> None:
    """Open files of this process, and of those that it starts: as many as may be."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def request_bytes(path: str, body: dict[str, Any] | bytes, key: str = "") -> bytes:
    """A POST; ``key``: the API key, where one is asked for."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    authorization = f"authorization: Bearer {key}\r\n" if key else ""
    to = "host: localhost\r\ncontent-type: application/json\r\n"
    return (
        f"POST {path} HTTP/1.1\r\n{to}{authorization}content-length: {len(content)}\r\n\r\n".encode()
        + content
    )


class RawClient:
    """Connections to one server."""

    def __init__(self, port: int, num_connections: int) -> None:
        self._epoll = select.epoll()
        self.sockets: dict[int, socket.socket] = {}
        self.num_reads = self.num_events = 0
        self._tails: dict[int, bytes] = {}  # the beginning of an event that may be cut in two
        self.connect(port, num_connections)

    def connect(self, port: int, num_connections: int, request: bytes = b"") -> None:
        """More connections, each with a request on it."""
        for _ in range(num_connections):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
            self.sockets[connection.fileno()] = connection
            self._tails[connection.fileno()] = b""
            self._epoll.register(connection.fileno(), select.EPOLLIN)
            if request:
                connection.send(request)

    def send_all(self, request: bytes) -> None:
        """The same request on every connection."""
        for connection in self.sockets.values():
            connection.send(request)

    def count(self, timeout_s: float) -> tuple[int, int]:
        """Events and blanks in all that arrives now."""
        events = blanks = 0
        for fd, _ in self._epoll.poll(timeout_s):
            data = self.sockets[fd].recv(1 << 18)
            if not data:
                raise ConnectionError("the server has closed a connection")
            self.num_reads += 1
            events += (self._tails[fd] + data).count(EVENT)
            blanks += data.count(b" ")
            self._tails[fd] = data[1 - len(EVENT) :]
        self.num_events += events
        return events, blanks

    def answer_and_repeat(self, request: bytes, timeout_s: float) -> int:
        """Whole answers that arrive now; each is followed by the next request on its connection."""
        answers = 0
        for fd, _ in self._epoll.poll(timeout_s):
            data = self.sockets[fd].recv(1 << 16)
            while not data.endswith((b"}", b"[DONE]\n\n\r\n0\r\n\r\n")):
                self.sockets[fd].setblocking(True)
                more = self.sockets[fd].recv(1 << 16)
                self.sockets[fd].setblocking(False)
                if not more:
                    raise ConnectionError("the server has closed a connection")
                data += more
            if not data.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"the server answered {data[:200]!r}")
            answers += 1
            self.sockets[fd].send(request)
        return answers

    def close(self) -> None:
        for connection in self.sockets.values():
            connection.close()
        self._epoll.close()
