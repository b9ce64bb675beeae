"""Settings of the C library's allocator, under which large bodies give their memory back to the system."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
LARGE_BYTES = 256 << 10
NUM_ARENAS = 2


def give_memory_back() -> None:
    """Blocks of ``LARGE_BYTES`` come from the system and go back to it when they are freed. Left alone, glibc
    raises that bound to the largest block that was freed (up to 32 MiB), and from then on keeps such blocks.
    Does nothing with another C library."""
    if (mallopt := getattr(ctypes.CDLL(None), "mallopt", None)) is not None:
        for option, value in (
            (M_MMAP_THRESHOLD, LARGE_BYTES),
            (M_TRIM_THRESHOLD, LARGE_BYTES),
            (M_ARENA_MAX, NUM_ARENAS),
        ):
            mallopt(option, value)


def trimmer() -> Callable[[], None]:
    """A function that gives all free memory back; nothing with another C library."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return (lambda: None) if trim is None else (lambda: trim(0))
