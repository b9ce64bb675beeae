"""Worker processes around a model that takes no time: what is left is the system itself."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.context import SpawnProcess

import numpy as np

from ..engine.step.batch import Batch, StepOutput
from ..engine.worker_model import WorkerModel
from ..transport.messages.cache_map import states
from ..transport.messages.messages import ModelIdentity, Role

TOKEN = 65


class NullRunner:
    """Answers every batch at once with the same token."""

    def execute(self, batch: Batch, on_layer: Callable[[int], None] | None = None) -> StepOutput:
        return StepOutput(np.full(batch.num_seqs, TOKEN, np.int32))


def null_model(num_blocks: int, max_model_len: int, block_bytes: int = 64) -> WorkerModel:
    """A model without weights whose KV blocks are ``block_bytes`` long."""
    return WorkerModel(
        runner=NullRunner(),
        pool=np.zeros((num_blocks, 1, block_bytes), np.uint8),
        identity=ModelIdentity(
            kv_name="null",
            dtype="uint8",
            block_size=16,
            cache_map=states(1, block_bytes),
            block_bytes=block_bytes,
        ),
        eos_token_ids=frozenset(),
        max_model_len=max_model_len,
        vocab_size=128,
        ahead_at_layer=0,
    )


def start_null_worker(
    role: Role, coordinator: str, core: int, num_blocks: int, max_model_len: int
) -> SpawnProcess:
    """A worker of this role on this core, until it is terminated."""
    process = multiprocessing.get_context("spawn").Process(
        target=_run, args=(role, coordinator, core, num_blocks, max_model_len), daemon=True
    )
    process.start()
    return process


def _run(role: str, coordinator: str, core: int, num_blocks: int, max_model_len: int) -> None:
    from ..worker.live_parts import live_parts
    from ..worker.loop import Worker
    from ..worker.main import serve
    from ..worker.settings import DecodeSettings, PrefillSettings

    os.sched_setaffinity(0, {core})
    model = null_model(num_blocks, max_model_len)
    common = {
        "model": ".",
        "coordinator": coordinator,
        "insecure": True,
        "mover": "tcp",
        "name": f"{role}-null",
    }
    settings = (
        PrefillSettings.model_validate({**common, "max_batch_tokens": 8192})
        if role == "prefill"
        else DecodeSettings.model_validate(common)
    )
    serve(Worker(settings, live_parts(settings, model)))
