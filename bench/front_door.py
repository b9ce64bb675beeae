"""The coordinator as a front door: what a request costs before it is dispatched, how many streams and requests a second it holds.

    python -m splitserve.bench.front_door [--seconds 60] [--processes 2] [--only admission] [--json bench/results/front_door.json]

    admission   key, validation, template, tokens, limits, journal: from a complete call to its submission, in this process, with the
                coordinator's event loop and its settings of the collector
    streams     10,000 open streams on one coordinator process, and some tokens to each of them
    sustained   1,700 requests a second (100,000 a minute) over several processes on one port, against fake workers that answer at once
    streamed    tokens a second with keys, limits, metering and tracing on, and without, in turn

The server runs on the first core (several processes: on all cores), this process with clients and fake workers on the last one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import select
import socket
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import uvloop

from ..coordinator.call import Endpoint, Headers
from ..coordinator.generate import GenerationApi
from ..coordinator.inner_call import InnerCall
from ..coordinator.limits import HttpLimits
from ..coordinator.metrics import Metrics
from ..coordinator.request import Ended, GenerationRequest
from ..coordinator.request_trace import end_trace
from ..coordinator.served_model import ServedModel
from ..coordinator.system_snapshot import SystemSnapshot
from ..coordinator.tenants.directory import KeyDirectory
from ..coordinator.tenants.meter import Meter
from ..coordinator.tenants.shared_limiter import SharedLimiter
from ..coordinator.tenants.store import TenantStore
from ..coordinator.tenants.tenancy import Tenancy
from ..deploy.up import free_port, free_ports
from ..transport.collector import settle_heap
from ..transport.otel import Tracing
from .environment import environment
from .fake_workers import FakeWorkers
from .raw_client import RawClient, request_bytes
from .streaming import CHAT, POLL_S, Server, coordinator, model_folder, open_streams, pinned, workers_of
from .trace_sink import trace_sink

NUM_CONNECTIONS = 256
WARM_UP = 500
OPEN_WITHIN_S = 300.0
PATH: Endpoint = "/v1/chat/completions"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the sustained load")
    parser.add_argument("--rate", type=float, default=1700.0, help="its requests a second")
    parser.add_argument("--processes", type=int, default=2, help="coordinator processes under it")
    parser.add_argument("--rounds", type=int, default=15, help="how often streamed cost is measured with and without")
    parser.add_argument("--streams", type=int, default=10_000, help="streams open at a time")
    parser.add_argument("--only", choices=["admission", "streams", "sustained", "streamed"], help="measure this alone")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder))
        tenants, key = tenants_file(Path(folder))
        parts: dict[str, Callable[[], Any]] = {
            "admission": lambda: uvloop.run(admission(model, tenants, key)),
            "streams": lambda: streams(model, tenants, key, cores, options.streams),
            "sustained": lambda: sustained(model, tenants, key, cores, options.processes, options.rate, options.seconds),
            "streamed": lambda: streamed(model, tenants, key, cores, options.rounds),
        }
        results = {"environment": environment()} | {name: part() for name, part in parts.items() if options.only in (None, name)}
    print(json.dumps(results, indent=1))
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


def tenants_file(folder: Path) -> tuple[Path, str]:
    """One tenant with every limit there is, none of which is ever reached, and its key."""
    store, much = TenantStore(folder / "tenants", create=True), 1 << 49
    limits = {"requests_per_minute": much, "tokens_per_minute": much, "max_streams": much, "tokens_per_day": much}
    store.set_tier("bench", "standard", limits)
    store.set_tenant("bench", tier="bench")
    key = store.create_key("bench", limits={"requests_per_minute": much, "tokens_per_month": much}).key
    store.close()
    return folder / "tenants", key


# --- what a request costs before it is dispatched ------------------------------------------------


class Noting:
    """A dispatcher that notes when a request reaches it, and ends it with the next turn of the loop."""

    def __init__(self) -> None:
        self.reached = 0.0
        self.waiting: list[GenerationRequest] = []

    def submit(self, request: GenerationRequest) -> None:
        self.reached = time.perf_counter()
        self.waiting.append(request)

    def cancel(self, request_id: str) -> None: ...

    def ready(self) -> bool:
        return True

    def gap(self) -> str:
        return ""

    def drain(self, worker_id: str, timeout_s: float | None) -> None: ...

    def snapshot(self) -> dict[str, object]:
        return {}


class Heard:
    """A client that is in the same process."""

    def answered(self, status: int, headers: Headers, body: bytes) -> None:
        assert status == 200, body

    def streamed(self, data: bytes, *, last: bool) -> None: ...


async def admission(model: Path, tenants: Path, key: str, count: int = 20_000) -> dict[str, Any]:
    """Microseconds from a complete call to its submission."""
    served = ServedModel.load(model, "bench")
    settle_heap()
    meter = Meter(f"sqlite:///{tenants}-usage", tenants.parent, "admission-journal-", soon=asyncio.get_running_loop().call_soon)
    meter.start()
    limiter = SharedLimiter(tenants.with_name("admission-limits"))
    header, tenancy = f"Bearer {key}".encode(), Tenancy(KeyDirectory(tenants), limiter, meter)
    results = {
        "without_tenants": await _admission(served, Tenancy(), header, count),
        "with_keys_limits_metering": await _admission(served, tenancy, header, count),
    }
    with trace_sink() as endpoint:
        tracing = Tracing.open(endpoint, "coordinator", "bench")
        results["with_keys_limits_metering_tracing"] = await _admission(served, tenancy, header, count, tracing)
        await asyncio.to_thread(tracing.close)
    await limiter.stop()
    await asyncio.to_thread(meter.stop)
    return results


async def _admission(served: ServedModel, tenancy: Tenancy, header: bytes, count: int, tracing: Tracing | None = None) -> dict[str, float]:
    dispatcher, heard, no_headers = Noting(), Heard(), dict[bytes, bytes]()
    metrics = Metrics("bench", SystemSnapshot)
    metrics.listeners.append(end_trace)
    api = GenerationApi(dispatcher, served, HttpLimits(), metrics, tenancy)
    api.tracing = tracing
    body = json.dumps({**CHAT, "max_tokens": 16}).encode()
    times = []
    for _ in range(count + WARM_UP):
        begin = time.perf_counter()
        account = tenancy.directory.account(header)
        InnerCall(api, PATH, body, account, heard, no_headers).begin()
        await asyncio.sleep(0)  # it is looked at with the next turn of the loop
        times.append(dispatcher.reached - begin)
        for request in dispatcher.waiting:
            request.sink.push(5, None)
            request.sink.end(Ended(finish_reason="length", num_output_tokens=1, num_dispatches=1))
        dispatcher.waiting.clear()
    quantiles = statistics.quantiles([1e6 * t for t in times[WARM_UP:]], n=100)
    return {"requests": count, "median_us": round(quantiles[49], 1), "p90_us": round(quantiles[89], 1), "p99_us": round(quantiles[98], 1)}


# --- open streams --------------------------------------------------------------------------------


def streams(model: Path, tenants: Path, key: str, cores: list[int], num_streams: int, tokens_each: int = 10) -> dict[str, Any]:
    """All open at the same time, each with its first token and some more. Any error ends the measurement."""
    more = ("--tenants-file", str(tenants), "--dead-after-s", "60")  # the one thread of clients and workers may be busy
    with coordinator(model, cores, *more) as server, workers_of(server, model) as workers:
        idle, cpu, begin = server.rss_mb(), server.cpu_s(), time.monotonic()
        client, request = RawClient(server.port, 0), request_bytes(PATH, {**CHAT, "stream": True, "max_tokens": 900_000}, key)
        opened = 0
        while opened < 2 * num_streams:  # each one's role, and its first token
            if len(client.sockets) < num_streams and opened >= 2 * len(client.sockets) - 400:
                client.connect(server.port, min(100, num_streams - len(client.sockets)), request)
            workers.poll()
            opened += client.count(0.001)[0]
            if time.monotonic() > begin + OPEN_WITHIN_S:
                raise TimeoutError(f"{opened} of {2 * num_streams} first events came")
        opened_s, open_mb = time.monotonic() - begin, server.rss_mb()
        sent = received = 0
        begin = time.monotonic()
        while received < tokens_each * num_streams:
            if sent < tokens_each * num_streams and sent - received < 2 * num_streams:
                sent += workers.step()
            events, blanks = client.count(0.01)
            received += blanks - events
            workers.poll()
        result = {
            "streams": num_streams,
            "opened_in_s": round(opened_s, 2),
            "tokens_per_s": round(received / (time.monotonic() - begin)),
            "idle_mb": round(idle, 1),
            "open_mb": round(open_mb, 1),
            "kb_per_stream": round((open_mb - idle) * 1e3 / num_streams, 1),
            "cpu_s": round(server.cpu_s() - cpu, 2),
            "errors": 0,
        }
        client.close()
        return result


# --- requests a second ---------------------------------------------------------------------------


class OpenLoop:
    """Sends requests when they are due, whatever the server does, over connections that are kept; notes how long each took."""

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


def sustained(model: Path, tenants: Path, key: str, cores: list[int], processes: int, rate: float, seconds: float) -> dict[str, Any]:
    """Whole chat requests of one token each, with keys, limits and metering on."""
    with several(model, cores, tenants, processes) as (server, workers):
        load = OpenLoop(server.port, request_bytes(PATH, {**CHAT, "max_tokens": 1}, key), NUM_CONNECTIONS)
        _send_at(load, workers, rate, min(2.0, seconds))  # warm up
        load.seconds.clear()
        cpu, own, begin = _cpu_s(server), time.process_time(), time.monotonic()
        late_s = _send_at(load, workers, rate, seconds)
        took, used, own = time.monotonic() - begin, _cpu_s(server) - cpu, time.process_time() - own
        load.close()
    quantiles = [1e3 * q for q in statistics.quantiles(load.seconds, n=1000)]
    return {
        "processes": processes,
        "asked_per_s": rate,
        "requests": len(load.seconds),
        "errors": load.num_errors,
        "answered_per_s": round(len(load.seconds) / took, 1),
        "client_latest_s": round(late_s, 3),
        "latency_ms": {"median": round(quantiles[499], 2), "p99": round(quantiles[989], 2), "p99.9": round(quantiles[998], 2)},
        "cpu_us_per_request": round(1e6 * used / len(load.seconds), 1),
        "cores": round(used / took, 2),
        "clients_and_workers_cpu_us_per_request": round(1e6 * own / len(load.seconds), 1),
    }


def _send_at(load: OpenLoop, workers: list[FakeWorkers], rate: float, seconds: float) -> float:
    """Until all are answered; returns by how much the client itself was ever late."""
    begin, sent, latest = time.monotonic(), 0, 0.0
    deadline = begin + seconds + 60
    while sent < rate * seconds or load.num_open:
        now = time.monotonic()
        while sent < rate * seconds and (due := begin + sent / rate) <= now:
            load.send(due)
            sent, latest = sent + 1, max(latest, now - due)
        for pair in workers:
            pair.poll()
        load.receive(0.0005)
        if now > deadline:
            raise TimeoutError(f"{load.num_open} requests were not answered")
    return latest


@contextmanager
def several(model: Path, cores: list[int], tenants: Path, processes: int) -> Iterator[tuple[Server, list[FakeWorkers]]]:
    """Coordinator processes on one port, each with a pair of fake workers."""
    port, control, admin = free_port("127.0.0.1"), free_ports("127.0.0.1", processes), free_ports("127.0.0.1", processes)
    command = ["coordinator", "--model", str(model), "--served-model-name", "bench", "--port", str(port), "--insecure"]
    options = ["--processes", str(processes), "--control-address", f"tcp://127.0.0.1:{control}", "--admin-port", str(admin)]
    more = ["--tenants-file", str(tenants), "--log-level", "warning", "--max-queue", "100000", "--dead-after-s", "60"]
    with ExitStack() as stack:
        whole = [sys.executable, "-m", "splitserve.deploy.cli", *command, *options, *more]
        process = stack.enter_context(pinned(whole, cores, all_cores=processes > 1))
        parent = psutil.Process(process.pid)
        servers = [Server(admin + number, f"tcp://127.0.0.1:{control + number}", parent) for number in range(processes)]
        for server in servers:
            _await_health(server.port)
        workers = [stack.enter_context(workers_of(server, model)) for server in servers]
        yield Server(port, servers[0].control, servers[0].process), workers


def _await_health(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError("a coordinator process did not start")
        time.sleep(0.1)


def _cpu_s(server: Server) -> float:
    """Of the parent and all its processes."""
    total = 0.0
    for process in (server.process, *server.process.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


# --- streamed tokens -----------------------------------------------------------------------------


class Streams:
    """Open streams of one server, fed by its workers for a window at a time."""

    def __init__(self, server: Server, workers: FakeWorkers, num_streams: int, max_ahead: int, key: str) -> None:
        self._server, self.workers, self._max_ahead = server, workers, max_ahead
        self._client = RawClient(server.port, num_streams)
        self._client.send_all(request_bytes(PATH, {**CHAT, "stream": True, "max_tokens": 900_000}, key))
        open_streams(self._client, workers, num_streams)

    def window(self, seconds: float, poll: Callable[[], None]) -> float:
        """Tokens per second of the server's processor time, all of them received in the end. ``poll`` is called all the while."""
        begin, cpu, sent, received = time.monotonic(), self._server.cpu_s(), 0, 0
        polled = 0.0
        while (now := time.monotonic()) < begin + seconds or received < sent:
            while now < begin + seconds and sent - received < self._max_ahead:
                sent += self.workers.step()
            events, blanks = self._client.count(0.01)
            received += blanks - events
            if now >= polled + POLL_S:
                poll()
                polled = now
        return received / (self._server.cpu_s() - cpu)

    def close(self) -> None:
        self._client.close()


