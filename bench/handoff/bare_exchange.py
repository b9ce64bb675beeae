"""What no code of ours can avoid: an HTTP exchange, and a ZeroMQ round trip between two processes."""

from __future__ import annotations

import multiprocessing
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import zmq

PAUSE_S = 0.003


@contextmanager
def echoing() -> Iterator[zmq.Socket[bytes]]:
    """A socket to a process that sends back by ZeroMQ what it gets."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    echo = context.Process(target=_echo, args=(sender,), daemon=True)
    echo.start()
    try:
        with zmq.Context() as own, own.socket(zmq.DEALER) as dealer:
            dealer.linger = 0
            dealer.connect(receiver.recv())
            yield dealer
    finally:
        echo.terminate()


def round_trip(dealer: zmq.Socket[bytes]) -> float:
    """Seconds that a few bytes take to another process and back by ZeroMQ alone, some milliseconds after the
    last, as requests come."""
    time.sleep(PAUSE_S)
    start = time.perf_counter()
    dealer.send(b"ping")
    if not dealer.poll(5_000):
        raise TimeoutError("no answer from the echoing process")
    dealer.recv()
    return time.perf_counter() - start


def _echo(sender: Connection) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        sender.send(f"tcp://127.0.0.1:{port}")
        while True:
            router.poll()
            router.send_multipart(router.recv_multipart())


def exchange(connection: socket.socket, request: bytes, end: bytes) -> tuple[float, float, bytes]:
    """Seconds to the first and to the last bytes of the answer, and the answer."""
    start = time.perf_counter()
    connection.sendall(request)
    text = connection.recv(1 << 16)
    first = time.perf_counter() - start
    while end not in text:
        text += connection.recv(1 << 16)
    return first, time.perf_counter() - start, text
