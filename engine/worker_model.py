"""A model ready to serve in a worker: the runner, and what the worker tells others about it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from .device import select_device
from .grammar import GrammarCompiler
from .host_mirror import HostMirror
from .kv_cache import PoolAllocator
from .model_runner import EngineConfig, ModelRunner
from .settings import WorkerSettings
from .step_thread import Launch, Runner

if TYPE_CHECKING:
    from .device_blocks import DeviceBlocks

CPU = torch.device("cpu")
DEFAULT_GPU_CACHE_GIB = 8.0  # its mirror takes as much host memory
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """What a worker's loop needs of a model. ``identity`` has the fields of ``transport.messages.ModelIdentity``."""

    runner: Runner
    pool: NDArray[np.uint8]  # [num_blocks, num_layers, layer_bytes], what the movers read and write
    identity: dict[str, str | int]
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    device: torch.device = CPU
    mirror: HostMirror | None = None  # set where the cache itself lies on a GPU
    device_blocks: DeviceBlocks | None = None  # likewise
    grammars: GrammarCompiler | None = None  # None: it serves no structured output
    ahead_at_layer: int = 0  # see ``StepThread``
    launch: Launch | None = None  # likewise: set where steps run on a GPU

    @property
    def num_layers(self) -> int:
        return int(self.pool.shape[1])

    def fetch(self, blocks: Sequence[int], first_layer: int = 0, num_layers: int | None = None) -> None:
        """Brings blocks (or ``num_layers`` of their layers) into ``pool`` before they are sent."""
        if self.mirror is not None:
            self.mirror.fetch(blocks, first_layer, num_layers)

    def store(self, blocks: Sequence[int]) -> None:
        """Brings blocks that have arrived in ``pool`` into the cache."""
        if self.mirror is not None:
            self.mirror.store(blocks)

    @classmethod
    def load(cls, settings: WorkerSettings, allocate: PoolAllocator | None = None, max_decode_seqs: int = 0) -> WorkerModel:
        """Reads the weights, makes the KV cache (in ``allocate``'s memory) and warms up. ``max_decode_seqs``: what a decode worker's batch
        holds at most. Raises EngineError with what to do."""
        if settings.runner != "model":
            from .paced_runner import paced_model

            return paced_model(settings, allocate)
        on_gpu = select_device(settings.device).type != "cpu"
        cache_gib = settings.kv_cache_gib or (DEFAULT_GPU_CACHE_GIB if on_gpu and not settings.num_blocks else None)
        runner = ModelRunner(
            EngineConfig(
                model_path=settings.model,
                device=settings.device,
                dtype=settings.dtype,
                block_size=settings.block_size or None,
                num_blocks=settings.num_blocks,
                kv_cache_bytes=int(cache_gib * 2**30) if cache_gib else None,
                max_model_len=settings.max_model_len,
                num_threads=settings.threads,
                exact=settings.exact,
                kv_dtype=settings.kv_dtype,
                quantization=settings.quantization,
                max_decode_seqs=max_decode_seqs,
                pool_allocator=None if on_gpu else allocate,
            )
        )
        runner.warm_up()
        grammars = GrammarCompiler(settings.model, runner.config.vocab_size, runner.config.eos_token_ids)
        grammars.warm_up()
        runner.phases.done("grammar")
        cache = runner.kv_cache
        _log.info("%s in %s on %s, ready in %s", settings.model, runner.dtype, runner.device, runner.phases)
        _log.info(
            "KV cache: %d blocks of %d tokens, %.2f GiB", cache.num_blocks, cache.layout.block_size, cache.block_bytes_view.nbytes / 2**30
        )
        mirror, device_blocks = None, None
        if on_gpu:
            from .device_blocks import DeviceBlocks  # needs Triton

            on_device = cache.pool.view(torch.uint8).view(cache.num_blocks, cache.layout.num_layers, -1)
            mirror, device_blocks = HostMirror(on_device, allocate), DeviceBlocks(on_device)
        return cls(
            runner=runner,
            pool=mirror.pool if mirror else cache.layer_bytes_view,
            identity={
                "fingerprint": runner.fingerprint,
                "dtype": str(runner.dtype).removeprefix("torch."),
                "block_size": cache.layout.block_size,
                "layout": cache.layout.description,
                "block_bytes": cache.layout.block_bytes,
                "numerics": runner.numerics,
            },
            eos_token_ids=frozenset(runner.config.eos_token_ids),
            max_model_len=runner.max_model_len,
            vocab_size=runner.config.vocab_size,
            device=runner.device,
            mirror=mirror,
            device_blocks=device_blocks,
            grammars=grammars,
            launch=runner.launch if on_gpu else None,
            ahead_at_layer=0 if on_gpu else max(1, cache.layout.num_layers - 1),
        )
