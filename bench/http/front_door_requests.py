"""Requests a second at the front door: an open loop of whole chat requests over several coordinator processes
on one port."""

from __future__ import annotations

import select
import socket
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil

from ...cli.up import free_port, free_ports
from ..fake_workers import FakeWorkers
from ..live_cluster import await_up, coordinator_command
from .raw_client import request_bytes
from .streaming import CHAT, PATH
from .streaming_servers import Server, pinned, workers_of

NUM_CONNECTIONS = 256
RATE = 1700.0  # requests a second


class OpenLoop:
    """Sends requests when they are due, whatever the server does, over connections that are kept; notes how
    long each took."""

    def __init__(self, port: int, request: bytes, num_connections: int) -> None:
        self._request, self._epoll = request, select.epoll()
        self._sockets: dict[int, socket.socket] = {}
        self._due: dict[int, float] = {}
        for _ in range(num_connections):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setblocking(False)
            self._sockets[connection.fileno()] = connection
            self._epoll.register(connection.fileno(), select.EPOLLIN)
        self._idle = deque(self._sockets)
        self._overdue: deque[float] = deque()
        self.seconds: list[float] = []
        self.num_errors = 0

    @property
    def num_open(self) -> int:
        """Requests that were due and are not answered."""
        return len(self._due) + len(self._overdue)

    def send(self, due: float) -> None:
        """A request, now or as soon as a connection is free."""
        self._overdue.append(due)
        self._send_overdue()

    def receive(self, timeout_s: float) -> None:
        for fd, _ in self._epoll.poll(timeout_s):
            data = self._sockets[fd].recv(1 << 16)
            if fd in self._due and data.endswith(b"}"):
                self.seconds.append(time.monotonic() - self._due.pop(fd))
                self.num_errors += not data.startswith(b"HTTP/1.1 200")
                self._idle.append(fd)
            elif not data:
                raise ConnectionError("the server has closed a connection")
        self._send_overdue()

    def close(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        self._epoll.close()

    def _send_overdue(self) -> None:
        while self._overdue and self._idle:
            fd = self._idle.popleft()
            self._due[fd] = self._overdue.popleft()
            self._sockets[fd].send(self._request)


def sustained(
    model: Path, tenants: Path, key: str, cores: list[int], processes: int, seconds: float
) -> dict[str, Any]:
    """Whole chat requests of one token each, with keys, limits and metering on."""
    with several(model, cores, tenants, processes) as (server, workers):
        load = OpenLoop(server.port, request_bytes(PATH, {**CHAT, "max_tokens": 1}, key), NUM_CONNECTIONS)
        _send_at(load, workers, min(2.0, seconds))  # warm up
        load.seconds.clear()
        cpu, own, begin = _cpu_s(server), time.process_time(), time.monotonic()
        late_s = _send_at(load, workers, seconds)
        took, used, own = time.monotonic() - begin, _cpu_s(server) - cpu, time.process_time() - own
        load.close()
    quantiles = [1e3 * q for q in statistics.quantiles(load.seconds, n=1000)]
    return {
        "processes": processes,
        "asked_per_s": RATE,
        "requests": len(load.seconds),
        "errors": load.num_errors,
        "answered_per_s": round(len(load.seconds) / took, 1),
        "client_latest_s": round(late_s, 3),
        "latency_ms": {
            "median": round(quantiles[499], 2),
            "p99": round(quantiles[989], 2),
            "p99.9": round(quantiles[998], 2),
        },
        "cpu_us_per_request": round(1e6 * used / len(load.seconds), 1),
        "cores": round(used / took, 2),
        "clients_and_workers_cpu_us_per_request": round(1e6 * own / len(load.seconds), 1),
    }


def _send_at(load: OpenLoop, workers: list[FakeWorkers], seconds: float) -> float:
    """Until all are answered; returns by how much the client itself was ever late."""
    begin, sent, latest = time.monotonic(), 0, 0.0
    deadline = begin + seconds + 60
    while sent < RATE * seconds or load.num_open:
        now = time.monotonic()
        while sent < RATE * seconds and (due := begin + sent / RATE) <= now:
            load.send(due)
            sent, latest = sent + 1, max(latest, now - due)
        for pair in workers:
            pair.poll()
        load.receive(0.0005)
        if now > deadline:
            raise TimeoutError(f"{load.num_open} requests were not answered")
    return latest


@contextmanager
def several(
    model: Path, cores: list[int], tenants: Path, processes: int
) -> Iterator[tuple[Server, list[FakeWorkers]]]:
    """Coordinator processes on one port, each with a pair of fake workers."""
    port, control, admin = free_port("127.0.0.1"), free_ports(processes), free_ports(processes)
    options = {"processes": processes, "admin_port": admin, "tenants_file": tenants, "dead_after_s": 60}
    command = coordinator_command(model, port, f"tcp://127.0.0.1:{control}", **options)
    with ExitStack() as stack:
        process = stack.enter_context(pinned(command, cores, all_cores=processes > 1))
        parent = psutil.Process(process.pid)
        servers = [
            Server(admin + number, f"tcp://127.0.0.1:{control + number}", parent)
            for number in range(processes)
        ]
        for server in servers:
            await_up(f"http://127.0.0.1:{server.port}/health", process)
        workers = [stack.enter_context(workers_of(server, model)) for server in servers]
        yield Server(port, servers[0].control, servers[0].process), workers


def _cpu_s(server: Server) -> float:
    """Processor seconds of the parent and all its processes."""
    total = 0.0
    for process in (server.process, *server.process.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total
