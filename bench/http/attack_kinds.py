"""Attacks over HTTP: functions that take a ``Target`` and return answers by status. To add one, add it to
``ATTACKS``."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from .raw_client import request_bytes

BODY_BYTES = 15 << 20
PATIENCE_S = 60.0  # of an attacker, for an answer


@dataclass(frozen=True)
class Target:
    """The server under attack. ``times``: how many times the clients that first showed the defect."""

    port: int
    times: int


@dataclass(frozen=True)
class Attack:
    """``run`` must end by itself. ``max_files``: the server's limit of open files."""

    name: str
    run: Callable[[Target], Counter[str]]
    max_files: int | None = None


def post(target: Target, path: str, body: bytes, *, unsent: int = 0) -> socket.socket:
    """A request on a connection of its own, without its last bytes."""
    connection = socket.create_connection(("127.0.0.1", target.port), timeout=PATIENCE_S)
    request = request_bytes(path, body)
    connection.sendall(memoryview(request)[: len(request) - unsent])
    return connection


def answer(connection: socket.socket) -> str:
    """The status; "closed" where there is none."""
    with suppress(OSError):
        line = connection.recv(64)
        if line.startswith(b"HTTP/1.1 "):
            return line[9:12].decode()
    return "closed"


def at_once(count: int, work: Callable[[], str]) -> Counter[str]:
    """Run ``work`` on ``count`` threads at once."""
    found: Counter[str] = Counter()

    def one() -> None:
        try:
            result = work()
        except OSError as error:
            result = type(error).__name__
        found[result] += 1

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def bombs(
    path: str, clients: int, make: Callable[[], dict[str, Any] | bytes]
) -> Callable[[Target], Counter[str]]:
    """The same large body from ``count`` clients, a few at a time."""

    def run(target: Target) -> Counter[str]:
        made = make()
        body = made if isinstance(made, bytes) else json.dumps(made).encode()

        def one() -> str:
            with post(target, path, body) as connection:
                return answer(connection)

        found: Counter[str] = Counter()
        for _ in range(target.times):
            found += at_once(clients, one)
        return found

    return run


def unfinished(begin: Callable[[Target], socket.socket]) -> Callable[[Target], Counter[str]]:
    """Clients that begin a request, and stay."""

    def run(target: Target) -> Counter[str]:
        held: list[socket.socket] = []
        found: Counter[str] = Counter()
        for _ in range(30 * target.times):
            try:
                held.append(begin(target))
            except OSError as error:
                found[type(error).__name__] += 1
        time.sleep(1)
        return found + answers_of(held)

    return run


def all_but_the_end(target: Target) -> socket.socket:
    return post(target, "/v1/completions", b" " * BODY_BYTES, unsent=1)


def frame_without_end(target: Target) -> socket.socket:
    handshake = (
        f"GET /v1/stream HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\nUpgrade: websocket\r\nConnection: "
        "Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    connection = socket.create_connection(("127.0.0.1", target.port), timeout=PATIENCE_S)
    connection.sendall(handshake.encode())
    connection.recv(4096)
    connection.sendall(b"\x81\xff" + BODY_BYTES.to_bytes(8) + bytes(4) + b" " * (BODY_BYTES - 1))
    return connection


def idle_connections(target: Target) -> Counter[str]:
    """Each asks once, and stays."""
    held, found = [], Counter[str]()
    for _ in range(228 * target.times):
        with suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", target.port), timeout=5)
            held.append(connection)
            connection.sendall(f"GET /health HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\n\r\n".encode())
            found[answer(connection)] += 1
            continue
        found["failed"] += 1
    for connection in held:
        connection.close()
    return found


def answers_of(held: list[socket.socket]) -> Counter[str]:
    """Answers to clients that have not finished; closes them."""
    found: Counter[str] = Counter()
    for connection in held:
        connection.setblocking(False)
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            found["still open"] += 1
        except OSError:
            found["closed"] += 1
        else:
            found[data[9:12].decode() if data.startswith(b"HTTP") else "closed"] += 1
        connection.close()
    return found


def tools() -> dict[str, Any]:
    wide = {
        "type": "object",
        "properties": {f"p{i}": {"type": "string", "description": "x" * 40} for i in range(1200)},
    }
    chosen = [{"type": "function", "function": {"name": f"f{i}", "parameters": wide}} for i in range(128)]
    return {"messages": [{"role": "user", "content": "a"}], "tools": chosen, "tool_choice": "required"}


def parts() -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 400_000}]}


def schema() -> dict[str, Any]:
    wide = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(400_000)}}
    shape = {"type": "json_schema", "json_schema": {"name": "a", "schema": wide}}
    return {"messages": [{"role": "user", "content": "a"}], "response_format": shape}


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
ATTACKS = [
    Attack("tokenization", bombs(TEXT, 4, lambda: {"prompt": "the quick brown fox " * (BODY_BYTES // 20)})),
    Attack(
        "logit_bias",
        bombs(TEXT, 2, lambda: {"prompt": "a", "logit_bias": {str(i): 1 for i in range(1_000_000)}}),
    ),
    Attack("ids", bombs(TEXT, 2, lambda: b'{"prompt":[' + b"1," * 7_900_000 + b"1]}")),
    Attack("schema", bombs(CHAT, 2, schema)),
    Attack("tools", bombs(CHAT, 2, tools)),
    Attack("message parts", bombs(CHAT, 2, parts)),
    Attack("choices", bombs(TEXT, 2, lambda: {"prompt": ["a"] * 32, "n": 128, "max_tokens": 1})),
    Attack("unfinished bodies", unfinished(all_but_the_end)),
    Attack("unfinished messages", unfinished(frame_without_end)),
    Attack("descriptors", idle_connections, max_files=256),
]
