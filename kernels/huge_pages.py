"""CPU memory on transparent huge pages: weights and KV cache are read from end to end, and miss the TLB less
there.

Measured on one core: weights are read at 20 GB/s from huge pages, at 16 from small ones. A request only:
where Linux does not give huge pages, everything works as before.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor

HUGE_PAGE_BYTES = 2 << 20
CHUNK_BYTES = 256 << 20  # of packed weights; the last huge page of each is used in part
FIRST_BYTES = 64 << 20  # found at once: what the first requests use
# and no more unasked: a pool may be most of a host's memory, of which little is ever used
POPULATED_BYTES = 1 << 30
POPULATING = "populate-kv"  # what `top -H` calls the thread that finds the rest
PR_SET_NAME = 15  # of linux/prctl.h
BACKGROUND_SHARE = 0.1  # of a core, for the rest: the first requests run beside it
MADV_POPULATE_WRITE = 23  # Linux 5.14; not yet in the mmap module
MAP_FIXED, MREMAP_MAYMOVE, MREMAP_FIXED = 0x10, 1, 2  # of linux/mman.h
MOVED_BYTES = 8 << 20  # of mapped weights at a time
MOVING_SHARE = 0.25  # of a core: until it is done, weights are read at half the rate
ALIGNMENT = 64  # a cache line
LEAST_SHARE = 0.5  # of weights on huge pages; below, a warning is logged
SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_log = logging.getLogger(__name__)


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


def map_file(file: int, num_bytes: int) -> Tensor:
    """The first bytes of a file, uint8 [num_bytes], at an address where huge pages can take their place."""
    memory = huge_page_bytes(num_bytes)
    wanted = ctypes.c_void_p(memory.data_ptr())
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | MAP_FIXED
    _call("mmap", wanted, ctypes.c_size_t(num_bytes), protection, flags, file, ctypes.c_long(0))
    return memory


def drop_pages(mapped: Tensor) -> None:
    """Leave a part of a mapped file, and the rest of its pages, to the page cache: no memory
    is taken here until they are read again. They must not have been written."""
    start = mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = ctypes.c_size_t(mapped.data_ptr() + mapped.nbytes - start)
    _call("madvise", ctypes.c_void_p(start), size, mmap.MADV_DONTNEED)


def move_to_huge_pages(mapped: Tensor) -> None:
    """Copy what ``map_file`` has mapped to huge pages at the same addresses, while it is read. It must not be
    written meanwhile. What fills no whole huge page stays, and so does all where Linux refuses.

    ``mremap`` replaces the pages of a piece at once: a thread that reads it waits for a moment at most."""
    first, end = mapped.data_ptr(), mapped.data_ptr() + mapped.nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    used = weakref.ref(mapped)
    del mapped
    for start in range(first, end, MOVED_BYTES):
        began, kept = time.monotonic(), used()
        if kept is None:
            return
        try:
            _move(start, min(MOVED_BYTES, end - start))
        except OSError as error:
            _log.info("packed weights stay on small pages: %s", error)
            return
        del kept
        time.sleep((time.monotonic() - began) * (1 / MOVING_SHARE - 1))


def huge_page_share(memory: Sequence[Tensor]) -> float | None:
    """The share of this memory that lies on huge pages; None where Linux does not report it."""
    spans = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in memory]
    found, overlap = 0, 0
    try:
        for line in Path("/proc/self/smaps").read_text().splitlines():
            name, _, rest = line.partition(" ")
            if "-" in name:
                first, last = (int(bound, 16) for bound in name.split("-"))
                overlap = sum(max(0, min(last, end) - max(first, start)) for start, end in spans)
            elif name == "AnonHugePages:":
                found += min(overlap, int(rest.split()[0]) << 10)
    except (OSError, ValueError):
        return None
    return found / max(1, sum(end - start for start, end in spans))


def warn_of_small_pages(memory: Sequence[Tensor]) -> None:
    """Log a warning with the remedy if most of the memory, for which huge pages were asked, has none."""
    share = huge_page_share(memory)
    if share is None or share >= LEAST_SHARE:
        return
    try:
        is_off = "[never]" in SETTING.read_text()
    except OSError:
        is_off = True
    _log.warning(
        "%.0f%% of the weights lie on huge pages, so that decode steps take up to twice as long: %s",
        100 * share,
        f"they are off; allow them by `echo madvise > {SETTING}`"
        if is_off
        else "memory is fragmented; `echo 1 > /proc/sys/vm/compact_memory`, then start the worker again",
    )


def _move(start: int, num_bytes: int) -> None:
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    room, size = ctypes.c_size_t(num_bytes + HUGE_PAGE_BYTES), ctypes.c_size_t(num_bytes)
    found = _call("mmap", None, room, protection, flags, -1, ctypes.c_long(0))
    fresh = -(-found // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    try:
        _call("madvise", ctypes.c_void_p(fresh), size, mmap.MADV_HUGEPAGE)
        ctypes.memmove(fresh, start, num_bytes)  # without the GIL
        flags = MREMAP_MAYMOVE | MREMAP_FIXED
        _call("mremap", ctypes.c_void_p(fresh), size, size, flags, ctypes.c_void_p(start))
    except OSError:
        _call("munmap", ctypes.c_void_p(found), room)
        raise
    for left, right in ((found, fresh), (fresh + num_bytes, found + num_bytes + HUGE_PAGE_BYTES)):
        if left < right:
            _call("munmap", ctypes.c_void_p(left), ctypes.c_size_t(right - left))


def _call(name: str, *arguments: object) -> int:
    """A function of libc that returns an address or a status. Raises OSError."""
    function = getattr(ctypes.CDLL(None, use_errno=True), name)
    function.restype = ctypes.c_ssize_t if name in ("mmap", "mremap") else ctypes.c_int
    result = int(function(*arguments))
    if result == -1:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


class HugePageArena:
    """Hands out tensors side by side from large mappings, so that small ones lie on huge pages too. None but
    the last is given back."""

    def __init__(self) -> None:
        self._before = self._chunk = torch.empty(0, dtype=torch.uint8)

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """[count], zeroed."""
        num_bytes = -(-count * dtype.itemsize // ALIGNMENT) * ALIGNMENT
        if num_bytes > len(self._chunk):
            self._chunk = huge_page_bytes(max(num_bytes, CHUNK_BYTES))
        self._before = self._chunk
        memory, self._chunk = self._chunk[:num_bytes], self._chunk[num_bytes:]
        return memory[: count * dtype.itemsize].view(dtype)

    def take_back(self, last: Tensor) -> None:
        """The tensor that ``empty`` returned last is not used any more."""
        last.zero_()
        self._chunk = self._before
