"""The prefill worker's process: one loop around the pure core.

wait for sockets, the step thread or the clock
receive   what coordinator and decode workers said     -> core
collect   the step that has run                        -> core
tell      the coordinator what came of it: the first tokens
launch    the core's next step                         -> step thread, which begins at once
carry out what the core wants done: messages, KV puts
report    heartbeat and cache events
"""

from __future__ import annotations

import logging
import os
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
from ..transport.handoff.actions import ToCoordinator
from ..transport.handoff.layer_slicing import LayerSlicing
from ..transport.handoff.retiring_end import RetiringEnd
from ..transport.handoff.sending_end import SendingEnd
from ..transport.messages.messages import Flip, Goodbye, Hello, Meet, ModelIdentity
from ..transport.movers.opening import offered
from ..transport.process.collector import settle_heap
from ..transport.process.otel import Tracing
from ..transport.process.worker_reports import WorkerReports
from ..transport.process.worker_trace import WorkerTrace
from ..worker.departure import Departure
from ..worker.gpu_telemetry import telemetry_of
from ..worker.role_host import RoleHost
from .core import PrefillAction, PrefillCore
from .scheduler import PrefillScheduler
from .settings import PrefillSettings
from .step_pipeline import StepPipeline

TICK_S = 0.05
SWITCH_S = 1e-4  # the step thread and the loop take turns: the default of 5 ms would show in every token
LINGER_S = 0.5  # for the last words
_log = logging.getLogger(__name__)


