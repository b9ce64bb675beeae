"""Frames on the socket pair between the coordinator and a process that reads large bodies: two lengths, a
pickle, raw bytes."""

from __future__ import annotations

import socket
import struct

FRAME = struct.Struct("<QQ")


def send(connection: socket.socket, head: bytes, body: bytes | bytearray = b"") -> None:
    connection.sendall(FRAME.pack(len(head), len(body)) + head)
    if body:
        connection.sendall(body)


def receive(connection: socket.socket) -> tuple[bytearray, bytearray]:
    """The pickle and the bytes of a frame. Raises EOFError where the other end has closed."""
    num_head, num_body = FRAME.unpack(_exactly(connection, FRAME.size))
    return _exactly(connection, num_head), _exactly(connection, num_body)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view, at = memoryview(data), 0
    while at < count:
        if not (got := connection.recv_into(view[at:])):
            raise EOFError
        at += got
    return data
