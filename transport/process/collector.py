"""Python's collector of cyclic garbage in a process that serves: it must neither scan objects that stay nor
run in mid-step for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = 10_000  # objects: a burst of 64 requests makes that many, and leaves no cycle when it ends


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
