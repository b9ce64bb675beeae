"""A GPU whose context is lost, after an address that is nobody's, say: what such an error looks like. The
context is the process's, so all calls fail from then on, whosever request they are for; only another process
helps.

A product of cuBLAS that meets such a context raises a status of its own, and is not known by it; the copy
that begins the next step is.
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
