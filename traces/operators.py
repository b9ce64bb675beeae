"""Traces made from traces. Each reads its sources anew whenever it is iterated, one request at a time."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from hashlib import blake2b

from .errors import TraceError
from .request import Trace, TraceRequest


def scaled(trace: Trace, factor: float) -> Trace:
    """Time compressed by ``factor``, which multiplies the rate; bursts keep their number of requests."""

    def read() -> Iterator[TraceRequest]:
        return (replace(request, arrival_s=request.arrival_s / factor) for request in trace)

    return replace(trace, read=read)


def thinned(trace: Trace, share: float, seed: int = 0) -> Trace:
    """About ``share`` of the requests at their own times, chosen by seed; the turns of a session stay
    together or go together."""
    limit = int(share * 2**64)

    def chosen(index: int, request: TraceRequest) -> bool:
        name = request.session or str(index)
        return int.from_bytes(blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little") < limit

    return replace(
        trace, read=lambda: (request for index, request in enumerate(trace) if chosen(index, request))
    )


def cut(
    trace: Trace, start_s: float = 0.0, end_s: float = math.inf, max_requests: int | None = None
) -> Trace:
    """The requests that arrive from ``start_s`` to before ``end_s``, at most ``max_requests`` of them;
    ``start_s`` becomes time 0."""

    def read() -> Iterator[TraceRequest]:
        count = 0
        for request in trace:
            if request.arrival_s >= end_s or count == max_requests:
                return
            if request.arrival_s >= start_s:
                count += 1
                yield replace(request, arrival_s=request.arrival_s - start_s) if start_s else request

    return replace(trace, read=read, origin_s=trace.origin_s + start_s if trace.origin_s else 0.0)


def mixed(traces: Sequence[Trace]) -> Trace:
    """All requests of all traces, every trace from its own time 0. Traces share no blocks and no sessions.

    Raises TraceError if their block sizes differ.
    """
    if len(traces) == 1:
        return traces[0]
    sizes = {trace.block_size for trace in traces} - {None}
    if len(sizes) > 1:
        named = ", ".join(f"{trace.name} {trace.block_size}" for trace in traces if trace.block_size)
        raise TraceError(
            f"traces with blocks of different sizes cannot be mixed (tokens a block: {named}); "
            "convert them apart"
        )
    parts = [replace(trace, read=partial(_apart, trace, index)) for index, trace in enumerate(traces)]
    return Trace(
        " + ".join(trace.name for trace in traces),
        lambda: heapq.merge(*parts, key=lambda request: request.arrival_s),
        next(iter(sizes), None),
    )


def mean_rate(trace: Trace) -> float:
    """Requests per second from the first to the last arrival. Reads the trace once. Raises TraceError where
    it has no span."""
    count, first_s, last_s = 0, 0.0, 0.0
    for request in trace:
        first_s = first_s if count else request.arrival_s
        last_s = request.arrival_s
        count += 1
    if last_s <= first_s:
        raise TraceError(f"{trace.name}: {count} requests at one time have no rate; leave out --rate")
    return count / (last_s - first_s)


def _apart(trace: Trace, index: int) -> Iterator[TraceRequest]:
    """The requests with hashes and sessions that no other part of the mix has."""
    key = index.to_bytes(8, "little")
    for request in trace:
        hashes = tuple(_digest(key + one.to_bytes(16, "little")) for one in request.block_hashes)
        session = f"{_digest(key + request.session.encode()):032x}" if request.session else ""
        yield replace(request, block_hashes=hashes, session=session)


def _digest(data: bytes) -> int:
    return int.from_bytes(blake2b(data, digest_size=16).digest(), "little")
