"""The decode worker's process: one loop around the pure core.

wait for sockets, the step thread or the clock
receive   what coordinator and prefill workers said, KV blocks that arrived   -> core
collect   the step that has run                                               -> core
launch    the core's next step, before the one that runs has ended            -> step thread
carry out what the core wants done: messages, leases
check     some of the blocks that have arrived
report    heartbeat and cache events
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import sys
import time

import msgspec
import zmq

from ..engine.cache.block_manager import BlockManager
from ..engine.load_model import load_model
from ..engine.sampling.constraint import CompileGrammar
from ..engine.sampling.grammar_thread import GrammarThread
from ..engine.worker_model import WorkerModel
from ..engine.worker_readings import WorkerReadings
from ..transport.channels.coordinator_links import CoordinatorLinks
from ..transport.channels.host import allow_many_files, host_identity
from ..transport.channels.incarnation import incarnations
from ..transport.channels.keys import ClusterKey, load_key
from ..transport.channels.wakeup import Wakeup
from ..transport.handoff.actions import Join, Supersede, TellTokens, ToCoordinator, ToPeer
from ..transport.handoff.handoff import HandoffTimes
from ..transport.handoff.receiver import HandoffReceiver
from ..transport.handoff.retiring_end import RetiringEnd
from ..transport.handoff.sending_end import SendingEnd
from ..transport.messages.messages import FROM_DECODE, SECRET_BYTES, Flip, Goodbye, Hello, Meet, ModelIdentity
from ..transport.movers.shm import SharedPool
from ..transport.process.collector import settle_heap
from ..transport.process.otel import Tracing
from ..transport.process.worker_reports import WorkerReports
from ..transport.process.worker_trace import WorkerTrace
from ..worker.departure import Departure
from ..worker.gpu_telemetry import telemetry_of
from ..worker.role_host import RoleHost
from .core import DecodeAction, DecodeCore
from .receiving_end import RECEIVING, ReceivingEnd
from .scheduler import DecodeScheduler
from .settings import DecodeSettings
from .step_pipeline import StepPipeline

TICK_S = 0.05
SWITCH_S = 1e-4  # the step thread and the loop take turns: the default of 5 ms would show in every token
LINGER_S = 0.5  # for the last words
_log = logging.getLogger(__name__)


class DecodeWorker:
    """One decode worker. ``run`` returns after ``stop``, or ``turn`` is called until it has ``stopped``."""

    def __init__(
        self,
        settings: DecodeSettings,
        model: WorkerModel,
        key: ClusterKey | None,
        shared: SharedPool | None = None,
        host: RoleHost | None = None,
    ) -> None:
        """``shared``: the pool's memory, where other processes of this host may map it; ``host``: its process, where that can change its
        role."""
        self._settings, self._model = settings, model
        self._identity = msgspec.convert(model.identity, ModelIdentity)
        self._telemetry = telemetry_of(model.device)
        self._tracing = Tracing.open(settings.otlp_endpoint, "decode", settings.worker_id) if settings.otlp_endpoint else None
        self._wakeup = Wakeup()
        self.stopped = False
        self._host = host
        self._ticked = 0.0
        self._receiving = ReceivingEnd(settings, model, key, shared)
        self._poller = self._make_poller()
        numbers = host.incarnations if host else incarnations()
        self._links = CoordinatorLinks(
            settings.coordinators, key, settings.worker_id, self, numbers, self._poller, settings.orphaned_after_s
        )
        blocks = host.blocks if host else BlockManager(len(model.pool))
        size = self._identity.block_size
        scheduler = DecodeScheduler(
            blocks, size, settings.max_num_seqs, model.max_model_len, model.eos_token_ids, window=self._identity.window
        )
        worker = (settings.worker_id, self._links.incarnation)
        receiver = HandoffReceiver(
            worker,
            self._identity,
            blocks,
            self._receiving.endpoints,
            lambda: self._core.room(),
            lambda: secrets.token_bytes(SECRET_BYTES),
            HandoffTimes(lease=settings.lease_s),
        )
        meet = self._meet(self._receiving.endpoints.movers)
        self._core = DecodeCore(worker, scheduler, receiver, self._identity.fingerprint, meet, settings.drain_timeout_s)
        self._departure = Departure(self._core, "decode", host)
        trace = WorkerTrace(self._tracing.emit) if self._tracing is not None else None
        self._steps = StepPipeline(self._core, model, self._wakeup.set)
        self._readings = WorkerReadings(lambda: self._steps.busy_seconds, model.start_phases)
        telemetry = [source for source in (self._telemetry, self._readings) if source is not None]
        self._reports = WorkerReports(self._links, self._core, telemetry, trace)
        self._grammars = GrammarThread(model.grammars, self._wakeup.set)
        assert self._core.moving is not None, "it has said how it meets others"
        sender, plaintext = self._core.moving.sender, settings.plaintext_kv or settings.insecure
        self._sending = SendingEnd(sender, settings.worker_id, self._links.incarnation, key, model, self._poller, plaintext)

    def stop(self) -> None:
        """From a signal handler or another thread: leave the loop."""
        self.stopped = True
        self._wakeup.set()

    @property
    def drains(self) -> bool:
        """It leaves as soon as nothing is left here."""
        return self._departure.has_begun

    def drain(self) -> None:
        """Leaves as soon as nothing is left here."""
        if not self.drains:
            self._core.drain(time.monotonic())

    def leave(self) -> None:
        """From a signal handler: drain, then leave the loop; said again, leave at once."""
        self.stopped, self._departure.ordered = self._departure.ordered, True
        self._wakeup.set()

    def run(self) -> None:
        """The loop."""
        allow_many_files()
        sys.setswitchinterval(SWITCH_S)
        settle_heap()
        try:
            while not self.stopped:
                self.turn()
        finally:
            self.close()

    def turn(self, patience_s: float = TICK_S) -> None:
        """Once around; it waits for something to do for so long."""
        ready = self._wait(patience_s)
        now = time.monotonic()
        self._receive(ready, now)
        self._steps.collect(now)
        self._steps.launch(now)
        self._carry_out(now)
        if self._receiving.has_checks:
            self._receiving.check(self._core, now)
            self._carry_out(now)
        self._steps.launch(now)  # what was just verified joins at once
        self._report(now)
        self._leave_if_drained(now)
        self._departure.raise_if_broken()

    def patience(self, most_s: float) -> float:
        """How long it may wait for something on its ``sockets``."""
        if self._receiving.has_checks:
            return 0.0
        return min(most_s, 0.001) if self._sending.pending else most_s

    @property
    def sockets(self) -> list[tuple[zmq.Socket[bytes], int]]:
        """What wakes it, as ``zmq.zmq_poll`` takes it."""
        return list(self._poller.sockets)

    @property
    def num_growing_blocks(self) -> int:
        """To be left to the sequences that run here."""
        return self._core.room()[1]

    # --- the loop's verbs ------------------------------------------------------------------------

    def _wait(self, patience_s: float) -> set[object]:
        """Returns the sockets with something to read."""
        ready = {socket for socket, _ in self._poller.poll(int(self.patience(patience_s) * 1000))}
        if self._wakeup.fd in ready:
            self._wakeup.clear()
        return ready

    def _receive(self, ready: set[object], now: float) -> None:
        for message in self._links.receive(ready, now):
            self._reports.heard(message, now)
            if isinstance(message, Flip):
                self._departure.flip(message.role, message.timeout_s, now)
            else:
                self._core.from_coordinator(message, now)
        self._receiving.receive(ready, self._core, now, self._reports.heard)
        self._sending.receive(ready, now)
        self._grammars.report(self._core)
        if self._departure.ordered:
            self._core.drain(now)
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self._core.tick(now)
            self._links.tick(now)

    def _carry_out(self, now: float) -> None:
        while actions := self._core.take(now):  # a check of blocks may bring new ones
            for action in actions:
                self._do(action)

    def _report(self, now: float) -> None:
        if self._reports.beat_is_due(now):
            self._receiving.bury_dead_writers(self._core, now)
            self._reports.beat(now)

    def _leave_if_drained(self, now: float) -> None:
        if not self._departure.is_due(now):
            return
        _log.info("drained: nothing is left here, leaving")
        self._links.send(Goodbye(worker_id=self._settings.worker_id, incarnation=self._links.incarnation))
        self.stopped = True

    # --- what the core wants done ----------------------------------------------------------------

    def _do(self, action: DecodeAction) -> None:
        if isinstance(action, ToCoordinator):
            self._reports.tell(action.message)
        elif isinstance(action, CompileGrammar):
            self._grammars.submit(action)
        elif isinstance(action, RECEIVING) or (isinstance(action, ToPeer) and isinstance(action.message, FROM_DECODE)):
            self._receiving.carry_out(action)
        elif not isinstance(action, Join | Supersede | TellTokens):  # the core's own; and live steps are never foretold
            self._sending.carry_out(action)

    # --- incarnations --------------------------------------------------------------------

    def _meet(self, movers: tuple[str, ...]) -> Meet:
        """How this worker introduces itself to other decode workers, as one that hands over."""
        worker_id, incarnation = self._settings.worker_id, self._links.incarnation
        return Meet(
            worker_id=worker_id, incarnation=incarnation, host=host_identity(), pid=os.getpid(), model=self._identity, movers=movers
        )

    def _make_poller(self) -> zmq.Poller:
        poller = zmq.Poller()
        poller.register(self._wakeup.fd, zmq.POLLIN)
        self._receiving.watch_by(poller)
        return poller

    def hello(self, incarnation: int) -> Hello:
        """How this worker introduces itself to the coordinator."""
        settings, model = self._settings, self._model
        return Hello(
            worker_id=settings.worker_id,
            incarnation=incarnation,
            role="decode",
            host=host_identity(),
            pid=os.getpid(),
            model=self._identity,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            num_blocks=len(model.pool),
            max_num_seqs=settings.max_num_seqs,
            max_batch_tokens=settings.max_num_seqs,
            device=self._telemetry.uuid if self._telemetry else "",
            process=self._host.process if self._host else "",
            mixed=self._host.mixed if self._host else False,
            peer_address=self._receiving.address,
        )

    def welcomed(self, coordinator: int) -> None:
        """See ``LinkedWorker``."""
        self._readings.connected()
        self._core.drop_others(*self._links.coordinators)
        self._reports.tell_cache(everything=True)

    def fenced(self, incarnation: int) -> None:
        """See ``LinkedWorker``."""
        self._core.drop_others(-1)
        self._carry_out(time.monotonic())  # what the old incarnation still owes its peers
        self._poller = self._make_poller()
        self._links.watch_by(self._poller)
        self._sending.rename(incarnation, self._poller)
        self._core.rename(incarnation)

    def orphaned(self) -> None:
        """See ``LinkedWorker``."""
        self._core.drop_others(*self._links.coordinators)

    def close(self) -> None:
        """Lets go of all but the model."""
        self._sending.close()
        self._close_the_rest()

    def retire(self) -> RetiringEnd:
        """Instead of ``close``, of one that has stopped in a process that goes on: lets go of all but what is left to be said to those that
        it wrote to."""
        assert self._core.moving is not None
        retiring = RetiringEnd(self._sending, self._core.moving.sender)
        self._close_the_rest()
        return retiring

    def _close_the_rest(self) -> None:
        self._steps.stop()
        self._grammars.stop()
        if self._telemetry is not None:
            self._telemetry.stop()
        if self._tracing is not None:
            self._tracing.close()
        self._receiving.close()
        self._links.close(LINGER_S)
        self._wakeup.close()


def run(settings: DecodeSettings) -> None:
    """The process: until SIGTERM or Ctrl-C."""
    key = None if settings.insecure or settings.key_file is None else load_key(settings.key_file)
    shared: list[SharedPool] = []

    def allocate(num_bytes: int) -> memoryview:
        shared.append(SharedPool.create(num_bytes))
        return shared[0].buffer

    model = load_model(settings, allocate if settings.mover in ("auto", "shm") else None, settings.max_num_seqs)
    worker = DecodeWorker(settings, model, key, shared[0] if shared else None)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.leave())
    worker.run()
