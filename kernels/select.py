"""Which kernels run a model: chosen once from the device, said in one log line."""

from __future__ import annotations

import logging

import torch

from .interface import Kernels
from .reference import TorchKernels

logger = logging.getLogger(__name__)


def select_kernels(device: torch.device, num_threads: int) -> Kernels:
    """Native kernels on CPUs where the C++ module was built; plain torch everywhere else."""
    if device.type != "cpu":
        logger.info("kernels: plain torch on %s", device)
        return TorchKernels()
    try:
        from .native_cpu import INSTRUCTION_SET, NativeCpuKernels
    except ImportError:
        logger.warning("kernels: plain torch, slower: the C++ kernels were not built (install a C++ compiler, then this package again)")
        return TorchKernels()
    onednn = cpu_multiplies_bfloat16()
    logger.info("kernels: C++ for %s%s, %d thread(s)", INSTRUCTION_SET, ", bfloat16 by oneDNN" if onednn else "", num_threads)
    return NativeCpuKernels(num_threads, onednn)


def cpu_multiplies_bfloat16() -> bool:
    """With AVX512-BF16 or AMX; elsewhere bfloat16 is widened, and float32 is the faster choice for prefill."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
