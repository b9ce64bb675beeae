"""The coordinator alone: how many tokens a second it streams and how many requests a second it answers, on
one core.

    python -m splitserve.bench.http.streaming [--seconds 3] [--json bench/results/streaming.json]

The real coordinator process runs on the first core. On the last one, this process plays both workers (real
messages over real ZeroMQ, one message a decode step) and the clients, at most two steps ahead of the clients
(paced: each token is an event and a write of its own) or 32 (saturated: events may be joined). The floors are
the same feed into ``bare_protocol``, which writes each token by itself, and the same requests to
``bare_http``. Rates are per second of wall clock and, for machines that do other work too, per second of the
server's processor time.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...coordinator.http.call import Endpoint
from ...transport.channels.channels import DealerChannel
from ...transport.messages.messages import FROM_COORDINATOR, StepTokens, u32
from ..environment import environment, option_parser, write_record
from ..fake_workers import FakeWorkers
from .raw_client import RawClient, allow_many_files, request_bytes
from .streaming_servers import Server, bare_server, coordinator, model_folder, workers_of

AHEAD = {"paced": 2, "saturated": 32}
WINDOWS = 5
POLL_S = 0.02  # how often the fake workers look for messages and heartbeats while they stream
PATH: Endpoint = "/v1/chat/completions"
CHAT = {"model": "bench", "messages": [{"role": "user", "content": "What does os.path.join do?"}]}


def main() -> None:
    parser = option_parser(__doc__, to_json=True)
    parser.add_argument(
        "--seconds", type=float, default=3.0, help="length of a measurement's windows, all together"
    )
    options = parser.parse_args()
    allow_many_files()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        model = model_folder(Path(folder))
        results = {"environment": environment(), **measure(model, cores, options.seconds)}
    print(json.dumps(results, indent=1))
    write_record(options.json, results)


def measure(model: Path, cores: list[int], seconds: float) -> dict[str, Any]:
    """All figures, each with a fresh server."""
    results: dict[str, Any] = {}
    for num_streams in (64, 512):
        for name, ahead in AHEAD.items():
            with bare_server("bare_protocol", cores) as server:
                floor = bare_tokens(server, num_streams, ahead, seconds)
            with coordinator(model, cores) as server, workers_of(server, model) as workers:
                streamed = streamed_tokens(server, workers, num_streams, ahead, seconds)
            ratio = streamed["tokens_per_cpu_s"] / floor["tokens_per_cpu_s"]
            results[f"{num_streams}_streams_{name}"] = {
                **streamed,
                "bare_protocol": floor,
                "ratio_per_cpu_s": round(ratio, 3),
            }
    with bare_server("bare_http", cores) as server:
        bare = answered_requests(server, lambda: None, seconds)
    with coordinator(model, cores) as server, workers_of(server, model) as workers:
        answered = answered_requests(server, workers.poll, seconds)
    ratio = answered["requests_per_cpu_s"] / bare["requests_per_cpu_s"]
    results["requests"] = {**answered, "bare_http": bare, "ratio_per_cpu_s": round(ratio, 3)}
    with coordinator(model, cores) as server, workers_of(server, model) as workers:
        results["memory"] = memory(server, workers)
    return results


# --- measurements --------------------------------------------------------------------------------


def streamed_tokens(
    server: Server, workers: FakeWorkers, num_streams: int, ahead: int, seconds: float
) -> dict[str, Any]:
    """Tokens through all of the coordinator to ``num_streams`` chat streams."""
    client = RawClient(server.port, num_streams)
    client.send_all(request_bytes(PATH, {**CHAT, "stream": True, "max_tokens": 900_000}))
    open_streams(client, workers, num_streams)
    result = rate(server, client, ahead * num_streams, seconds, workers.step, workers.poll)
    client.close()
    return result


def bare_tokens(server: Server, num_streams: int, ahead: int, seconds: float) -> dict[str, Any]:
    """The same feed into the floor."""
    client = RawClient(server.port, num_streams)
    await_events(client, num_streams, lambda: None)
    channel = DealerChannel.connect(server.control, b"bench", None, FROM_COORDINATOR)
    rows = u32(list(range(num_streams)))
    step = StepTokens(coordinator=1, dispatches=rows, indices=rows, tokens=rows)

    def send() -> int:
        channel.send(step)
        return num_streams

    result = rate(server, client, ahead * num_streams, seconds, send, lambda: None)
    client.close()
    channel.close()
    return result


def rate(
    server: Server,
    client: RawClient,
    max_ahead: int,
    seconds: float,
    step: Callable[[], int],
    poll: Callable[[], None],
) -> dict[str, Any]:
    """Tokens are sent as long as fewer than ``max_ahead`` have not come."""
    sent = received = 0
    polled = 0.0
    client.num_reads = client.num_events = 0

    def stream() -> int:
        nonlocal sent, received, polled
        while sent - received < max_ahead:
            sent += step()
        events, blanks = client.count(0.01)
        received += blanks - events
        if (now := time.perf_counter()) >= polled + POLL_S:
            poll()
            polled = now
        return blanks - events

    return {
        **windows("tokens", stream, server, seconds),
        "tokens_per_event": round(received / client.num_events, 2),
        "events_per_read": round(client.num_events / client.num_reads, 2),
    }


def answered_requests(
    server: Server, poll: Callable[[], None], seconds: float, num_connections: int = 64
) -> dict[str, Any]:
    """Whole chat requests of one token each, a second: parsed, validated, templated, tokenized, dispatched,
    answered."""
    client = RawClient(server.port, num_connections)
    request = request_bytes(PATH, {**CHAT, "max_tokens": 1})
    client.send_all(request)

    def answer() -> int:
        poll()
        return client.answer_and_repeat(request, 0)

    found = windows("requests", answer, server, seconds)
    client.close()
    return {"connections": num_connections, **found}


def windows(name: str, work: Callable[[], int], server: Server, seconds: float) -> dict[str, int]:
    """Do ``work``, which returns a number of tokens or requests, again and again. Return how many a second:
    medians over windows, after a second to warm up."""
    walls: list[float] = []
    cpus: list[float] = []
    mark, cpu, done, end = time.perf_counter(), server.cpu_s(), 0, time.perf_counter() + 1
    while len(walls) < WINDOWS + 1:
        done += work()
        now = time.perf_counter()
        if now >= end:
            used = server.cpu_s()
            walls.append(done / (now - mark))
            cpus.append(done / max(1e-9, used - cpu))
            mark, cpu, done, end = now, used, 0, now + seconds / WINDOWS
    return {
        f"{name}_per_s": round(statistics.median(walls[1:])),
        "min": round(min(walls[1:])),
        "max": round(max(walls[1:])),
        f"{name}_per_cpu_s": round(statistics.median(cpus[1:])),
    }


def memory(
    server: Server, workers: FakeWorkers, num_streams: int = 1000, num_requests: int = 10_000
) -> dict[str, Any]:
    """Resident memory idle, with open streams, and what many requests leave behind."""
    idle = server.rss_mb()
    client = RawClient(server.port, num_streams)
    client.send_all(request_bytes(PATH, {**CHAT, "stream": True, "max_tokens": 900_000}))
    open_streams(client, workers, num_streams)
    stream_tokens(client, workers, num_streams, 100)
    open_mb = server.rss_mb()
    client.close()
    while len(workers.dispatches):
        workers.poll()
        time.sleep(0.01)
    requests(server, workers, 2_000)
    before = server.rss_mb()
    requests(server, workers, num_requests)
    after = server.rss_mb()
    return {
        "idle_mb": round(idle, 1),
        "streams": num_streams,
        "open_streams_mb": round(open_mb, 1),
        "requests": num_requests,
        "before_requests_mb": round(before, 1),
        "after_requests_mb": round(after, 1),
    }


def requests(server: Server, workers: FakeWorkers, count: int) -> None:
    """Send ``count`` whole requests of eight tokens each, 32 at a time."""
    client = RawClient(server.port, 32)
    request = request_bytes(PATH, {**CHAT, "max_tokens": 8})
    client.send_all(request)
    answers = 0
    while answers < count:
        workers.poll()
        if len(workers.dispatches):
            workers.step()
        answers += client.answer_and_repeat(request, 0.001)
    client.close()


def open_streams(client: RawClient, workers: FakeWorkers, num_streams: int) -> None:
    """Returns once each stream has its role and its first token."""
    await_events(client, 2 * num_streams, workers.poll)


def stream_tokens(client: RawClient, workers: FakeWorkers, num_streams: int, tokens_each: int) -> int:
    """Returns how many came: all that were sent."""
    sent = received = 0
    while sent < tokens_each * num_streams or received < sent:
        if sent < tokens_each * num_streams and sent - received < 2 * num_streams:
            sent += workers.step()
        events, blanks = client.count(0.01)
        received += blanks - events
        workers.poll()
    return received


def await_events(client: RawClient, num_events: int, poll: Callable[[], None]) -> None:
    received, deadline = 0, time.monotonic() + 60
    while received < num_events:
        poll()
        received += client.count(0.01)[0]
        if time.monotonic() > deadline:
            raise TimeoutError(f"{received} of {num_events} first events came")


if __name__ == "__main__":
    main()
