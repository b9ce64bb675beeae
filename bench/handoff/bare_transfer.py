"""What the movers are measured against: one way for bytes through a bare TCP socket, and through bare ZeroMQ
(PUSH, PULL)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import numpy as np
import zmq
from numpy.typing import NDArray

PIECE_BYTES = 2 << 20


class TcpReceiver:
    """Receives straight into ``pool`` (uint8), an equal part of it from each connection."""

    def __init__(self, pool: NDArray[np.uint8], num_connections: int = 1) -> None:
        self._num_connections = num_connections
        self._bytes = pool.reshape(-1).data
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def accept(self) -> None:
        self._streams = [self._listener.accept()[0] for _ in range(self._num_connections)]

    def receive_all(self) -> None:
        _at_once(self._receive, self._streams, self._bytes)

    def _receive(self, stream: socket.socket, part: memoryview) -> None:
        while len(part):
            part = part[stream.recv_into(part[:PIECE_BYTES], flags=socket.MSG_WAITALL) :]


class TcpSender:
    def __init__(self, port: int, pool: NDArray[np.uint8], num_connections: int = 1) -> None:
        self._bytes = pool.reshape(-1).data
        self._streams = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_connections)]

    def send_all(self) -> None:
        _at_once(self._send, self._streams, self._bytes)

    def _send(self, stream: socket.socket, part: memoryview) -> None:
        for start in range(0, len(part), PIECE_BYTES):
            stream.sendall(part[start : start + PIECE_BYTES])


def _at_once(
    work: Callable[[socket.socket, memoryview], None], streams: list[socket.socket], whole: memoryview
) -> None:
    """An equal part by each stream, each on its own thread; the first on this one."""
    size = -(-len(whole) // len(streams))
    parts = [(stream, whole[i * size : (i + 1) * size]) for i, stream in enumerate(streams)]
    threads = [threading.Thread(target=work, args=part) for part in parts[1:]]
    for thread in threads:
        thread.start()
    work(*parts[0])
    for thread in threads:
        thread.join()


class ZmqReceiver:
    """Receives messages of PIECE_BYTES, and copies each into the pool: ZeroMQ has no way to receive into
    given memory."""

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self._bytes = pool.reshape(-1).data
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = context.socket(zmq.PULL)
        self._socket.rcvhwm = 16
        self.port = self._socket.bind_to_random_port("tcp://127.0.0.1")

    def receive_all(self) -> None:
        start = 0
        while start < len(self._bytes):
            piece = self._socket.recv(copy=False).buffer
            self._bytes[start : start + len(piece)] = piece
            start += len(piece)


class ZmqSender:
    """Sends without a copy of its own."""

    def __init__(self, port: int, pool: NDArray[np.uint8]) -> None:
        self._bytes = pool.reshape(-1).data
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm = 16
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def send_all(self) -> None:
        trackers = [
            self._socket.send(self._bytes[start : start + PIECE_BYTES], copy=False, track=True)
            for start in range(0, len(self._bytes), PIECE_BYTES)
        ]
        for tracker in trackers:
            if tracker is not None:
                tracker.wait()
