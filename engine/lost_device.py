"""Recognise the error of a GPU whose context is lost, for example after an illegal address.

The context is the process's: all later calls fail, whatever request they are for. Only another process helps.

cuBLAS raises a status of its own, which is not recognised; the copy that begins the next step is.
"""

from __future__ import annotations

SAYS = (
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
"""The driver's words for those of its errors after which the process has to end; in RuntimeErrors of torch's
and of Triton's."""


def is_device_lost(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAYS)
