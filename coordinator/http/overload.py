"""Bounds on what all clients together may hold of the coordinator: connections, bodies, WebSocket messages,
fetched images, bytes to be tokenized, prompts, and answers that their clients have not read yet.

A connection is idle (between requests), sending (a request or message has begun and is not whole) or at work.
Where a bound is met, idle connections give way to new ones, then those that have been sending longest; what
is at work is never ended. Only where none is left is the new one refused. A few connections above the bound
are still taken: they may ask for the server's health.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, Protocol, get_args

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from ...transport.process.host import allow_many_files
from ..errors import ApiError, Unavailable

Resource = Literal[
    "connections", "body_bytes", "websocket_bytes", "image_bytes", "tokenizer_bytes", "prompt_bytes",
    "answer_bytes",
]  # fmt: skip
Action = Literal["idle_closed", "sending_ended", "reading_ended", "refused"]
RESOURCES: tuple[Resource, ...] = get_args(Resource)
ACTIONS: tuple[Action, ...] = get_args(Action)
RESERVED = 16
"""Connections above the bound that are taken to ask for the server's health."""
OTHER_FILES = 64
"""Descriptors left to workers' connections, files and pipes."""
SHED_EVERY_S = 0.01
CALM = 0.9
"""Share of its bound: a resource that has fallen below it is logged again when it next meets its bound."""
MAX_CONNECTIONS = 20_000
"""More are another coordinator process's work: each costs some 50 KB and a share of one event loop."""
MIN_HELD_BYTES = 64 << 20
"""Four bodies of the default size at once; a larger ``--max-body-mib`` raises it."""
BOUND = "64 MiB, or 4 times --max-body-mib"
WHAT: dict[Resource, str] = {
    "connections": (
        "connections are open, the most there may be (20,000, or by this process's limit of open files; "
        "--processes adds more)"
    ),
    "body_bytes": f"bytes of request bodies are held, the most there may be ({BOUND})",
    "websocket_bytes": f"bytes of WebSocket messages are held, the most there may be ({BOUND})",
    "image_bytes": f"bytes of fetched images are held, the most there may be ({BOUND})",
    "tokenizer_bytes": f"bytes of large requests are being read, the most there may be (half of {BOUND})",
    "prompt_bytes": f"bytes of prompts wait or run, the most there may be (4 times {BOUND})",
    "answer_bytes": f"bytes of answers wait to be read, the most there may be (4 times {BOUND})",
}
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OverloadLimits:
    """Numbers and bytes."""

    max_connections: int = MAX_CONNECTIONS
    """Or as many as the process may open files, if that is fewer."""
    max_held_bytes: int = MIN_HELD_BYTES
    """Bound of bodies, of WebSocket messages, and of fetched images; half of it for bodies that are
    tokenized, 4 times for prompts, and for answers."""


class Connection(Protocol):
    """A client's, HTTP or WebSocket."""

    def shed(self, error: ApiError | None) -> None:
        """Ends it, with this answer if one can be given."""


