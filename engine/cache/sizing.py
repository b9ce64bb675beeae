"""What a worker of a model would get on this host, without loading it: the very sizing that it does at its
start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ..device import available_bytes, select_device, select_dtype
from ..errors import OutOfMemoryError
from ..model.config import ModelConfig
from ..model.expected_tensors import expected_tensors, ignored_tensors, weight_bytes
from ..model.weights import Checkpoint
from ..step.model_runner import DEFAULT_BLOCK_SIZE, EngineConfig, gpu_room_of, wish_of
from .host_memory import MemoryClaims, free_host_bytes
from .kv_cache import KVCacheLayout
from .kv_cache_size import KVCacheSize, host_room, kv_cache_size


@dataclass(frozen=True, slots=True)
class ExpectedWorker:
    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    weights: int  # bytes
    kv_cache: int  # bytes
    size: KVCacheSize


def expected_worker(folder: Path, sharers: int = 2) -> ExpectedWorker:
    """The sizes of one of ``sharers`` workers with default settings on this host.

    Raises EngineError, with what to do, if it could not start."""
    engine = EngineConfig(folder, memory_shared_by=sharers)
    config, device = ModelConfig.from_folder(folder), select_device(engine.device)
    with Checkpoint(folder) as checkpoint:
        checkpoint.check(expected_tensors(config), ignored_tensors(config))
        dtype = select_dtype(engine.dtype, device, checkpoint.dtype)
    layout = KVCacheLayout.of(config, DEFAULT_BLOCK_SIZE[device.type], dtype)
    weights = weight_bytes(config, dtype.itemsize)
    with MemoryClaims(engine.cluster).turn() as others:
        pending = others.pending
    needed = weights * (sharers if device.type == "cpu" else 1)
    if needed > (free := available_bytes(device) - pending * (device.type == "cpu")):
        raise OutOfMemoryError(
            f"{needed / 2**30:.1f} GiB of weights do not fit: {max(0, free) / 2**30:.1f} GiB are free on "
            f"{device}; serve a smaller model, use --quantization fp8 on a GPU, or start fewer workers here"
        )
    on_host = weights if device.type == "cpu" else 0
    room = host_room(
        free=free_host_bytes() - on_host,
        pending=pending,
        siblings=(),
        weights=on_host,
        utilization=engine.cpu_memory_utilization,
        sharers=sharers,
    )
    if device.type == "cuda":
        room = min(room, gpu_room_of(engine, config, device, dtype, used=weights, loaded=False))
    size = kv_cache_size(wish_of(engine, layout, config.max_model_len), room)
    return ExpectedWorker(config, device, dtype, weights, size.num_blocks * layout.block_bytes, size)
