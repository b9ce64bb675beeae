"""A workload that is like a trace: its rate over time, how its arrivals clump beside that, and its pairs of
lengths.

The rate over time is the trace's own, in steps. What the steps do not explain is the gaps' coefficient of
variation in operational time (see arrivals.py): long steps leave bursts to chance, short steps repeat them
where they were. Two passes over the trace; memory does not grow with its number of requests. Prefix reuse and
sessions are not fitted: a fitted workload has no block hashes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter

import numpy as np

from ..errors import WorkloadError
from ..request import Trace
from ..tallies import FoldingBins, Moments
from .arrivals import Arrivals, OperationalClock
from .lengths import JointLengths
from .workload import Workload

NUM_CLASSES = 64
TAIL = (0.99, 0.995, 0.999)  # the longest few are worth classes of their own
MIN_REQUESTS = 10
Edges = tuple[tuple[int, ...], tuple[int, ...]]


def fit(trace: Trace, step_s: float = 10.0) -> Workload:
    """``step_s``: step of the rate profile; doubled until at most 2,048 steps cover the trace. Raises
    WorkloadError, TraceError."""
    bins = FoldingBins(step_s)
    prompt, output = Counter[int](), Counter[int]()
    count, first_s, last_s = 0, 0.0, 0.0
    for request in trace:
        first_s = first_s if count else request.arrival_s
        last_s = request.arrival_s - first_s
        bins.add(last_s)
        prompt[request.num_prompt_tokens] += 1
        output[request.num_output_tokens] += 1
        count += 1
    if count < MIN_REQUESTS or not last_s:
        raise WorkloadError(
            f"{trace.name}: {count} requests over {last_s:g} s are too few to fit; {MIN_REQUESTS} "
            "and some time are needed"
        )
    arrivals = _profile(bins, count, last_s)
    edges = (class_edges(prompt), class_edges(output))
    cv, cells = _second_pass(trace, arrivals, first_s, edges)
    lengths = JointLengths(
        prompt_edges=edges[0],
        output_edges=edges[1],
        cells=tuple((*pair, n) for pair, n in sorted(cells.items())),
    )
    return Workload(arrivals=arrivals.model_copy(update={"cv": cv}), lengths=lengths)


def _profile(bins: FoldingBins, count: int, span_s: float) -> Arrivals:
    """The rate in each step. The last step, in which the trace ends, counts for the part that it lasted, or
    not at all if that is short."""
    width_s, counts = bins.width_s, np.array(bins.counts, dtype=float)
    if len(counts) == 1:
        return Arrivals(rate=count / span_s)
    lasted_s = span_s - (len(counts) - 1) * width_s
    counts[-1] *= width_s / lasted_s if lasted_s > width_s / 2 else 0
    counts = counts if counts[-1] else counts[:-1]
    return Arrivals(
        rate=float(counts.mean()) / width_s,
        profile=tuple((counts / counts.mean()).round(6).tolist()),
        step_s=width_s,
    )


def _second_pass(
    trace: Trace, arrivals: Arrivals, first_s: float, edges: Edges
) -> tuple[float, Counter[tuple[int, int]]]:
    """The CV of the gaps in operational time, and the number of requests in each pair of length classes."""
    clock = OperationalClock(arrivals)
    gaps, last = Moments(), 0.0
    cells: Counter[tuple[int, int]] = Counter()
    for request in trace:
        now = clock.operational_at(request.arrival_s - first_s)
        if cells:
            gaps.add(now - last)
        last = now
        cells[
            bisect_right(edges[0], request.num_prompt_tokens) - 1,
            bisect_right(edges[1], request.num_output_tokens) - 1,
        ] += 1
    return round(gaps.deviation / gaps.mean, 6), cells


def class_edges(lengths: Counter[int]) -> tuple[int, ...]:
    """Edges of about NUM_CLASSES classes with as many requests each; a length that alone would fill one is a
    class of its own."""
    values, total = sorted(lengths.items()), lengths.total()
    wanted = iter(sorted([*(index / NUM_CLASSES for index in range(NUM_CLASSES)), *TAIL]))
    edges = {values[-1][0] + 1}
    seen, at = 0, next(wanted, None)
    for value, count in values:
        if count * NUM_CLASSES >= total:
            edges |= {value, value + 1}
        while at is not None and seen <= at * total < seen + count:
            edges.add(value)
            at = next(wanted, None)
        seen += count
    return tuple(sorted(edges))
