"""Load a worker's model: weights, KV cache, kernels, warmed up; or a paced one, which computes nothing. And
the sizes that it would have on this host, without loading it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from ..transport.messages.messages import ModelIdentity
from .adapters.resident import ResidentAdapters
from .cache.kv_cache import KVCacheLayout, PoolAllocator
from .cache.kv_cache_size import KVCacheSize, host_room, kv_cache_size
from .cache.memory_claims import MemoryClaims
from .device import available_bytes, free_host_bytes, select_device, select_dtype
from .engine_config import DEFAULT_BLOCK_SIZE, EngineConfig, check_formats, gpu_room_of, wish_of
from .errors import ModelConfigError, OutOfMemoryError
from .model.block_spread import step_bytes
from .model.config import ModelConfig
from .model.expert_split import split_experts
from .model.ranks import check_split, spreads_blocks
from .model.tensors import expected_tensors, ignored_tensors
from .model.weight_sizes import uneven_bytes, weight_bytes
from .model.weights import Checkpoint
from .paced_runner import paced_model
from .settings import WorkerSettings
from .step.grammar import GrammarCompiler
from .step.model_runner import ModelRunner
from .step_log import logged
from .vision.config import tower_of
from .worker_model import WorkerModel

if TYPE_CHECKING:
    from .cache.device_blocks import DeviceBlocks
    from .cache.sharded_blocks import ShardedBlocks
    from .loaded_model import LoadedModel

_log = logging.getLogger(__name__)


def load_model(
    settings: WorkerSettings,
    allocate: PoolAllocator | None = None,
    max_decode_seqs: int = 0,
    prefill_tokens: Callable[[str], int] | None = None,
    max_step_seqs: int = 0,
) -> WorkerModel:
    """Reads the weights, makes the KV cache (in ``allocate``'s memory) and warms up. ``max_decode_seqs``:
    what a decode worker's batch holds at most; ``prefill_tokens``: what a prefill worker's does on a device
    of this type; None: it computes no prompts, and no images; ``max_step_seqs``: sequences of any step.
    Raises EngineError with what to do."""
    if settings.runner != "model":
        model = paced_model(settings, allocate)
    else:
        model = _computing_model(settings, allocate, max_decode_seqs, prefill_tokens, max_step_seqs)
    return logged(model, settings.step_log, settings.worker_id) if settings.step_log is not None else model


def _computing_model(
    settings: WorkerSettings,
    allocate: PoolAllocator | None,
    max_decode_seqs: int,
    prefill_tokens: Callable[[str], int] | None,
    max_step_seqs: int,
) -> WorkerModel:
    device_type = select_device(settings.device).type
    on_gpu = device_type != "cpu"
    runner = ModelRunner(
        EngineConfig(
            settings,
            max_step_seqs,
            max_decode_seqs,
            prefill_tokens(device_type) if prefill_tokens else 0,
            None if on_gpu else allocate,
            computes_images=prefill_tokens is not None,
        )
    )
    runner.warm_up()
    loaded = runner.loaded
    grammars = GrammarCompiler(settings.model, loaded.config.vocab_size, loaded.config.eos_token_ids)
    grammars.warm_up()
    loaded.phases.done("grammar")
    cache = loaded.kv_cache
    pool: NDArray[np.uint8] | DeviceBlocks | ShardedBlocks
    if on_gpu:
        pool = _device_blocks(runner.ranks)
        loaded.phases.done("movers")
    else:
        pool = cache.layer_bytes_view
    _log.info("%s in %s on %s, ready in %s", settings.model, loaded.dtype, loaded.device, loaded.phases)
    _log.info(
        "KV cache: %d blocks of %d tokens, %.2f GiB",
        loaded.num_blocks,
        cache.layout.block_size,
        loaded.num_blocks * loaded.layout.block_bytes / 2**30,
    )
    return WorkerModel(
        runner=runner,
        pool=pool,
        identity=ModelIdentity(
            dtype=str(loaded.dtype).removeprefix("torch."),
            numerics=loaded.numerics,
            window=loaded.config.window,
            state_blocks=loaded.layout.state_blocks,
            kv_name=loaded.kv_name,
            revision=loaded.revision,
            block_size=loaded.layout.block_size,
            cache_map=loaded.layout.cache_map,
            block_bytes=loaded.layout.block_bytes,
        ),
        eos_token_ids=frozenset(loaded.config.eos_token_ids),
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.config.vocab_size,
        device=loaded.device,
        grammars=grammars,
        launch=runner.launch if on_gpu else None,
        ahead_at_layer=0 if on_gpu else max(1, cache.layout.num_layers - 1),
        start_phases=loaded.phases.seconds,
        takes_images=loaded.takes_images,
        adapters=ResidentAdapters(runner.ranks) if loaded.adapters is not None else None,
    )


def _device_blocks(ranks: Sequence[LoadedModel]) -> DeviceBlocks | ShardedBlocks:
    from .cache.device_blocks import DeviceBlocks  # these need Triton
    from .cache.sharded_blocks import ShardedBlocks

    blocks: DeviceBlocks | ShardedBlocks
    if len(ranks) == 1:
        pool = ranks[0].pool
        blocks = DeviceBlocks(pool.view(torch.uint8).view(*pool.shape[:2], -1))
    else:
        heads = [range(each.own_heads.start, each.own_heads.stop) for each in ranks]
        spread = ranks[0].spread is not None
        blocks = ShardedBlocks([each.pool for each in ranks], heads, ranks[0].layout.num_kv_heads, spread)
    blocks.warm_up()
    return blocks


@dataclass(frozen=True, slots=True)
class ExpectedWorker:
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    weights: int  # bytes
    kv_cache: int  # bytes
    size: KVCacheSize
    ranks: int


def expected_worker(folder: Path, ranks: int = 1) -> ExpectedWorker:
    """The sizes of one of two workers with default settings on this host, on as many GPUs as it needs.

    Raises EngineError, with what to do, if it could not start."""
    try:
        return _expected_worker(folder, ranks)
    except OutOfMemoryError:
        if 2 * ranks <= torch.cuda.device_count():
            with suppress(ModelConfigError):  # it cannot be split among as many
                return expected_worker(folder, 2 * ranks)
        raise


def _expected_worker(folder: Path, ranks: int) -> ExpectedWorker:
    settings = WorkerSettings(model=folder, insecure=True, memory_shared_by=2, tensor_parallel_size=ranks)
    engine = EngineConfig(settings)
    config, device = ModelConfig.from_folder(folder), select_device(settings.device)
    check_formats(settings, config, device)
    check_split(config, ranks, settings.exact)
    config = split_experts(config, ranks)
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(expected_tensors(config), ignored_tensors(config))
        dtype = select_dtype(settings.dtype, device, checkpoint.dtype)
    layout = KVCacheLayout.of(config, DEFAULT_BLOCK_SIZE[device.type], dtype)
    weights = weight_bytes(config, dtype.itemsize)
    if (tower := tower_of(folder)) is not None:
        weights += tower.num_bytes(dtype.itemsize) * ranks  # each has its own
    of_rank = weights // ranks + uneven_bytes(config, dtype.itemsize, ranks)
    with MemoryClaims(settings.coordinator).turn() as others:
        pending = others.pending
    needed = weights * 2 if device.type == "cpu" else of_rank
    if needed > (free := available_bytes(device) - pending * (device.type == "cpu")):
        raise OutOfMemoryError(
            f"{needed / 2**30:.1f} GiB of weights do not fit: {max(0, free) / 2**30:.1f} GiB are free on "
            f"{f'each of {ranks} GPUs' if ranks > 1 else device}; serve a smaller model, use --quantization "
            "fp8, int8 or int4, or start fewer workers here"
        )
    if device.type == "cuda":
        spread = spreads_blocks(config, ranks, settings.exact)
        more = step_bytes(config, dtype.itemsize) if spread else 0
        room = gpu_room_of(engine, config, device, dtype, of_rank, tower, loaded=False, more_step=more)
        room *= ranks if spread else min(ranks, config.num_kv_heads)  # a head may be on several GPUs
    else:
        room = host_room(
            free=free_host_bytes() - weights,
            pending=pending,
            siblings=(),
            weights=weights,
            utilization=settings.cpu_memory_utilization,
            sharers=2,
        )
    size = kv_cache_size(wish_of(engine, layout, config.max_model_len, device), room)
    return ExpectedWorker(config, device, dtype, weights, size.num_blocks * layout.block_bytes, size, ranks)
