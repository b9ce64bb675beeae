"""Sends a role's messages and heartbeats to its coordinators, and traces them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..transport.channels.coordinator_links import CoordinatorLinks
from ..transport.environment import Clock
from ..transport.handoff.layer_slicing import TransferClock
from ..transport.messages.messages import BlockEvents, Load, Message
from ..transport.process.reports import Telemetry, with_telemetry
from ..transport.process.worker_trace import WorkerTrace


class ReportingCore(Protocol):
    """A role's core, as far as its heartbeat goes."""

    def load(self, coordinator: int | None = None) -> Load: ...
    def block_events(self, everything: bool = False) -> BlockEvents | None: ...


class WorkerReports:
    """``telemetry`` and ``transfers`` are reported with the load; ``trace`` sees every message of a
    request."""

    def __init__(
        self,
        links: CoordinatorLinks,
        core: ReportingCore,
        telemetry: Sequence[Telemetry],
        trace: WorkerTrace | None,
        clock: Clock,
        transfers: TransferClock | None = None,
    ) -> None:
        self._links, self._core, self._clock = links, core, clock
        self._telemetry, self._trace, self._transfers = telemetry, trace, transfers
        self._sent_at = 0.0

    def received(self, message: Message, now: float) -> None:
        """Trace a message of a coordinator or a peer."""
        if self._trace is not None:
            self._trace.received(message, now)

    def send(self, *messages: Message) -> None:
        """Send the core's messages; each coordinator gets the load as it concerns that coordinator."""
        if any(isinstance(message, Load) for message in messages):
            self._links.report(self._load)
        self._links.send(*(message for message in messages if not isinstance(message, Load)))
        if self._trace is not None:
            self._trace.sent(messages, self._clock.now())

    def heartbeat_is_due(self, now: float) -> bool:
        """Return whether a heartbeat is due."""
        return now - self._sent_at >= self._links.heartbeat_s

    def send_heartbeat(self, now: float) -> None:
        """Send load and cache events."""
        self._sent_at = now
        if self._links.coordinators:
            self._links.report(self._load)
            self.send_cache_events()

    def send_cache_events(self, everything: bool = False) -> None:
        """Send what the prefix cache gained and lost; with ``everything``, all it holds, for a coordinator
        that is new here."""
        if (events := self._core.block_events(everything)) is not None:
            self._links.send(events)

    def _load(self, coordinator: int) -> Load:
        load = self._core.load(coordinator)
        if self._transfers is not None:
            load.counters.update(
                handoff_bytes=self._transfers.num_bytes, handoff_seconds=self._transfers.seconds
            )
        return with_telemetry(load, *self._telemetry)