class PrefillWorker:
    """One prefill worker. ``run`` returns after ``stop``, or ``turn`` is called until it has ``stopped``."""

    def __init__(self, settings: PrefillSettings, model: WorkerModel, key: ClusterKey | None, host: RoleHost | None = None) -> None:
        """``host``: its process, where that can change its role, or has both."""
        self._settings, self._model = settings, model
        self._identity = msgspec.convert(model.identity, ModelIdentity)
        self._telemetry = telemetry_of(model.device)
        self._tracing = Tracing.open(settings.otlp_endpoint, "prefill", settings.worker_id) if settings.otlp_endpoint else None
        self._wakeup = Wakeup()
        self._poller = zmq.Poller()
        self.stopped = False
        self._host = host
        self._ticked = 0.0
        numbers = host.incarnations if host else incarnations()
        self._links = CoordinatorLinks(
            settings.coordinators, key, settings.worker_id, self, numbers, self._poller, settings.orphaned_after_s
        )
        scheduler = PrefillScheduler(
            host.blocks if host else BlockManager(len(model.pool)),
            self._identity.block_size,
            self._identity.fingerprint,
            settings.chunk_budget(model.device.type),
            settings.max_num_seqs,
            for_decode=host.for_decode if host and host.mixed else None,
            window=self._identity.window,
        )
        slicing = LayerSlicing(model.num_layers, self._identity.block_bytes, settings.kv_slicing)
        meet = self._meet(self._links.incarnation)
        self._core = PrefillCore(
            meet,
            scheduler,
            model.eos_token_ids,
            model.max_model_len,
            drain_timeout_s=settings.drain_timeout_s,
            slicing=slicing,
            is_local=host.hands_to_itself if host else lambda _: False,
        )
        plaintext = settings.plaintext_kv or settings.insecure
        self._sending = SendingEnd(self._core.sender, settings.worker_id, self._links.incarnation, key, model, self._poller, plaintext)
        self._departure = Departure(self._core, "prefill", host)
        trace = WorkerTrace(self._tracing.emit) if self._tracing is not None else None
        self._steps = StepPipeline(self._core, model, self._wakeup.set)
        self._readings = WorkerReadings(lambda: self._steps.busy_seconds, model.start_phases)
        telemetry = [source for source in (self._telemetry, self._readings) if source is not None]
        self._reports = WorkerReports(self._links, self._core, telemetry, trace, self._sending.transfers)
        self._grammars = GrammarThread(model.grammars, self._wakeup.set)
        self._poller.register(self._wakeup.fd, zmq.POLLIN)

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
        self._steps.collect(now)
        self._tell()  # the step that is over first: someone waits for its tokens
        self._receive(ready, now)
        if self._steps.launch(now) and self._steps.give_head_start():
            self._tell()
        self._carry_out()
        self._steps.launch(now)  # blocks that were just freed are used at once
        self._report(now)
        self._leave_if_drained(now)
        self._departure.raise_if_broken()

    def patience(self, most_s: float) -> float:
        """How long it may wait for something on its ``sockets``."""
        return min(most_s, 0.001) if self._sending.pending or self._steps.pending else most_s

    @property
    def sockets(self) -> list[tuple[zmq.Socket[bytes], int]]:
        """What wakes it, as ``zmq.zmq_poll`` takes it."""
        return list(self._poller.sockets)

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
        self._sending.receive(ready, now)
        self._grammars.report(self._core)
        if self._departure.ordered:
            self._core.drain(now)
        if now - self._ticked >= TICK_S:
            self._ticked = now
            self._core.tick(now)
            self._links.tick(now)

    def _tell(self) -> None:
        """First tokens leave before the next step is made and before any block is copied."""
        if reports := self._core.take_reports():
            self._reports.tell(*reports)

    def _carry_out(self) -> None:
        for action in self._core.take():
            self._do(action)

    def _report(self, now: float) -> None:
        if self._links.coordinators and self._reports.beat_is_due(now):
            self._reports.beat(now)

    def _leave_if_drained(self, now: float) -> None:
        if not self._departure.is_due(now):
            return
        _log.info("drained: nothing is left here, leaving")
        self._links.send(Goodbye(worker_id=self._settings.worker_id, incarnation=self._links.incarnation))
        self.stopped = True

    # --- what the core wants done ----------------------------------------------------------------

    def _do(self, action: PrefillAction) -> None:
        if isinstance(action, ToCoordinator):
            self._reports.tell(action.message)
        elif isinstance(action, CompileGrammar):
            self._grammars.submit(action)
        else:
            self._sending.carry_out(action)

    # --- incarnations ----------------------------------------------------------------------------

    def hello(self, incarnation: int) -> Hello:
        """How this worker introduces itself to the coordinator."""
        settings, model = self._settings, self._model
        return Hello(
            worker_id=settings.worker_id,
            incarnation=incarnation,
            role="prefill",
            host=host_identity(),
            pid=os.getpid(),
            model=self._identity,
            max_model_len=model.max_model_len,
            vocab_size=model.vocab_size,
            num_blocks=len(model.pool),
            max_num_seqs=settings.max_num_seqs,
            max_batch_tokens=settings.chunk_budget(model.device.type),
            device=self._telemetry.uuid if self._telemetry else "",
            process=self._host.process if self._host else "",
            mixed=self._host.mixed if self._host else False,
        )

    def welcomed(self, coordinator: int) -> None:
        """See ``LinkedWorker``."""
        self._readings.connected()
        self._core.drop_others(*self._links.coordinators)
        self._reports.tell_cache(everything=True)

    def fenced(self, incarnation: int) -> None:
        """See ``LinkedWorker``. What the old incarnation still owes its peers is said before its channels close."""
        self._core.drop_others(-1)
        self._carry_out()
        self._poller = zmq.Poller()
        self._sending.rename(incarnation, self._poller)
        self._core.rename(self._meet(incarnation))
        self._poller.register(self._wakeup.fd, zmq.POLLIN)
        self._links.watch_by(self._poller)

    def _meet(self, incarnation: int) -> Meet:
        settings = self._settings
        plaintext, worker_id = settings.plaintext_kv or settings.insecure, settings.worker_id
        movers = offered(settings.mover, plaintext, self._model.device.type == "cuda")
        return Meet(
            worker_id=worker_id, incarnation=incarnation, host=host_identity(), pid=os.getpid(), model=self._identity, movers=movers
        )

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
        retiring = RetiringEnd(self._sending, self._core.sender)
        self._close_the_rest()
        return retiring

    def _close_the_rest(self) -> None:
        self._steps.stop()
        self._grammars.stop()
        if self._telemetry is not None:
            self._telemetry.stop()
        if self._tracing is not None:
            self._tracing.close()
        self._links.close(LINGER_S)
        self._wakeup.close()


def run(settings: PrefillSettings) -> None:
    """The process: until SIGTERM or Ctrl-C."""
    key = None if settings.insecure or settings.key_file is None else load_key(settings.key_file)
    model = load_model(settings, prefill_tokens=settings.chunk_budget)
    worker = PrefillWorker(settings, model, key)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.leave())
    worker.run()
