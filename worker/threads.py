"""Threads for calls of a system or a library that may hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

STOP_S = 1.0  # for the calls that threads have begun


class Threads:
    """Run one call after the other. They may hang: unlike those of ``concurrent.futures``, they keep no
    process from its end."""

    def __init__(self, count: int) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[..., Any], Sequence[Any]] | None] = SimpleQueue()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name="kv-store", daemon=True) for _ in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._calls.put((future, call, args))
        return future

    def stop(self) -> None:
        """Forget the calls that have not begun."""
        self._stopped = True
        for _ in self._threads:
            self._calls.put(None)

    def join(self) -> None:
        """Wait for the calls that have begun, up to ``STOP_S``."""
        until = time.monotonic() + STOP_S
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    def _run(self) -> None:
        while (work := self._calls.get()) is not None and not self._stopped:
            future, call, args = work
            if future.set_running_or_notify_cancel():
                future.set_result(call(*args))
