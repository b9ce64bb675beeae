"""What is kept of things that are over, so that a late echo of them is known for one: the newest so many.
Pure."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

MEMORY_OF_PAST = 8192
_K = TypeVar("_K")
_V = TypeVar("_V")


def remember(past: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """Books the newest; forgets the oldest where there are too many."""
    past[key] = value
    past.move_to_end(key)
    if len(past) > MEMORY_OF_PAST:
        past.popitem(last=False)
