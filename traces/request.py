"""A trace: arrivals, lengths and block hashes of requests, never text."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    ``block_hashes`` name the prompt's blocks from its start: an equal hash means equal tokens in this block
    *and all before it*. The last may stand for a block that is only partly filled. They are numbers below
    2**128; empty where the trace does not know them.
    """

    arrival_s: float  # seconds since the trace's start
    num_prompt_tokens: int
    num_output_tokens: int
    block_hashes: tuple[int, ...] = ()
    session: str = ""  # requests of one session are turns of one conversation; empty: unknown


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival, read or drawn anew by every iteration; nothing is kept in memory.

    Iterating raises TraceError where the source is wrong.
    """

    name: str
    read: Callable[[], Iterator[TraceRequest]]
    block_size: int | None = None  # tokens that one block hash stands for; None: the trace has no hashes
    # Unix time at arrival 0, which aligns windows with the wall clock; 0: the trace has no date
    origin_s: float = 0.0

    def __iter__(self) -> Iterator[TraceRequest]:
        return self.read()
