"""Streams at the front door: how many one coordinator process holds open, and what keys, limits, metering and
tracing cost each token."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..fake_workers import FakeWorkers
from .raw_client import RawClient, request_bytes
from .streaming import CHAT, PATH, POLL_S, open_streams, stream_tokens
from .streaming_servers import Server, coordinator, workers_of
from .trace_sink import trace_sink

OPEN_WITHIN_S = 300.0
ROUNDS, WINDOW_S = 15, 1.0  # with everything on, and without
PATIENCE_S = 60  # with workers: their thread is that of the clients, too, and may be busy


def streams(
    model: Path, tenants: Path, key: str, cores: list[int], num_streams: int = 10_000, tokens_each: int = 10
) -> dict[str, Any]:
    """All open at the same time, each with its first token and some more. Any error ends the measurement."""
    with (
        coordinator(model, cores, tenants_file=tenants, dead_after_s=PATIENCE_S) as server,
        workers_of(server, model) as workers,
    ):
        idle, cpu, begin = server.rss_mb(), server.cpu_s(), time.monotonic()
        client, request = (
            RawClient(server.port, 0),
            request_bytes(PATH, {**CHAT, "stream": True, "max_tokens": 900_000}, key),
        )
        opened = 0
        while opened < 2 * num_streams:  # each one's role, and its first token
            if len(client.sockets) < num_streams and opened >= 2 * len(client.sockets) - 400:
                client.connect(server.port, min(100, num_streams - len(client.sockets)), request)
            workers.poll()
            opened += client.count(0.001)[0]
            if time.monotonic() > begin + OPEN_WITHIN_S:
                raise TimeoutError(f"{opened} of {2 * num_streams} first events came")
        opened_s, open_mb = time.monotonic() - begin, server.rss_mb()
        begin = time.monotonic()
        received = stream_tokens(client, workers, num_streams, tokens_each)
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


class Streams:
    """Open streams of one server, fed by its workers for a window at a time."""

    def __init__(
        self, server: Server, workers: FakeWorkers, num_streams: int, max_ahead: int, key: str
    ) -> None:
        self._server, self.workers, self._max_ahead = server, workers, max_ahead
        self._client = RawClient(server.port, num_streams)
        self._client.send_all(request_bytes(PATH, {**CHAT, "stream": True, "max_tokens": 900_000}, key))
        open_streams(self._client, workers, num_streams)

    def window(self, seconds: float, poll: Callable[[], None]) -> float:
        """Tokens per second of the server's processor time, all of them received in the end. ``poll`` is
        called all the while."""
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


def streamed(model: Path, tenants: Path, key: str, cores: list[int]) -> dict[str, Any]:
    """Per second of the server's processor time, with and without: two servers on one core take turns, so
    that a round's ratio is of two neighbouring seconds; and the rounds' median."""
    with trace_sink() as endpoint:
        everything = {"tenants_file": tenants, "otlp_endpoint": endpoint}
        return {
            f"{count}_streams": _streamed(model, key, cores, everything, count, ahead)
            for count, ahead in ((64, 2), (512, 32))
        }


def _streamed(
    model: Path, key: str, cores: list[int], everything: dict[str, Any], num_streams: int, ahead: int
) -> dict[str, Any]:
    rates: dict[str, list[float]] = {"without": [], "with": []}
    with ExitStack() as stack:
        both: dict[str, Streams] = {}
        for name, more, used in (("without", {}, ""), ("with", everything, key)):
            server = stack.enter_context(coordinator(model, cores, dead_after_s=PATIENCE_S, **more))
            workers = stack.enter_context(workers_of(server, model))
            both[name] = Streams(server, workers, num_streams, ahead * num_streams, used)
            stack.callback(both[name].close)

        def poll() -> None:
            for each in both.values():
                each.workers.poll()

        for number in range(ROUNDS + 1):
            for name in sorted(both, reverse=bool(number % 2)):
                rates[name].append(both[name].window(WINDOW_S, poll))
    without, all_on = rates["without"][1:], rates["with"][1:]  # the first round warms up
    ratios = [w / wo for w, wo in zip(all_on, without, strict=True)]
    return {
        "tokens_per_cpu_s": {
            "without": round(statistics.median(without)),
            "with": round(statistics.median(all_on)),
        },
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 3),
    }
