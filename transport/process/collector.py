"""Python's collector of cyclic garbage in a process that serves: it must neither look at what stays nor come
in mid-step for nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLD = (
    10_000  # objects: a burst of 64 requests makes so many, and none of them is part of a cycle when it ends
)


def settle_heap() -> None:
    """Call it when all is loaded, before serving: what is here now stays, and the collector need not look at
    it again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(THRESHOLD)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """The collector comes as seldom as in a process that serves, until this is over."""
    before = gc.get_threshold()
    gc.set_threshold(THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*before)
