"""What a worker's process has for each role that it plays: to the coordinator each of them is a worker of its
own."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
import zmq

from ..decode.core import DecodeCore
from ..engine.cache.block_manager import BlockManager
from ..engine.sampling.constraint import CompileGrammar
from ..engine.sampling.grammar_thread import GrammarThread
from ..engine.worker_model import WorkerModel
from ..engine.worker_readings import WorkerReadings
from ..prefill.core import PrefillCore
from ..transport.channels.coordinator_links import CoordinatorLinks
from ..transport.channels.host import host_identity
from ..transport.channels.keys import ClusterKey
from ..transport.environment import Environment
from ..transport.handoff.actions import ToCoordinator
from ..transport.handoff.receiving_end import ReceivingEnd
from ..transport.handoff.sender import HandoffSender
from ..transport.handoff.sending_end import SendingEnd
from ..transport.live_environment import live_environment
from ..transport.messages.messages import Flip, Goodbye, Hello, Meet, ModelIdentity, Role
from ..transport.movers.opening import offered
from ..transport.movers.shm import SharedPool
from ..transport.process.otel import Tracing
from ..transport.process.worker_trace import WorkerTrace
from .gpu_telemetry import GpuTelemetry
from .reports import WorkerReports
from .roles import Departure, RoleHost
from .settings import DecodeSettings, PrefillSettings
from .steps import Steps

TICK_S = 0.05
LINGER_S = 0.5  # for the last messages


@dataclass(frozen=True, slots=True)
class Process:
    """What the roles of a process share. ``shared`` is the memory of the pool, where other processes of this
    host may map it; ``host`` is None where the process has one role and cannot change it; ``wake`` ends the
    loop's wait."""

    model: WorkerModel
    key: ClusterKey | None
    shared: SharedPool | None
    blocks: BlockManager
    incarnations: Callable[[], int]
    telemetry: GpuTelemetry | None
    wake: Callable[[], None]
    host: RoleHost | None


