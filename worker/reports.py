"""Everything that a worker says to its coordinators, and what its traces show of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from ..transport.channels.coordinator_links import CoordinatorLinks
from ..transport.handoff.transfer_clock import TransferClock
from ..transport.messages.messages import BlockEvents, Load, Message
from ..transport.process.reports import Telemetry, with_telemetry
from ..transport.process.worker_trace import WorkerTrace


class ReportingCore(Protocol):
    """A worker's core, as far as its heartbeat goes."""

    def load(self, coordinator: int | None = None) -> Load: ...
    def block_events(self, everything: bool = False) -> BlockEvents | None: ...


class WorkerReports:
    """``telemetry``, ``transfers``: reported with the load; ``trace``: hears all that is said of a request."""

    def __init__(
        self,
        links: CoordinatorLinks,
        core: ReportingCore,
        telemetry: Sequence[Telemetry],
        trace: WorkerTrace | None,
        transfers: TransferClock | None = None,
    ) -> None:
        self._links, self._core = links, core
        self._telemetry, self._trace, self._transfers = telemetry, trace, transfers
        self._beaten = 0.0

    def heard(self, message: Message, now: float) -> None:
        """From a coordinator, or from a peer: only the trace wants to know."""
        if self._trace is not None:
            self._trace.heard(message, now)

    def tell(self, *messages: Message) -> None:
        """What the core has to say; a load says to each coordinator what concerns it."""
        if any(isinstance(message, Load) for message in messages):
            self._links.report(self._load)
        self._links.send(*(message for message in messages if not isinstance(message, Load)))
        if self._trace is not None:
            self._trace.said(messages, time.monotonic())

    def beat_is_due(self, now: float) -> bool:
        """Whether it is time for a heartbeat."""
        return now - self._beaten >= self._links.heartbeat_s

    def beat(self, now: float) -> None:
        """The heartbeat: load and cache events."""
        self._beaten = now
        if self._links.coordinators:
            self._links.report(self._load)
            self.tell_cache()

    def tell_cache(self, everything: bool = False) -> None:
        """What the prefix cache gained and lost; with ``everything``, all it has, for one who knows nothing of it yet."""
        if (events := self._core.block_events(everything)) is not None:
            self._links.send(events)

    def _load(self, coordinator: int) -> Load:
        load = self._core.load(coordinator)
        if self._transfers is not None:
            load.counters.update(handoff_bytes=self._transfers.num_bytes, handoff_seconds=self._transfers.seconds)
        return with_telemetry(load, *self._telemetry)
