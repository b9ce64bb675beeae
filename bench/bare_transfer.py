"""What the movers are measured against: one way for bytes through a bare TCP socket, and through bare ZeroMQ (PUSH, PULL)."""

from __future__ import annotations

import socket

import numpy as np
import zmq
from numpy.typing import NDArray

PIECE_BYTES = 2 << 20


class TcpReceiver:
    """Receives straight into ``pool`` (uint8, flat), from one connection."""

    def __init__(self, pool: NDArray[np.uint8]) -> None:
        self._bytes = pool.reshape(-1).data
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]

    def accept(self) -> None:
        self._stream = self._listener.accept()[0]

    def receive_all(self) -> None:
        view = self._bytes
        while len(view):
            view = view[self._stream.recv_into(view[:PIECE_BYTES], flags=socket.MSG_WAITALL) :]


class TcpSender:
    def __init__(self, port: int, pool: NDArray[np.uint8]) -> None:
        self._bytes = pool.reshape(-1).data
        self._stream = socket.create_connection(("127.0.0.1", port))

    def send_all(self) -> None:
        for start in range(0, len(self._bytes), PIECE_BYTES):
            self._stream.sendall(self._bytes[start : start + PIECE_BYTES])


class ZmqReceiver:
    """Receives messages of PIECE_BYTES, and copies each into the pool: ZeroMQ has no way to receive into given memory."""

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
