"""The engine's errors.

    EngineError
    ├── ModelConfigError    config.json cannot be read, or asks for what is not supported
    ├── WeightsError        weights missing, of the wrong shape, or in a format that is not loaded
    ├── ProfileError        a latency profile cannot be read or used (latency_profile.py)
    ├── StepLogError        a step log cannot be written (step_log.py)
    ├── OutOfMemoryError    the KV cache does not fit; names what would fit, and the option to lower
    ├── DeviceLostError     this process has lost its GPU; another process has to replace it
    ├── RankFailedError     one of a worker's ranks cannot go on with a step
    ├── KVStoreError        the folder or bucket of the KV store cannot be used
    ├── AdapterError        an adapter that cannot be served
    └── GrammarError        a grammar that cannot be compiled or followed; the fault of one request

Each message states what was wrong, what is allowed and what to do.
"""

from __future__ import annotations

import sys
import traceback

DEVICE_LOST = (
    "an illegal memory access was encountered",
    "an illegal instruction was encountered",
    "context is destroyed",
    "device-side assert triggered",
    "hardware stack error",
    "invalid program counter",
    "misaligned address",
    "no CUDA-capable device is detected",
    "operation not supported on global/shared address space",
    "the launch timed out and was terminated",
    "uncorrectable ECC error encountered",
    "uncorrectable NVLink error",
    "unspecified launch failure",
)
"""The driver's words for errors after which the process has to end, in RuntimeErrors of torch and of Triton.
cuBLAS raises a status of its own, which is not recognised; the copy that begins the next step is."""
OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
"""In RuntimeErrors: torch's allocators; the CUDA driver, by torch or Triton; cuBLAS."""


class EngineError(Exception):
    """Base of all errors of this folder."""


class ModelConfigError(EngineError):
    """The model's configuration cannot be served."""


class WeightsError(EngineError):
    """The model's weights cannot be loaded."""


class OutOfMemoryError(EngineError):
    """The KV cache does not fit into memory."""


class KVStoreError(EngineError):
    pass


class AdapterError(EngineError):
    pass


class DeviceLostError(EngineError):
    """The GPU's context is lost: every further step would fail."""


class RankFailedError(EngineError):
    """A rank of this worker failed, and with it the step of all."""


class GrammarError(EngineError):
    """A request's grammar cannot be compiled, or not be followed."""


def is_device_lost(error: BaseException) -> bool:
    """Whether the GPU's context is lost, for example after an illegal address. The context is the process's:
    all later calls fail, whatever request they are for. Only another process helps."""
    return isinstance(error, RuntimeError) and any(words in str(error) for words in DEVICE_LOST)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether Python, torch or a library below it is out of memory. The worker is not broken then."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in OUT_OF_MEMORY)


def release_memory_of(error: BaseException) -> None:
    """Drop the tensors that the failed step still holds through its traceback, and what the GPU's allocator
    keeps for later."""
    traceback.clear_frames(error.__traceback__)
    torch = sys.modules.get("torch")  # the coordinator, which is free of torch, imports this file
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
