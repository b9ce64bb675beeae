"""The live parts of a worker: sockets, movers between processes, the model on its step threads, telemetry."""

from __future__ import annotations

import os
import secrets
import threading
from functools import partial
from pathlib import Path

import zmq

from ..decode.drafts import DRAFT_LAYERS
from ..engine.adapters.slots import AdapterSlots
from ..engine.cache.block_manager import BlockManager
from ..engine.device import mark_stream
from ..engine.settings import KV_STORE_URL, WorkerSettings
from ..engine.step.grammar import GrammarThread
from ..engine.step.step_progress import LayerProgress, StepForecast
from ..engine.step.step_thread import StepThread
from ..engine.worker_model import WorkerModel
from ..transport.channels.coordinator_links import NameWatch
from ..transport.channels.keys import ClusterKey
from ..transport.live_environment import MonotonicClock, live_environment
from ..transport.messages.fields import incarnations
from ..transport.messages.messages import SECRET_BYTES
from ..transport.movers.opening import gpu_of, offered, open_targets
from ..transport.movers.shm import SharedPool
from ..transport.process.host import advertised_host
from ..transport.process.otel import Tracing
from ..transport.process.vocabulary import model_size, vocabulary_name
from ..transport.process.wakeup import Wakeup
from ..transport.process.worker_trace import WorkerTrace
from .adapters import AdapterFolder
from .gpu_telemetry import telemetry_of
from .kv_bucket import KVBucket
from .kv_folder import DEFAULT_GIB, KVFolder
from .kv_store import KVStore, Storage
from .parts import ModelFacts, RoleParts, WorkerParts
from .settings import DecodeSettings, FlexibleSettings, PrefillSettings
from .steps import RunningStep, Steps


def live_parts(
    settings: PrefillSettings | DecodeSettings | FlexibleSettings,
    model: WorkerModel,
    key: ClusterKey | None = None,
    shared: SharedPool | None = None,
) -> WorkerParts:
    """``shared``: the pool's memory, where other processes of this host may map it."""
    clock, poller, wakeup = MonotonicClock(), zmq.Poller(), Wakeup()
    telemetry = telemetry_of(model.device, settings.tensor_parallel_size)
    forecast = StepForecast() if model.launch is not None else None
    device = StepThread[RunningStep](model.runner, wakeup.set, model.ahead_at_layer, model.launch, forecast)
    steps = Steps(
        device,
        model.num_layers,
        partial(LayerProgress, wakeup.set, mark=mark_stream if model.device.type == "cuda" else None),
        clock.now,
        launches=model.launch is not None,
    )
    poller.register(wakeup.fd, zmq.POLLIN)
    names = NameWatch(settings.coordinator_names)
    store: KVStore | None = None
    if settings.kv_store:
        secret = key.secret if key is not None else b""
        store = KVStore(_storage(settings), secret, model.identity, model.pool, wakeup.set)
    folder: AdapterFolder | None = None
    if settings.lora_folder is not None and model.adapters is not None:
        folder = AdapterFolder(settings.lora_folder, model.adapters)

    def wait(patience_s: float) -> set[object]:
        ready: set[object] = {socket for socket, _ in poller.poll(int(patience_s * 1000))}
        if wakeup.fd in ready:
            wakeup.clear()
        return ready

    def close() -> None:
        steps.stop()
        names.stop()
        if store is not None:
            store.close()
        if folder is not None:
            folder.stop()
        if telemetry is not None:
            telemetry.stop()
        wakeup.close()

    return WorkerParts(
        clock,
        ModelFacts(
            model.identity,
            model.eos_token_ids,
            model.max_model_len,
            model.vocab_size,
            model.num_layers,
            model.device.type,
            telemetry.name if telemetry is not None else "",
            vocabulary_name(settings.model),
            model_size(settings.model),
            model.start_phases,
            model.takes_images,
            DRAFT_LAYERS / model.num_layers if settings.mtp else 0.0,
        ),
        BlockManager(model.num_blocks),
        os.getpid(),
        incarnations(),
        lambda: secrets.token_bytes(SECRET_BYTES),
        lambda settings, role: _open(settings, role, model, key, shared, poller, wakeup),
        steps,
        wait,
        wakeup.set,
        close,
        telemetry,
        store,
        folder.slots if folder is not None else AdapterSlots(),
        names.addresses,
    )


def _storage(settings: WorkerSettings) -> Storage:
    """Raises KVStoreError with what to do."""
    if KV_STORE_URL.fullmatch(settings.kv_store):
        return KVBucket(settings.kv_store)
    return KVFolder(Path(settings.kv_store), int((settings.kv_store_gib or DEFAULT_GIB) * (1 << 30)))


def _open(
    settings: PrefillSettings | DecodeSettings,
    role: str,
    model: WorkerModel,
    key: ClusterKey | None,
    shared: SharedPool | None,
    poller: zmq.Poller,
    wakeup: Wakeup,
) -> RoleParts:
    plaintext = settings.plaintext_kv or settings.insecure
    environment = live_environment(model.pool, key, poller, plaintext)
    movers = offered(settings.mover, plaintext, model.device.type == "cuda")
    grammars = GrammarThread(model.grammars, wakeup.set)
    endpoint = settings.otlp_endpoint
    tracing = Tracing.open(endpoint, role, settings.worker_id) if endpoint else None
    trace = WorkerTrace(tracing.emit) if tracing is not None else None
    watched: list[int] = []

    def stop() -> None:
        for fd in watched:
            poller.unregister(fd)
        for end in (grammars.stop, *([tracing.close] if tracing is not None else [])):
            threading.Thread(target=end, name="role-end").start()  # in seconds: the other role goes on

    host = advertised_host(settings.listen, settings.advertise_host, settings.coordinator.split(",")[0])
    targets = open_targets(movers, model.pool, shared, settings.data_listen, host, plaintext)
    watched += targets.fds
    for fd in watched:
        poller.register(fd, zmq.POLLIN)
    by = movers if role == "prefill" else targets.endpoints.movers
    return RoleParts(environment, by, grammars, stop, targets, host, trace, gpu=gpu_of(model.pool))