def streamed(model: Path, tenants: Path, key: str, cores: list[int], rounds: int, seconds: float = 1.0) -> dict[str, Any]:
    """Per second of the server's processor time, with and without: two servers on one core take turns, so that a round's ratio is of two
    neighbouring seconds; and the rounds' median."""
    with trace_sink() as endpoint:
        everything = ("--tenants-file", str(tenants), "--otlp-endpoint", endpoint)
        counts = ((64, 2), (512, 32))
        return {f"{count}_streams": _streamed(model, key, cores, everything, count, ahead, rounds, seconds) for count, ahead in counts}


def _streamed(
    model: Path, key: str, cores: list[int], everything: tuple[str, ...], num_streams: int, ahead: int, rounds: int, seconds: float
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"without": [], "with": []}
    with ExitStack() as stack:
        both: dict[str, Streams] = {}
        for name, more, used in (("without", (), ""), ("with", everything, key)):
            server = stack.enter_context(coordinator(model, cores, "--dead-after-s", "60", *more))
            workers = stack.enter_context(workers_of(server, model))
            both[name] = Streams(server, workers, num_streams, ahead * num_streams, used)
            stack.callback(both[name].close)

        def poll() -> None:
            for each in both.values():
                each.workers.poll()

        for number in range(rounds + 1):
            for name in sorted(both, reverse=bool(number % 2)):
                rates[name].append(both[name].window(seconds, poll))
    without, all_on = rates["without"][1:], rates["with"][1:]  # the first round warms up
    ratios = [w / wo for w, wo in zip(all_on, without, strict=True)]
    return {
        "tokens_per_cpu_s": {"without": round(statistics.median(without)), "with": round(statistics.median(all_on))},
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 3),
    }


if __name__ == "__main__":
    main()
