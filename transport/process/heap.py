"""A process's heap of small objects: how seldom Python's collector scans it, and its way into huge pages.

A process that serves must neither scan objects that stay nor run the collector in mid-step for nothing.

Simulations follow pointers through hundreds of megabytes of small objects. With pages of 4 KiB most of these
steps miss the processor's table of addresses, and in a virtual machine each miss is looked up in two tables.
Python's allocator asks for its memory a mebibyte at a time, so that the kernel does not make huge pages by
itself; from Linux 6.1 on it does when asked (madvise, MADV_COLLAPSE).
"""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 10_000  # objects: a burst of 64 requests makes that many, and leaves no cycle when it ends
HUGE_PAGE_BYTES = 2 << 20
_MADV_COLLAPSE = 25


def settle_heap() -> None:
    """Exempt all present objects from collection. Call it when all is loaded, before serving."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)


@contextmanager
def seldom_collected(threshold: int = THRESHOLD) -> Iterator[None]:
    """Let the collector run as seldom as in a process that serves; at a threshold of 0, never."""
    before = gc.get_threshold()
    gc.set_threshold(threshold)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def collapse_heap() -> int:
    """Collapse the present heap; call it again when it has grown. This takes a tenth of a second for some 300
    MiB in small pages, and next to nothing for huge ones. Return how many bytes were asked for; the kernel
    may have done less, or nothing where it cannot."""
    if not sys.platform.startswith("linux"):
        return 0
    madvise, asked = ctypes.CDLL(None).madvise, 0
    for first, end in _anonymous_ranges():
        madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_COLLAPSE)
        asked += end - first
    return asked


def _anonymous_ranges() -> Iterator[tuple[int, int]]:
    """Yield the whole huge pages of private memory that belongs to no file. (Threads' stacks are among them;
    memory that was never used stays unused.)"""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            addresses, rights, _, _, inode, *name = line.split(maxsplit=5)
            if rights == "rw-p" and inode == "0" and (not name or name[0].startswith(("[heap]", "[anon"))):
                first, end = (int(address, 16) for address in addresses.split("-"))
                first, end = (
                    -(-first // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES,
                    end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES,
                )
                if first < end:
                    yield first, end