class Overload:
    """One for each process. Methods are the loop's, cheap and never raise."""

    def __init__(self, limits: OverloadLimits | None = None) -> None:
        limits = limits or OverloadLimits()
        held = limits.max_held_bytes
        self.limits: dict[Resource, int] = {
            "connections": max(RESERVED, min(limits.max_connections, _most_files() - OTHER_FILES - RESERVED)),
            "body_bytes": held,
            "websocket_bytes": held,
            "image_bytes": held,
            "tokenizer_bytes": held // 2,
            "prompt_bytes": 4 * held,
            "answer_bytes": 4 * held,
        }
        self.used: Counter[Resource] = Counter()
        self.actions: Counter[tuple[Resource, Action]] = Counter()
        self._idle: dict[Connection, None] = {}  # longest first
        self._sending: dict[Connection, None] = {}
        self._unread: dict[Connection, int] = {}  # bytes; longest first
        self._logged: set[Resource] = set()
        self._is_shedding = False

    # --- connections -----------------------------------------------------------------------------

    def opened(self, connection: Connection) -> bool:
        """A new one, idle. False: there is room for it only to ask for the server's health."""
        self.used["connections"] += 1
        crowded = self.used["connections"] > self.limits["connections"] and not self._shed_for("connections")
        if crowded:
            self._count("connections", "refused")
        self._idle[connection] = None
        return not crowded

    def closed(self, connection: Connection) -> None:
        self._idle.pop(connection, None)
        self._sending.pop(connection, None)
        self.read(connection)
        self.used["connections"] -= 1
        self._calm("connections")

    def idle(self, connection: Connection) -> None:
        """All that it asked for has been answered."""
        self._sending.pop(connection, None)
        self._idle[connection] = None

    def sending(self, connection: Connection) -> None:
        """A request or message has begun to come in."""
        self._idle.pop(connection, None)
        self._sending.setdefault(connection)

    def at_work(self, connection: Connection) -> None:
        """What it sent is whole."""
        self._idle.pop(connection, None)
        self._sending.pop(connection, None)

    def unread(self, connection: Connection, count: int) -> None:
        """Count the answers that wait for this client, until ``read``. Above the bound those that have waited
        longest are dropped, with their connections; never the only one."""
        self.read(connection)
        self._unread[connection] = count
        self.used["answer_bytes"] += count
        while self.used["answer_bytes"] > self.limits["answer_bytes"] and len(self._unread) > 1:
            slowest = next(iter(self._unread))
            self.read(slowest)
            self._count("answer_bytes", "reading_ended")
            slowest.shed(None)

    def read(self, connection: Connection) -> None:
        """Its client has read what waited."""
        self.used["answer_bytes"] -= self._unread.pop(connection, 0)
        self._calm("answer_bytes")

    # --- bytes -----------------------------------------------------------------------------------

    def hold(self, what: Resource, count: int) -> None:
        """Count received bytes. Above the bound, clients that are still sending are ended, from the next turn
        of the loop on."""
        self.used[what] += count
        if self.used[what] > self.limits[what] and not self._is_shedding:
            self._is_shedding = True
            asyncio.get_running_loop().call_soon(self._shed_senders, what)

    def take(self, what: Resource, count: int) -> bool:
        """Hold ``count`` more if there is room. Anything has room while nothing is held."""
        if self.used[what] and self.used[what] + count > self.limits[what]:
            self._count(what, "refused")
            return False
        self.used[what] += count
        return True

    def give_back(self, what: Resource, count: int) -> None:
        self.used[what] -= count
        self._calm(what)

    def collect(self) -> Iterator[Metric]:
        """For /metrics."""
        used = GaugeMetricFamily(
            "splitserve_overload_used", "What clients hold of a bounded resource.", labels=["resource"]
        )
        limit = GaugeMetricFamily("splitserve_overload_limit", "The bound of it.", labels=["resource"])
        acted = CounterMetricFamily(
            "splitserve_overload_actions",
            "Clients that gave way or were refused.",
            labels=["resource", "action"],
        )
        for name in RESOURCES:
            used.add_metric([name], self.used[name])
            limit.add_metric([name], self.limits[name])
            for action in ACTIONS:
                acted.add_metric([name, action], self.actions[name, action])
        yield from (used, limit, acted)

    def describe(self) -> list[Metric]:
        return []

    def _shed_senders(self, what: Resource) -> None:
        """One now, the next when this one's bytes are back."""
        self._is_shedding = self.used[what] > self.limits[what] and self._end_sender(what)
        if self._is_shedding:
            asyncio.get_running_loop().call_later(SHED_EVERY_S, self._shed_senders, what)

    def _shed_for(self, what: Resource) -> bool:
        """Ends one connection: the one that is idle longest, or else the one that has been sending
        longest."""
        if not self._idle:
            return self._end_sender(what)
        connection = next(iter(self._idle))
        del self._idle[connection]
        self._count(what, "idle_closed")
        connection.shed(None)
        return True

    def _end_sender(self, what: Resource) -> bool:
        if not self._sending:
            return False
        connection = next(iter(self._sending))
        del self._sending[connection]
        self._count(what, "sending_ended")
        error = "The server holds too many unfinished requests; send this one again."
        connection.shed(Unavailable(error, retry_after_s=1))
        return True

    def _count(self, what: Resource, action: Action) -> None:
        self.actions[what, action] += 1
        if what not in self._logged:
            self._logged.add(what)
            _log.warning(
                "%d %s; clients that are idle or slow give way, others may be refused",
                self.used[what],
                WHAT[what],
            )

    def _calm(self, what: Resource) -> None:
        if self._logged and self.used[what] < CALM * self.limits[what]:
            self._logged.discard(what)


def _most_files() -> int:
    """How many more files this process may open."""
    allow_many_files()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] - len(os.listdir("/proc/self/fd"))
