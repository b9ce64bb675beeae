"""Functions that are called for requests, and on which no request depends: the trace file, metrics, the usage
journal, steering, the dashboard.

One that raises is counted and logged, and nothing else happens: the request, the other listeners and the
client see none of it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Generic, ParamSpec

from .errors import ApiError

LOG_EVERY_S = 60.0
P = ParamSpec("P")
_log = logging.getLogger(__name__)


class ListenerFailures:
    """Calls listeners one at a time; logs each kind of failure once, then its count every LOG_EVERY_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        """By listener, for /metrics."""
        self._clock = clock
        # when it may be logged again, and how often it was not logged
        self._kinds: dict[tuple[str, str], tuple[float, int]] = {}

    def call(self, name: str, listener: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Never raises an Exception."""
        try:
            listener(*args, **kwargs)
        except Exception as error:
            self.note(name, error)

    def note(self, name: str, error: Exception) -> None:
        """``name`` has failed."""
        self.counts[name] += 1
        kind, now = (name, type(error).__name__), self._clock()
        if kind not in self._kinds:
            self._kinds[kind] = (now + LOG_EVERY_S, 0)
            # for those the sentence is enough
            traceback = None if isinstance(error, OSError | ApiError) else error
            _log.error(
                "%s has failed, requests go on without it: %s", name, _sentence(error), exc_info=traceback
            )
            return
        log_at, unlogged = self._kinds[kind]
        if now < log_at:
            self._kinds[kind] = (log_at, unlogged + 1)
        else:
            self._kinds[kind] = (now + LOG_EVERY_S, 0)
            _log.error(
                "%s has failed %d times more, requests go on without it: %s",
                name,
                unlogged + 1,
                _sentence(error),
            )


class Listeners(Generic[P]):
    """Called like one function, with which it calls all of them."""

    def __init__(self, failures: ListenerFailures | None = None) -> None:
        self.failures = failures or ListenerFailures()
        self._listeners: list[tuple[str, Callable[P, object]]] = []

    def add(self, name: str, listener: Callable[P, object]) -> None:
        """``name``: as the log and /metrics call it."""
        self._listeners.append((name, listener))
        self.failures.counts[name] += 0

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        for name, listener in self._listeners:
            self.failures.call(name, listener, *args, **kwargs)


def _sentence(error: Exception) -> str:
    return str(error) or type(error).__name__
