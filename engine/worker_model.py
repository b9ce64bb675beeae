"""A model ready to serve in a worker: the runner, and what the worker tells others about it."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .kv_cache import PoolAllocator
from .model_runner import EngineConfig, ModelRunner
from .settings import WorkerSettings
from .step_thread import Runner

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """What a worker's loop needs of a model. ``identity`` has the fields of ``transport.messages.ModelIdentity``."""

    runner: Runner
    pool: NDArray[np.uint8]  # [num_blocks, block_bytes]
    identity: dict[str, str | int]
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int

    @classmethod
    def load(cls, settings: WorkerSettings, allocate: PoolAllocator | None = None) -> WorkerModel:
        """Reads the weights, makes the KV cache (in ``allocate``'s memory) and warms up. Raises EngineError with what to do."""
        start = time.monotonic()
        runner = ModelRunner(
            EngineConfig(
                model_path=settings.model,
                device=settings.device,
                dtype=settings.dtype,
                block_size=settings.block_size or None,
                num_blocks=settings.num_blocks,
                kv_cache_bytes=int(settings.kv_cache_gib * 2**30) if settings.kv_cache_gib else None,
                max_model_len=settings.max_model_len,
                num_threads=settings.threads,
                pool_allocator=allocate,
            )
        )
        loaded = time.monotonic()
        runner.warm_up()
        warm = time.monotonic()
        cache = runner.kv_cache
        _log.info(
            "%s in %s on %s: loaded in %.1f s, warm after %.1f s more",
            settings.model,
            runner.dtype,
            runner.device,
            loaded - start,
            warm - loaded,
        )
        _log.info(
            "KV cache: %d blocks of %d tokens, %.2f GiB", cache.num_blocks, cache.layout.block_size, cache.block_bytes_view.nbytes / 2**30
        )
        return cls(
            runner=runner,
            pool=cache.block_bytes_view,
            identity={
                "fingerprint": runner.fingerprint,
                "dtype": str(runner.dtype).removeprefix("torch."),
                "block_size": cache.layout.block_size,
                "layout": cache.layout.description,
                "block_bytes": cache.layout.block_bytes,
            },
            eos_token_ids=frozenset(runner.config.eos_token_ids),
            max_model_len=runner.max_model_len,
            vocab_size=runner.config.vocab_size,
        )
