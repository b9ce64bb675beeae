"""Another client beside an attack, in a process of its own: what it sees of the server while others
misbehave."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import NamedTuple

import httpx

PATIENCE_S = 60.0
EVERY_S = 0.1


class Seen(NamedTuple):
    """So far. ``longest_gap_s``: between two reads of one stream."""

    num_reads: int = 0
    longest_gap_s: float = 0.0
    slowest_health_s: float = 0.0
    health_failures: int = 0
    stream_failures: int = 0


class Bystander:
    """``seen`` is at most some tenths of a second old."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._seen = Seen()

    @property
    def seen(self) -> Seen:
        while self._pipe.poll():
            self._seen = self._pipe.recv()
        return self._seen

    def wait(self) -> None:
        """Until its first stream has begun."""
        deadline = time.monotonic() + PATIENCE_S
        while not self.seen.num_reads:
            if time.monotonic() > deadline:
                raise RuntimeError("another client's stream did not begin")
            time.sleep(EVERY_S)


@contextmanager
def beside(port: int, num_tokens: int, key: str = "") -> Iterator[Bystander]:
    """Streams of ``num_tokens`` tokens, one after the other, and /health ten times a second."""
    here, there = multiprocessing.get_context("spawn").Pipe(duplex=False)
    process = multiprocessing.get_context("spawn").Process(
        target=_watch, args=(port, num_tokens, key, there), daemon=True
    )
    process.start()
    try:
        yield Bystander(here)
    finally:
        process.kill()
        process.join()
        here.close()
        there.close()


class _Watch:
    def __init__(self, port: int, num_tokens: int, key: str) -> None:
        self._base = f"http://127.0.0.1:{port}"
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._body = {
            "prompt": "Once upon a time",
            "max_tokens": num_tokens,
            "stream": True,
            "ignore_eos": True,
        }
        self._num_reads = self._health_failures = self._stream_failures = 0
        self._gap = self._health = 0.0
        self._read_at = self._asked_at = 0.0  # 0 where nothing is awaited

    def read(self) -> None:
        """For ever."""
        while True:
            try:
                with httpx.stream(
                    "POST",
                    f"{self._base}/v1/completions",
                    json=self._body,
                    headers=self._headers,
                    timeout=PATIENCE_S,
                ) as stream:
                    stream.raise_for_status()
                    for _ in stream.iter_raw():
                        self._gap = self._longest_gap()
                        self._read_at = time.monotonic()
                        self._num_reads += 1
            except httpx.HTTPError:
                self._stream_failures += 1
                time.sleep(EVERY_S)
            self._read_at = 0.0

    def ask(self) -> None:
        """For ever."""
        while True:
            self._asked_at = time.monotonic()
            try:
                httpx.get(f"{self._base}/health", timeout=PATIENCE_S).raise_for_status()
            except httpx.HTTPError:
                self._health_failures += 1
            self._health = self._slowest_health()
            self._asked_at = 0.0
            time.sleep(EVERY_S)

    def seen(self) -> Seen:
        """What it waits for now counts already."""
        return Seen(
            self._num_reads,
            self._longest_gap(),
            self._slowest_health(),
            self._health_failures,
            self._stream_failures,
        )

    def _longest_gap(self) -> float:
        return max(self._gap, time.monotonic() - since if (since := self._read_at) else 0.0)

    def _slowest_health(self) -> float:
        return max(self._health, time.monotonic() - since if (since := self._asked_at) else 0.0)


def _watch(port: int, num_tokens: int, key: str, pipe: Connection) -> None:
    watch = _Watch(port, num_tokens, key)
    for work in (watch.read, watch.ask):
        threading.Thread(target=work, daemon=True).start()
    while True:
        time.sleep(EVERY_S)
        pipe.send(watch.seen())
