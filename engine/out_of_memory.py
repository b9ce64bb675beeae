"""A step that runs out of memory is no broken worker: what such an error looks like, and what is given back
after it."""

from __future__ import annotations

import traceback

import torch

SAYS = ("can't allocate memory", "not enough memory", "out of memory", "ALLOC_FAILED")
"""In plain RuntimeErrors: torch's CPU allocator; the CUDA driver, by torch or Triton; cuBLAS."""


def is_out_of_memory(error: BaseException) -> bool:
    """Python's, torch's, or of a library below it."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in SAYS)


def release_memory_of(error: BaseException) -> None:
    """Drops the tensors that the failed step still holds through its traceback, and what the GPU's allocator
    keeps for later."""
    traceback.clear_frames(error.__traceback__)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