class PlayedRole(ABC):
    """Links to coordinators, a core, steps, both ends of handoffs, reports."""

    role: ClassVar[Role]
    core: PrefillCore | DecodeCore
    steps: Steps[Any]
    sender: HandoffSender
    max_batch_tokens: int

    def __init__(self, settings: PrefillSettings | DecodeSettings, process: Process) -> None:
        self._settings, self._process, model = settings, process, process.model
        self._identity = msgspec.convert(model.identity, ModelIdentity)
        self._ticked = 0.0
        self.poller = zmq.Poller()
        environment = live_environment(
            model, process.key, self.poller, settings.plaintext_kv or settings.insecure
        )
        self._receiving = self._open_receiving(environment)
        self.links = CoordinatorLinks(
            settings.coordinators,
            environment.network,
            settings.worker_id,
            self,
            process.incarnations,
            settings.orphaned_after_s,
        )
        self._make_core()
        self.departure = Departure(self.core, self.role, process.host)
        self.sending = SendingEnd(self.sender, settings.worker_id, self.links.incarnation, environment)
        endpoint = settings.otlp_endpoint
        self._tracing = Tracing.open(endpoint, self.role, settings.worker_id) if endpoint else None
        trace = WorkerTrace(self._tracing.emit) if self._tracing is not None else None
        self._readings = WorkerReadings(lambda: self.steps.busy_seconds, model.start_phases)
        telemetry = [source for source in (process.telemetry, self._readings) if source is not None]
        transfers = self.sending.transfers if self.role == "prefill" else None
        self._reports = WorkerReports(self.links, self.core, telemetry, trace, transfers)
        self._grammars = GrammarThread(model.grammars, process.wake)

    # --- what differs by role --------------------------------------------------------------------

    def _open_receiving(self, environment: Environment) -> ReceivingEnd | None:
        """Return the end where other workers hand over to this one, of a role that has one."""
        return None

    @abstractmethod
    def _make_core(self) -> None:
        """Set ``core``, ``steps``, ``sender`` and ``max_batch_tokens``."""

    @abstractmethod
    def _take(self, now: float) -> list[Any]:
        """Return the core's actions."""

    @abstractmethod
    def _rename(self, incarnation: int) -> None:
        """Have the core go on as this incarnation."""

    def _do(self, action: Any) -> None:
        """Carry out an action of a handoff."""
        self.sending.carry_out(action)

    # --- the loop's verbs ------------------------------------------------------------------------

    def patience(self, most_s: float) -> float:
        """Return how many seconds the loop may wait for a socket, at most ``most_s``."""
        if self._receiving is not None and self._receiving.has_checks:
            return 0.0
        return min(most_s, 0.001) if self.sending.pending or self.steps.pending else most_s

    def complete_steps(self, now: float) -> None:
        """Hand steps that are over to the core. Raises DeviceLostError."""
        self.steps.collect(now)

    def receive(self, ready: set[object], now: float) -> None:
        """Hand messages, blocks that arrived, compiled grammars and the passing of time to the core."""
        for message in self.links.receive(ready, now):
            self._reports.received(message, now)
            if isinstance(message, Flip):
                self.departure.flip(message.role, message.timeout_s, now)
            else:
                self.core.from_coordinator(message, now)
        if self._receiving is not None:
            assert isinstance(self.core, DecodeCore), "only decode workers are handed over to"
            self._receiving.receive(ready, self.core, now, self._reports.received)
        self.sending.receive(ready, now)
        self._grammars.report(self.core)
        if self.departure.ordered:
            self.core.drain(now)
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self.core.tick(now)
            self.links.tick(now)

    def launch(self, now: float) -> None:
        """Submit the core's next step, if the step thread wants one."""
        self.steps.launch(now)

    def carry_out(self, now: float) -> None:
        """Do what the core wants done."""
        while actions := self._take(now):  # carrying out one may bring new ones
            for action in actions:
                if isinstance(action, ToCoordinator):
                    self._reports.send(action.message)
                elif isinstance(action, CompileGrammar):
                    self._grammars.submit(action)
                else:
                    self._do(action)

    def report(self, now: float) -> None:
        """Send the heartbeat when it is due."""
        if self.links.coordinators and self._reports.heartbeat_is_due(now):
            self._reports.send_heartbeat(now)

    def has_ended(self, now: float) -> bool:
        """Return whether the role has drained; its coordinators are told. Raises EngineError if every step
        fails."""
        self.departure.raise_if_broken()
        if not self.departure.is_due(now):
            return False
        self.links.send(Goodbye(worker_id=self._settings.worker_id, incarnation=self.links.incarnation))
        return True

    def stop(self) -> None:
        """Release all but the model and the sending end."""
        self.steps.stop()
        self._grammars.stop()
        if self._tracing is not None:
            self._tracing.close()
        if self._receiving is not None:
            self._receiving.close()
        self.links.close(LINGER_S)

    def close(self) -> None:
        """Release all but the model."""
        self.sending.close()
        self.stop()

    # --- incarnations ----------------------------------------------------------------------------

    def hello(self, incarnation: int) -> Hello:
        """Return how this worker introduces itself to the coordinator."""
        settings, model = self._settings, self._process.model
        host, telemetry = self._process.host, self._process.telemetry
        return Hello(
            worker_id=settings.worker_id,
            incarnation=incarnation,
            role=self.role,
            host=host_identity(),
            pid=os.getpid(),
            model=self._identity,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            num_blocks=len(model.pool),
            max_num_seqs=settings.max_num_seqs,
            max_batch_tokens=self.max_batch_tokens,
            device=telemetry.uuid if telemetry else "",
            process=host.process if host else "",
            mixed=host.mixed if host else False,
            peer_address=self._receiving.address if self._receiving is not None else "",
        )

    def _meet(self) -> Meet:
        """Return how this worker introduces itself to decode workers that it hands over to."""
        settings, on_gpu = self._settings, self._process.model.device.type == "cuda"
        if self._receiving is not None:
            movers = self._receiving.endpoints.movers
        else:
            movers = offered(settings.mover, settings.plaintext_kv or settings.insecure, on_gpu)
        return Meet(
            worker_id=settings.worker_id,
            incarnation=self.links.incarnation,
            host=host_identity(),
            pid=os.getpid(),
            model=self._identity,
            movers=movers,
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
        self.carry_out(time.monotonic())
        self.sending.rename(incarnation)
        self._rename(incarnation)

    def orphaned(self) -> None:
        """See ``LinkedWorker``."""
        self.core.drop_others(*self.links.coordinators)
