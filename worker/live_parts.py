"""The live parts of a worker: sockets, movers between processes, the model on its step threads, telemetry."""

from __future__ import annotations

import os
import secrets
from dataclasses import replace

import msgspec
import zmq

from ..decode.core import DecodeCore
from ..engine.cache.block_manager import BlockManager
from ..engine.sampling.grammar_thread import GrammarThread
from ..engine.worker_model import WorkerModel
from ..prefill.core import PrefillCore
from ..transport.channels.keys import ClusterKey
from ..transport.handoff.receiving_end import CHECK_BYTES
from ..transport.live_environment import MonotonicClock, live_environment
from ..transport.messages.incarnation import incarnations
from ..transport.messages.messages import SECRET_BYTES, ModelIdentity
from ..transport.movers.opening import offered, open_targets
from ..transport.movers.shm import SharedPool
from ..transport.movers.targets import MoverTargets
from ..transport.process.host import advertised_host
from ..transport.process.otel import Tracing
from ..transport.process.wakeup import Wakeup
from ..transport.process.worker_trace import WorkerTrace
from .gpu_telemetry import telemetry_of
from .parts import ModelFacts, WorkerTimes
from .settings import DecodeSettings, FlexibleSettings, PrefillSettings
from .steps import DecodeSteps, PrefillSteps
from .turns import RunnerInTurns


class LiveParts:
    """See ``WorkerParts``. ``shared``: the pool's memory, where other processes of this host may map it."""

    def __init__(
        self,
        settings: PrefillSettings | DecodeSettings | FlexibleSettings,
        model: WorkerModel,
        key: ClusterKey | None,
        shared: SharedPool | None = None,
    ) -> None:
        if isinstance(settings, FlexibleSettings):
            turns = RunnerInTurns(model.runner, model.launch)
            model = replace(model, runner=turns, launch=turns.launch if model.launch is not None else None)
        self.loaded, self.key, self.shared = model, key, shared
        self.clock, self.times, self.check_bytes = MonotonicClock(), WorkerTimes(), CHECK_BYTES
        self.blocks, self.pid, self.incarnation = BlockManager(len(model.pool)), os.getpid(), incarnations()
        self.telemetry = telemetry_of(model.device)
        self.model = ModelFacts(
            msgspec.convert(model.identity, ModelIdentity),
            model.eos_token_ids,
            model.max_model_len,
            model.vocab_size,
            model.num_layers,
            model.device.type,
            self.telemetry.uuid if self.telemetry else "",
            model.start_phases,
        )
        self.poller, self._wakeup = zmq.Poller(), Wakeup()
        self.poller.register(self._wakeup.fd, zmq.POLLIN)
        self.wake = self._wakeup.set

    def secret(self) -> bytes:
        return secrets.token_bytes(SECRET_BYTES)

    def open(self, settings: PrefillSettings | DecodeSettings, role: str) -> LiveRoleParts:
        return LiveRoleParts(self, settings, role)

    def decode_steps(self, core: DecodeCore) -> DecodeSteps:
        return DecodeSteps(core, self.loaded, self.wake)

    def prefill_steps(self, core: PrefillCore) -> PrefillSteps:
        return PrefillSteps(core, self.loaded, self.wake)

    def wait(self, patience_s: float) -> set[object]:
        ready: set[object] = {socket for socket, _ in self.poller.poll(int(patience_s * 1000))}
        if self._wakeup.fd in ready:
            self._wakeup.clear()
        return ready

    def close(self) -> None:
        if self.telemetry is not None:
            self.telemetry.stop()
        self._wakeup.close()


class LiveRoleParts:
    """See ``RoleParts``."""

    targets: MoverTargets
    advertised_host: str

    def __init__(self, parts: LiveParts, settings: PrefillSettings | DecodeSettings, role: str) -> None:
        self._poller, model = parts.poller, parts.loaded
        plaintext = settings.plaintext_kv or settings.insecure
        self.environment = live_environment(model, parts.key, parts.poller, plaintext)
        self.movers = offered(settings.mover, plaintext, model.device.type == "cuda")
        self._watched: list[int] = []
        if role == "decode":
            assert isinstance(settings, DecodeSettings)
            self.advertised_host = advertised_host(
                settings.listen, settings.advertise_host, settings.coordinators[0]
            )
            self.targets = open_targets(
                self.movers,
                model.pool,
                parts.shared,
                settings.data_listen,
                self.advertised_host,
                plaintext,
                model.device_blocks,
            )
            self.movers = self.targets.endpoints.movers
            self._watched = self.targets.fds
        for fd in self._watched:
            parts.poller.register(fd, zmq.POLLIN)
        self.grammars = GrammarThread(model.grammars, parts.wake)
        endpoint = settings.otlp_endpoint
        self._tracing = Tracing.open(endpoint, role, settings.worker_id) if endpoint else None
        self.trace = WorkerTrace(self._tracing.emit) if self._tracing is not None else None

    def stop(self) -> None:
        self.grammars.stop()
        if self._tracing is not None:
            self._tracing.close()
        for fd in self._watched:
            self._poller.unregister(fd)
