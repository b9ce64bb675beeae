"""How a model is to be run, and whether it can be: checked against the model and the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .cache.kv_cache import KVCacheLayout, PoolAllocator
from .cache.kv_cache_size import KVCacheWish, gpu_room, step_bytes
from .errors import ModelConfigError
from .model.config import ModelConfig
from .model.prediction_config import with_prediction
from .settings import WorkerSettings
from .vision.config import VisionConfig

DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}
GPU_GROUP = 16  # inputs: groups that share a scale are multiples of it
LEAST_SEQS = 64  # a cache in host memory is made large enough for: those that are cached, where fewer run
WARM_UP_TOKENS = (5, 20, 64, 512)  # and on a GPU ``max_prefill_tokens``: its kernels come in sizes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run a model: a worker's settings, and what follows from its role."""

    settings: WorkerSettings
    max_step_seqs: int = 0  # on GPUs: kernels for steps of up to this many sequences are compiled at start
    max_decode_seqs: int = 0  # on GPUs: ``warm_up`` captures decode steps of up to this many as graphs
    max_prefill_tokens: int = 0  # on GPUs: the largest prefill step, which ``warm_up`` tries
    pool_allocator: PoolAllocator | None = None  # where the pool's memory comes from; None: from torch
    computes_images: bool = True  # those in prompts; decode workers have no vision tower


def model_config(settings: WorkerSettings) -> ModelConfig:
    """Raises ModelConfigError."""
    config = ModelConfig.from_folder(settings.model)
    return with_prediction(config) if settings.mtp else config


def check_formats(settings: WorkerSettings, config: ModelConfig, device: torch.device) -> None:
    """Check that the device has kernels for these weights and this KV cache. Raises ModelConfigError."""
    if config.latent is not None and device.type != "cpu" and settings.kv_dtype == "fp8":
        raise ModelConfigError(
            "latent attention (DeepSeek) has no float8 KV cache on GPUs: leave out --kv-dtype"
        )
    if config.index is not None and device.type != "cpu":
        raise ModelConfigError(
            f"sparse attention (DeepSeek-V3.2, GLM-5) has kernels on CPUs only, and the device is {device}: "
            "use --device cpu"
        )
    if config.index is not None and settings.kv_dtype != "auto":
        raise ModelConfigError(
            "sparse attention (DeepSeek-V3.2, GLM-5) has no KV cache in float8 or int8: leave out --kv-dtype"
        )
    if config.full_heads is not None and settings.kv_dtype != "auto":
        raise ModelConfigError(
            "heads whose size differs by layer (Gemma 4) have no KV cache in float8 or int8: leave out "
            "--kv-dtype"
        )
    if config.states is not None:
        for option, given in {
            "kv-dtype": settings.kv_dtype != "auto",
            "kv-store": bool(settings.kv_store),
            "num-speculative-tokens": bool(getattr(settings, "num_speculative_tokens", 0)),
        }.items():
            if given:
                raise ModelConfigError(
                    f"--{option} is not there yet for models with recurrent layers: leave it out"
                )
    if config.quantisation is not None and settings.quantization != "none":
        raise ModelConfigError("the checkpoint is quantised already: leave out --quantization")
    if config.quantisation is not None and config.quantisation.named and device.type != "cpu":
        raise ModelConfigError(
            f"quantised weights of GGUF have kernels on CPUs only, and the device is {device}: take the "
            "model's safetensors, or use --device cpu"
        )
    group = config.quantisation.odd_group(GPU_GROUP) if config.quantisation is not None else 0
    if group and device.type != "cpu":
        raise ModelConfigError(
            f"weights of which {group} share a scale have kernels on CPUs only (on {device}: multiples of "
            f"{GPU_GROUP}): take another version of the checkpoint, or use --device cpu"
        )


def max_model_len(asked: int | None, config: ModelConfig) -> int:
    if asked is not None and asked > config.max_model_len:
        raise ModelConfigError(
            f"--max-model-len {asked} is more than the model's {config.max_model_len}; lower it"
        )
    return asked or config.max_model_len


def gpu_room_of(
    engine: EngineConfig,
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    used: int,
    tower: VisionConfig | None,
    loaded: bool = True,
    more_step: int = 0,
) -> int:
    """Bytes for a KV cache on this GPU, where the worker has taken ``used`` bytes so far; not ``loaded``:
    where it will have. ``more_step``: bytes that a step takes beside those of every model's."""
    free, total = torch.cuda.mem_get_info(device)
    step = step_bytes(
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_width,
        vocab_size=config.vocab_size,
        num_tokens=max(engine.max_prefill_tokens, *WARM_UP_TOKENS),
        num_seqs=max(engine.max_decode_seqs, 1),
        itemsize=dtype.itemsize,
    )
    step += more_step
    if tower is not None:  # it runs before the step's layers
        step = max(step, tower.step_bytes(dtype.itemsize))
    free = free if loaded else free - used
    return gpu_room(
        total=total, free=free, used=used, step=step, utilization=engine.settings.gpu_memory_utilization
    )


def wish_of(engine: EngineConfig, layout: KVCacheLayout, model_len: int, device: torch.device) -> KVCacheWish:
    gib = engine.settings.kv_cache_gib
    return KVCacheWish(
        block_bytes=layout.block_bytes,
        block_size=layout.block_size,
        model_len=model_len,
        max_model_len=engine.settings.max_model_len,
        max_num_seqs=max(engine.max_decode_seqs, LEAST_SEQS) if device.type == "cpu" else None,
        num_blocks=engine.settings.num_blocks,
        num_bytes=None if gib is None else int(gib * 2**30),
        state_blocks=layout.state_blocks,
    )
