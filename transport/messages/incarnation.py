"""Incarnation numbers: which life of a worker or a coordinator a message is about. They need no clock and no
file.

    63 bits:   process, 41 bits, random   |   count, 22 bits: incarnations of that process, from 1

Two incarnations of one process are ordered by their counts. Two processes of one name have no order: between
them a clock may have been set back or a file lost, and two coordinators may have met them in different
orders. Where it matters which of the two is here now, it is asked: the answer to ``Meet`` names the
incarnation that gives it.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable

PROCESS_BITS, COUNT_BITS = 41, 22


def incarnations(draw: Callable[[int], int] = secrets.randbits) -> Callable[[], int]:
    """A source of one process's numbers, each later than those before it. ``draw``: that many random bits.

    Call it in the process itself: two that were forked after the call would share their numbers.
    """
    return itertools.count((draw(PROCESS_BITS) << COUNT_BITS) + 1).__next__


def same_process(a: int, b: int) -> bool:
    """Whether these are incarnations of one process."""
    return a >> COUNT_BITS == b >> COUNT_BITS


def is_earlier(a: int, b: int) -> bool:
    """Whether ``a`` is an incarnation that the process of ``b`` had before ``b``."""
    return a < b and same_process(a, b)


def has_ended(incarnation: int, ended: int) -> bool:
    """Whether this is ``ended``, the newest incarnation of its process that is over, or one before that."""
    return incarnation <= ended and same_process(incarnation, ended)
