"""CPU memory on transparent huge pages: weights and KV cache are read from end to end, and miss the TLB less
there.

Measured on one core: weights are read at 20 GB/s from huge pages, at 16 from small ones. A request only:
where Linux does not give huge pages, everything works as before.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import threading
import time
import weakref
from itertools import islice

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 32 << 20  # of packed weights
FIRST_BYTES = 64 << 20  # found at once: what the first requests use
POPULATED_BYTES = (
    1 << 30
)  # and no more unasked: a pool may be most of a host's memory, of which little is ever used
POPULATING = "populate-kv"  # what `top -H` calls the thread that finds the rest
PR_SET_NAME = 15  # of linux/prctl.h
BACKGROUND_SHARE = 0.1  # of a core, for the rest: the first requests run beside it
MADV_POPULATE_WRITE = 23  # Linux 5.14; not yet in the mmap module
ALIGNMENT = 64  # a cache line


def huge_page_bytes(num_bytes: int) -> Tensor:
    """A fresh zeroed mapping, uint8 [num_bytes]. (malloc would hand out memory that already lies on small
    pages.)"""
    mapping = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    raw = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE_PAGE_BYTES
    memory = raw[start : start + num_bytes]
    advise_huge_pages(memory)
    return memory


def advise_huge_pages(memory: Tensor) -> None:
    """Ask for huge pages under ``memory`` (contiguous, on a CPU), as far as whole ones fit. Before it is
    first written."""
    if not sys.platform.startswith("linux"):
        return
    start = -(-memory.data_ptr() // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    length = (memory.data_ptr() + memory.nbytes - start) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if length > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), mmap.MADV_HUGEPAGE)


def populate(memory: Tensor) -> None:
    """Have Linux find the pages of ``memory`` before requests need them: the first ones now, others up to
    POPULATED_BYTES little by little in a thread, while the memory is already in use. Its content stays.

    A virtual machine may need seconds for a GiB that it never touched before. Where the kernel does not know
    this request, pages are found at first use, as ever.
    """
    if not sys.platform.startswith("linux"):
        return
    first = memory.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    end = memory.data_ptr() + memory.nbytes
    end = min(end, first + POPULATED_BYTES)
    pages = iter(range(first, end, HUGE_PAGE_BYTES))
    known = all(_found(page, end) for page in islice(pages, FIRST_BYTES // HUGE_PAGE_BYTES))
    used = weakref.ref(memory)

    def populate_the_rest() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, POPULATING.encode(), 0, 0, 0)
        for page in pages:
            began, kept = time.monotonic(), used()
            if kept is None or not _found(page, end):
                return
            del kept
            time.sleep((time.monotonic() - began) * (1 / BACKGROUND_SHARE - 1))

    if known:
        threading.Thread(target=populate_the_rest, name="populate-kv-cache", daemon=True).start()


def _found(page: int, end: int) -> bool:
    """One huge page at a time: the kernel holds the address space's lock meanwhile, and a step that allocates
    waits for it."""
    madvise = ctypes.CDLL(None).madvise  # without the GIL
    return bool(
        madvise(ctypes.c_void_p(page), ctypes.c_size_t(min(HUGE_PAGE_BYTES, end - page)), MADV_POPULATE_WRITE)
        == 0
    )


class HugePageArena:
    """Hands out tensors side by side from large mappings, so that small ones lie on huge pages too. Nothing
    is given back."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count], zeroed."""
        num_bytes = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if num_bytes > len(self._chunk):
            self._chunk = huge_page_bytes(max(num_bytes, CHUNK_BYTES))
        memory, self._chunk = self._chunk[:num_bytes], self._chunk[num_bytes:]
        return memory[: count * dtype.itemsize].view(dtype)
