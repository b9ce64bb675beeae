"""How a model is to be run, and whether it can be: checked against the model and the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from .cache.kv_cache import KVCacheLayout, PoolAllocator
from .cache.kv_cache_size import KVCacheWish, gpu_room, step_bytes
from .errors import ModelConfigError
from .model.config import ModelConfig
from .settings import KVDType, Quantization

DEFAULT_BLOCK_SIZE = {"cpu": 16, "cuda": 64}
GPU_GROUP = 16  # inputs: groups that share a scale are multiples of it
WARM_UP_TOKENS = (5, 20, 64, 512)  # and on a GPU ``max_prefill_tokens``: its kernels come in sizes


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run a model. ``None`` means: chosen from the device and the model."""

    model_path: Path
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto, float32, bfloat16, float16
    block_size: int | None = None  # tokens
    num_blocks: int | None = None  # wins over kv_cache_bytes
    kv_cache_bytes: int | None = None  # None, without num_blocks: by the memory that is free
    kv_cache_shrink: bool = False  # a size that was asked for may become what is free
    gpu_memory_utilization: float = 0.9  # share of the card that this worker may use in all
    cpu_memory_utilization: float = 0.5  # share of the free host memory for KV caches on CPUs
    memory_shared_by: int = 1  # workers of this cluster on this host
    max_num_seqs: int = 64  # a cache in host memory holds at most what this many sequences fill
    cluster: str = ""  # its name, for workers that share the host's memory
    max_model_len: int | None = None  # prompt and output tokens; None: the model's, or what fits
    num_threads: int | Literal["auto"] = 1  # CPU threads of one step
    exact: bool = False  # batch-invariant: see kernels/select.py
    kv_dtype: KVDType = "auto"  # auto: as dtype
    quantization: Quantization = "none"  # of linear layers
    max_step_seqs: int = 0  # on GPUs: kernels for steps of up to this many sequences are compiled at start
    max_decode_seqs: int = 0  # on GPUs: ``warm_up`` captures decode steps of up to this many as graphs
    max_prefill_tokens: int = 0  # on GPUs: the largest prefill step, which ``warm_up`` tries
    pool_allocator: PoolAllocator | None = None  # where the pool's memory comes from; None: from torch


def check_formats(engine: EngineConfig, config: ModelConfig, device: torch.device) -> None:
    """Check that the device has kernels for these weights and this KV cache. Raises ModelConfigError."""
    if config.latent is not None and device.type != "cpu" and engine.kv_dtype == "fp8":
        raise ModelConfigError(
            "latent attention (DeepSeek) has no float8 KV cache on GPUs: leave out --kv-dtype"
        )
    if config.quantisation is not None and engine.quantization != "none":
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
    loaded: bool = True,
) -> int:
    """Bytes for a KV cache on this GPU, where the worker has taken ``used`` bytes so far; not ``loaded``:
    where it will have."""
    free, total = torch.cuda.mem_get_info(device)
    step = step_bytes(
        hidden_size=config.hidden_size,
        intermediate_size=config.mlp_width,
        vocab_size=config.vocab_size,
        num_tokens=max(engine.max_prefill_tokens, *WARM_UP_TOKENS),
        num_seqs=max(engine.max_decode_seqs, 1),
        itemsize=dtype.itemsize,
    )
    free = free if loaded else free - used
    return gpu_room(total=total, free=free, used=used, step=step, utilization=engine.gpu_memory_utilization)


def wish_of(engine: EngineConfig, layout: KVCacheLayout, model_len: int, device: torch.device) -> KVCacheWish:
    return KVCacheWish(
        block_bytes=layout.block_bytes,
        block_size=layout.block_size,
        model_len=model_len,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs if device.type == "cpu" else None,
        num_blocks=engine.num_blocks,
        num_bytes=engine.kv_cache_bytes,
    )
