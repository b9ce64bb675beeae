"""What a worker's process has for each role that it plays, and what it reports of it: to the coordinator each
role is a worker of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import inf
from typing import ClassVar

from ..decode.core import DecodeCore
from ..engine.step.constraint import CompileGrammar
from ..engine.worker_readings import WorkerReadings
from ..prefill.core import PrefillCore
from ..transport.channels.coordinator_links import CoordinatorLinks
from ..transport.environment import Clock
from ..transport.handoff.layer_slicing import TransferClock
from ..transport.handoff.protocol import Join, PrefixOver, Supersede, ToCoordinator, ToPeer
from ..transport.handoff.receiver import HandoffReceiver
from ..transport.handoff.receiving_end import RECEIVING, ReceivingEnd
from ..transport.handoff.sending_end import SendingEnd
from ..transport.messages.messages import FROM_DECODE, Flip, Hello, Load, Meet, Message, Role
from ..transport.process.reports import Telemetry, with_telemetry
from ..transport.process.worker_trace import WorkerTrace
from .parts import WorkerParts
from .roles import Departure, RoleHost
from .settings import DecodeSettings, PrefillSettings


class WorkerReports:
    """Sends a role's messages and heartbeats to its coordinators, and traces them. ``telemetry`` and
    ``transfers`` are reported with the load; ``trace`` sees every message of a request."""

    def __init__(
        self,
        links: CoordinatorLinks,
        core: PrefillCore | DecodeCore,
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


LINGER_S = 0.5  # at most, for Goodbye's answer, and for the last messages


class PlayedRole(ABC):
    """Links to coordinators, a core, steps, both ends of handoffs, reports."""

    role: ClassVar[Role]
    core: PrefillCore | DecodeCore
    max_batch_tokens: int

    def __init__(
        self, settings: PrefillSettings | DecodeSettings, process: WorkerParts, host: RoleHost | None
    ) -> None:
        """``host``: the process, where it can change its role or plays both."""
        self._settings, self._process, self._host = settings, process, host
        self._parts = parts = process.open(settings, self.role)
        self._clock, self._tick_s, self._ticked = process.clock, process.times.tick, 0.0
        self._leaves_by = inf
        self._receiving = ReceivingEnd(
            parts.environment, parts.targets, settings.listen, parts.advertised_host, process.check_bytes
        )
        self.links = CoordinatorLinks(
            settings.coordinators,
            parts.environment.network,
            settings.worker_id,
            self,
            process.incarnations,
            settings.orphaned_after_s,
            process.discover,
        )
        self._make_core()
        self.steps = process.steps
        self.steps.add(self.core)
        self.departure = Departure(self.core, self.role, host)
        self.sending = SendingEnd(self.core.sender, self.core.worker, parts.environment, process.times.reach)
        self._readings = WorkerReadings(
            lambda: self.steps.busy_seconds, process.model.start_phases, self._clock.now
        )
        sources = (process.telemetry, self._readings, process.store, process.adapters)
        telemetry = [source for source in sources if source is not None]
        transfers = self.sending.transfers if self.role == "prefill" else None
        self._reports = WorkerReports(self.links, self.core, telemetry, parts.trace, self._clock, transfers)

    # --- what differs by role --------------------------------------------------------------------

    @abstractmethod
    def _make_core(self) -> None:
        """Set ``core`` and ``max_batch_tokens``."""

    def _receiver(self) -> HandoffReceiver:
        process = self._process
        return HandoffReceiver(
            (self._settings.worker_id, self.links.incarnation),
            process.model.identity,
            process.blocks,
            self._receiving.endpoints,
            lambda: self.core.room(),
            process.secret,
            process.times.handoff,
        )

    # --- the loop's verbs ------------------------------------------------------------------------

    def patience(self, most_s: float) -> float:
        """Return how many seconds the loop may wait for a socket, at most ``most_s``."""
        if self._receiving.has_checks or self.core.prefixes.pending:
            return 0.0
        return min(most_s, 0.001) if self.sending.pending or self.steps.pending else most_s

    def complete_steps(self, now: float) -> None:
        """Hand steps that are over to the core. Raises DeviceLostError."""
        self.steps.collect(now)

    def receive(self, ready: set[object], now: float) -> None:
        """Hand messages, blocks that arrived, compiled grammars and the passing of time to the core."""
        for message in self.links.receive(ready, now) if ready else ():
            self._reports.received(message, now)
            if isinstance(message, Flip):
                self.departure.flip(message.role, message.timeout_s, now)
            else:
                self.core.from_coordinator(message, now)
        if self._leaves_by == inf:  # later no peer's offer is granted: the blocks outlive a role that flips
            self._receiving.receive(ready, self.core, now, self._reports.received)
        self.sending.receive(ready, now)
        self.core.prefixes.advance(self._receiving.blocks_a_turn, now)
        self._parts.grammars.report(self.core)
        if self.departure.ordered:
            self.core.drain(now)
        if now - self._ticked >= self._tick_s:
            self._ticked = now
            self.core.tick(now)
            self.links.tick(now)

    def carry_out(self, now: float) -> None:
        """Do what the core wants done, and verify some of the blocks that have come."""
        self._carry_out(now)
        if self._receiving.has_checks:
            self._receiving.check(self.core, now)
            self._carry_out(now)

    def _carry_out(self, now: float) -> None:
        while actions := self.core.take(now):  # carrying out one may bring new ones
            for action in actions:
                if isinstance(action, ToCoordinator):
                    self._reports.send(action.message)
                elif isinstance(action, CompileGrammar):
                    self._parts.grammars.submit(action)
                elif isinstance(action, RECEIVING) or (
                    isinstance(action, ToPeer) and isinstance(action.message, FROM_DECODE)
                ):
                    self._receiving.carry_out(action)
                elif not isinstance(action, Join | Supersede | PrefixOver):  # the core's own
                    self.sending.carry_out(action)

    def report(self, now: float) -> None:
        """Send the heartbeat when it is due, once there is a coordinator."""
        if self._reports.heartbeat_is_due(now):
            self._receiving.release_dead_writers(self.core, now)
            if self.links.coordinators:
                self._reports.send_heartbeat(now)

    def has_ended(self, now: float) -> bool:
        """Return whether the role has drained, and its coordinators have answered its Goodbye or had time to.
        Raise EngineError if every step fails."""
        self.departure.raise_if_broken()
        if self._leaves_by == inf and self.departure.is_due(now):
            self._leaves_by = now + LINGER_S
            self.links.leave(now)
        return now >= self._leaves_by or (self._leaves_by < inf and self.links.have_left)

    def stop(self) -> None:
        """Release all but the model and the sending end."""
        self.steps.remove(self.core)
        self._parts.stop()
        self._receiving.close()
        self.links.close(LINGER_S)

    def close(self) -> None:
        """Release all but the model."""
        self.sending.close()
        self.stop()

    # --- incarnations ----------------------------------------------------------------------------

    def hello(self, incarnation: int) -> Hello:
        """Return how this worker introduces itself to the coordinator."""
        settings, process, host = self._settings, self._process, self._host
        return Hello(
            worker_id=settings.worker_id,
            incarnation=incarnation,
            role=self.role,
            host=self._parts.environment.network.host,
            pid=process.pid,
            model=process.model.identity,
            max_model_len=process.model.max_model_len,
            vocab_size=process.model.vocab_size,
            vocabulary=process.model.vocabulary,
            size=process.model.size,
            num_blocks=process.blocks.num_blocks,
            max_num_seqs=settings.max_num_seqs,
            max_batch_tokens=self.max_batch_tokens,
            device=process.model.device_uuid,
            process=host.process if host else "",
            mixed=host.mixed if host else False,
            home=host.home if host else "",
            peer_address=self._receiving.address,
            takes_images=process.model.takes_images,
            joins_frames=True,
        )

    def _meet(self) -> Meet:
        """Return how this worker introduces itself to decode workers that it hands over to."""
        return Meet(
            worker_id=self._settings.worker_id,
            incarnation=self.links.incarnation,
            host=self._parts.environment.network.host,
            pid=self._process.pid,
            model=self._process.model.identity,
            movers=self._parts.movers,
            gpu=self._parts.gpu,
        )

    def welcomed(self, coordinator: int) -> None:
        """See ``LinkedWorker``."""
        self._readings.connected()
        self.core.drop_others(*self.links.coordinators)
        self._reports.send_cache_events(everything=True)

    def fenced(self, incarnation: int) -> None:
        """See ``LinkedWorker``. The old incarnation's last messages to its peers leave before its channels
        close."""
        self.core.drop_others(-1)
        self.carry_out(self._clock.now())
        self.sending.rename(incarnation)
        self.core.rename(self._meet())

    def orphaned(self) -> None:
        """See ``LinkedWorker``."""
        self.core.drop_others(*self.links.coordinators)
