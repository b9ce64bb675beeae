"""Choose the kernels that run a model, once, by the device; one log line names them.

Exact kernels are batch-invariant: a token row's result does not depend on the rows beside it, on how its
prompt was cut into chunks, on what was cached, nor on the number of threads. Two workers agree bit by bit if
the names of their kernels (``numerics``) are equal.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch

from .interface import AttentionShape, Kernels
from .packed_weights import PackedWeights
from .quantised import Scheme
from .reference import TorchKernels

logger = logging.getLogger(__name__)


class UnsuitableKernelsError(Exception):
    """Exact or float8 kernels are not available here; the message names the remedy."""


FLOAT8_CAPABILITY = (8, 9)  # Ada; Hopper is 9.0


def select_kernels(
    device: torch.device,
    num_threads: int,
    exact: bool = False,
    quantization: Scheme | Literal["none"] = "none",
    kv_dtype: Literal["auto", "fp8", "int8"] = "auto",
    fp8_weights: bool = False,
    packed: PackedWeights | None = None,
    shape: AttentionShape | None = None,
    rank: int = 0,
) -> Kernels:
    """Triton's on GPUs, with another package's attention where it is there and agrees for ``shape``; C++ on
    CPUs, which lay weights into ``packed``; plain torch where Triton or a C++ compiler was missing at
    installation. ``fp8_weights``: the checkpoint has some. ``rank``: see ``NativeCpuKernels``. Raises
    UnsuitableKernelsError."""
    if device.type == "cuda":
        if kv_dtype == "int8":
            raise UnsuitableKernelsError(
                f"kv_dtype int8 has kernels on CPUs only: use fp8 or auto on {device}"
            )
        scheme = None if quantization == "none" else quantization
        return _cuda_kernels(device, exact, scheme, kv_dtype == "fp8", fp8_weights, shape)
    try:
        from .measured_choice import KernelChoices
        from .native_cpu import NativeCpuKernels
        from .native_linear import measured_asking_rows, measured_coding, measured_instruction_set
    except ImportError as error:
        why = "the C++ kernels were not built: install a C++ compiler, then this package again"
        if error.name is None:  # built from other sources
            why = str(error)
        if exact:
            raise UnsuitableKernelsError(f"exact needs the C++ kernels; {why}; or leave exact off") from None
        if quantization != "none":
            why = f"quantization {quantization} needs the C++ kernels; {why}; or use none"
            raise UnsuitableKernelsError(why) from None
        logger.warning("kernels: plain torch, slower: %s", why)
        return TorchKernels()
    choices = KernelChoices.of_this_machine()
    instruction_set = measured_instruction_set(choices)
    onednn = cpu_multiplies_bfloat16() and not exact  # its products change with the number of rows
    how = ", exact" if exact else ""
    scheme = None if quantization == "none" else quantization
    how += f", weights in {scheme}" if scheme else ""
    how += f", weights prefetched from {measured_asking_rows(choices, instruction_set)} rows"
    codes = measured_coding(choices, instruction_set)
    how += ", bfloat16 weights in 12.25 bits" if codes else ""
    logger.info("kernels: C++ for %s%s, %d thread(s)", instruction_set, how, num_threads)
    measured = choices if onednn else None
    return NativeCpuKernels(num_threads, instruction_set, measured, packed, scheme, codes, rank)


def numerics(device: torch.device, exact: bool, num_ranks: int = 1, whole_experts: bool = False) -> str:
    """Names how results come about: what two exact workers must share. Of those that are not exact, only that
    they are not. ``num_ranks``: over which experts are summed, whole ones or slices."""
    if not exact:
        return "fast"
    if num_ranks > 1:
        experts = "whole experts" if whole_experts else "experts"
        return f"{numerics(device, exact)}, {experts} with --tensor-parallel-size {num_ranks}"
    if device.type == "cuda":
        import triton

        return f"exact, Triton {triton.__version__} on {torch.cuda.get_device_name(device)}"
    from .measured_choice import KernelChoices
    from .native_linear import measured_instruction_set

    return f"exact, C++ {measured_instruction_set(KernelChoices.of_this_machine())}"


def kernels_in_words() -> str:
    """Which kernels multiply on this CPU; measures where that is not yet known."""
    from .measured_choice import NEVER, KernelChoices
    from .native_linear import measured_asking_rows, measured_coding, measured_instruction_set

    choices = KernelChoices.of_this_machine()
    name = measured_instruction_set(choices)
    words = (
        f"{name} measured as the fastest, weights prefetched from {measured_asking_rows(choices, name)} rows"
    )
    words += ", bfloat16 weights in 12.25 bits" if measured_coding(choices, name) else ""
    if not cpu_multiplies_bfloat16():
        return words
    shapes = {name: rows for name, rows in choices.made.items() if name.endswith("threads")}
    if not shapes:
        return f"{words}; oneDNN is measured when a model first loads"
    faster = [f"{name} from {rows} rows" for name, rows in shapes.items() if rows != NEVER]
    return f"{words}; oneDNN is " + (
        f"faster for {', '.join(faster)}" if faster else "faster for no linear so far"
    )


def _cuda_kernels(
    device: torch.device,
    exact: bool,
    scheme: Scheme | None,
    fp8_cache: bool,
    fp8_weights: bool,
    shape: AttentionShape | None,
) -> Kernels:
    if (scheme == "fp8" or fp8_weights or fp8_cache) and torch.cuda.get_device_capability(
        device
    ) < FLOAT8_CAPABILITY:
        name = torch.cuda.get_device_name(device)
        raise UnsuitableKernelsError(
            f"{name} has no float8 instructions (Ada, Hopper and later have): leave kv_dtype and "
            "quantization out, and take a checkpoint without float8 weights"
        )
    try:
        from .cuda import CudaKernels
        from .gpu.provided_attention import FLASH_ATTENTION_3, FLASHINFER, usable
    except ImportError:
        if exact:
            raise UnsuitableKernelsError(
                "exact on a GPU needs Triton: pip install triton; or leave exact off, or use --device cpu"
            ) from None
        if scheme is not None:
            raise UnsuitableKernelsError(
                f"quantization {scheme} needs Triton: pip install triton; or use none"
            ) from None
        logger.warning(
            "kernels: plain torch on %s, much slower: Triton is not installed (pip install triton)", device
        )
        return TorchKernels()
    gpu = torch.cuda.get_device_properties(device)
    count, provided, named = gpu.multi_processor_count, None, "exact" if exact else "alone"
    if not exact and shape is not None:
        with torch.inference_mode():
            ours = CudaKernels(count).paged_attention
            provided, named = usable(FLASHINFER if fp8_cache else FLASH_ATTENTION_3, device, shape, ours)
    named += f", weights in {scheme}" if scheme else ""
    logger.info("kernels: Triton on %s, %d multiprocessors; %s", gpu.name, count, named)
    return CudaKernels(count, exact, scheme, provided=provided)


def cpu_multiplies_bfloat16() -> bool:
    """With AVX512-BF16 or AMX; elsewhere bfloat16 is widened, and multiplied at the rate of float32."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def cpu_widens_bfloat16() -> bool:
    """True if the C++ kernels are built: bfloat16 weights then need no more time than float32 ones, and half
    the memory traffic."""
    try:
        from . import _cpu  # noqa: F401
    except ImportError:
        return False
    return True
