"""Device and dtype: what ``auto`` stands for. And the memory that is free."""

from __future__ import annotations

import torch

from ..kernels.select import cpu_multiplies_bfloat16, cpu_widens_bfloat16
from .cache.host_memory import free_host_bytes
from .errors import ModelConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def select_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ModelConfigError(f"device {name!r} is not supported (supported: auto, cpu, cuda, cuda:N)")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelConfigError(
            "device cuda was asked for, but torch finds none; install a CUDA build of torch, or use --device "
            "cpu"
        )
    return device


def select_dtype(name: str, device: torch.device, stored: torch.dtype) -> torch.dtype:
    """auto: bfloat16 on GPUs and where the CPU multiplies bfloat16 itself (AVX512-BF16, AMX); on other CPUs
    too where the checkpoint is ``stored`` in bfloat16 (decode reads half as much, prefill is no slower:
    bench/results/engine.json); float32 otherwise."""
    if name == "auto":
        if device.type == "cuda" or cpu_multiplies_bfloat16():
            return torch.bfloat16
        return torch.bfloat16 if stored == torch.bfloat16 and cpu_widens_bfloat16() else torch.float32
    if name not in DTYPES:
        raise ModelConfigError(f"dtype {name!r} is not supported (supported: auto, {', '.join(DTYPES)})")
    if name == "float16" and device.type == "cpu":
        raise ModelConfigError("dtype float16 is not supported on CPUs; use bfloat16 or float32")
    return DTYPES[name]


def available_bytes(device: torch.device) -> int:
    """Memory that is free now: the card's, or the host's within its container's limits."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_host_bytes()
