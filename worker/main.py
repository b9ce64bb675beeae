"""The live worker process, from its settings."""

from __future__ import annotations

import signal
import sys

from ..engine.errors import ModelConfigError
from ..engine.load_model import load_model
from ..transport.channels.keys import load_key
from ..transport.movers.shm import SharedPool
from ..transport.process.heap import settle_heap
from ..transport.process.host import allow_many_files
from .adapters import require_folder
from .health import Health, HealthServer
from .live_parts import live_parts
from .loop import Worker
from .settings import DecodeSettings, FlexibleSettings, PrefillSettings

SWITCH_S = 1e-4  # step threads and the loop alternate: the default of 5 ms would show in every token


def serve(worker: Worker) -> None:
    """Prepare this process, and loop until the worker's end."""
    allow_many_files()
    sys.setswitchinterval(SWITCH_S)
    settle_heap()
    worker.run()


def run(settings: PrefillSettings | DecodeSettings | FlexibleSettings) -> None:
    """Run the process until SIGTERM or Ctrl-C."""
    health = Health()
    if settings.health_port is not None:
        HealthServer(settings.health_port, health)
    key = None if settings.insecure or settings.key_file is None else load_key(settings.key_file)
    shared: list[SharedPool] = []

    def allocate(num_bytes: int) -> memoryview:
        shared.append(SharedPool.create(num_bytes))
        return shared[0].buffer

    if settings.lora_folder is not None:
        require_folder(settings.lora_folder)
    settings = settings.model_copy(update={"name": settings.worker_id})
    decodes = isinstance(settings, DecodeSettings)
    model = load_model(
        settings,
        allocate if settings.mover in ("auto", "shm") else None,
        settings.max_num_seqs if decodes else 0,
        settings.chunk_budget if isinstance(settings, PrefillSettings) else None,
        2 * settings.max_num_seqs,  # decode rows, and prompts beside them
    )
    drafts = isinstance(settings, DecodeSettings) and settings.num_speculative_tokens
    if drafts and model.identity.state_blocks:
        raise ModelConfigError(
            "a model with recurrent layers cannot take back drafted tokens yet: leave out "
            "--num-speculative-tokens"
        )
    worker = Worker(settings, live_parts(settings, model, key, shared[0] if shared else None))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: worker.leave())
    health.watch(worker)
    serve(worker)
