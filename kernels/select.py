"""Which kernels run a model: chosen once from the device, said in one log line.

Exact kernels are batch-invariant: a token row's result does not depend on the rows beside it, on how its prompt was cut into chunks, on
what was cached, nor on the number of threads. Two workers agree bit by bit if the names of their kernels (``numerics``) are equal.
"""

from __future__ import annotations

import logging

import torch

from .interface import Kernels
from .reference import TorchKernels

logger = logging.getLogger(__name__)


class InexactKernelsError(Exception):
    """Exact kernels were asked for where there are none; says what to do."""


def select_kernels(device: torch.device, num_threads: int, exact: bool = False) -> Kernels:
    """Triton's on GPUs, C++ on CPUs; plain torch where Triton or a C++ compiler was missing at installation. Raises InexactKernelsError."""
    if device.type == "cuda":
        return _cuda_kernels(device, exact)
    try:
        from .native_cpu import INSTRUCTION_SET, NativeCpuKernels
    except ImportError:
        if exact:
            raise InexactKernelsError(
                "exact needs the C++ kernels, which were not built: install a C++ compiler, then this package again; or leave exact off"
            ) from None
        logger.warning("kernels: plain torch, slower: the C++ kernels were not built (install a C++ compiler, then this package again)")
        return TorchKernels()
    onednn = cpu_multiplies_bfloat16() and not exact  # its products change with the number of rows
    how = ", exact" if exact else ", bfloat16 by oneDNN" if onednn else ""
    logger.info("kernels: C++ for %s%s, %d thread(s)", INSTRUCTION_SET, how, num_threads)
    return NativeCpuKernels(num_threads, onednn)


def numerics(device: torch.device, exact: bool) -> str:
    """Names how results come about: what two exact workers must share. Of those that are not exact, only that they are not."""
    if not exact:
        return "fast"
    if device.type == "cuda":
        import triton

        return f"exact, Triton {triton.__version__} on {torch.cuda.get_device_name(device)}"
    from .native_cpu import INSTRUCTION_SET

    return f"exact, C++ {INSTRUCTION_SET}"


def _cuda_kernels(device: torch.device, exact: bool) -> Kernels:
    try:
        from .cuda import CudaKernels
    except ImportError:
        if exact:
            raise InexactKernelsError("exact on a GPU needs Triton: pip install triton; or leave exact off, or use --device cpu") from None
        logger.warning("kernels: plain torch on %s, much slower: Triton is not installed (pip install triton)", device)
        return TorchKernels()
    gpu = torch.cuda.get_device_properties(device)
    logger.info("kernels: Triton on %s, %d multiprocessors%s", gpu.name, gpu.multi_processor_count, ", exact" if exact else "")
    return CudaKernels(gpu.multi_processor_count, exact)


def cpu_multiplies_bfloat16() -> bool:
    """With AVX512-BF16 or AMX; elsewhere bfloat16 is widened, and multiplied at the rate of float32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def cpu_widens_bfloat16() -> bool:
    """Where the C++ kernels are built: bfloat16 weights then cost no more time than float32 ones, and half the memory traffic."""
    try:
        from . import _cpu  # noqa: F401
    except ImportError:
        return False
    return True
