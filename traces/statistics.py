"""Statistics of a trace: arrivals, lengths, and reuse of prompts.

    IAT CV      standard deviation over mean of the gaps between arrivals: 1 for Poisson arrivals
    peak        most arrivals in one window; windows are aligned to the wall clock (where the trace has a
                date) or to the trace's start; the sliding peak is that of any window
    dispersion  variance over mean of the arrivals in consecutive windows: 1 for Poisson arrivals, at every
                width
    reuse       share of all prompt blocks whose hash, and those of all blocks before it, an earlier request
                had: the hit rate of one prefix cache without bound (it alone remembers every distinct block)

One pass. Only reuse and the names of sessions need memory that grows with the number of requests.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from .request import Trace, TraceRequest
from .tallies import CoMoments, FoldingBins, Moments, SlidingPeak, Windows, log_bin, percentiles

WIDTHS_S = (1, 10, 60)
SHOWN_PERCENTS = (50.0, 90.0, 99.0)


@dataclass(frozen=True, slots=True)
class LengthStatistics:
    """In tokens."""

    mean: float
    p50: float
    p90: float
    p99: float
    min: int
    max: int


@dataclass(frozen=True, slots=True)
class BlockStatistics:
    """Statistics of a trace's block hashes. Reuse is None if no prompt has a block."""

    block_size: int
    num_blocks: int
    num_distinct_blocks: int
    reuse: float | None


@dataclass(frozen=True, slots=True)
class TraceStatistics:
    """Keys of the peaks and the dispersion are widths in seconds. None: undefined for these values."""

    name: str
    num_requests: int
    span_s: float  # first to last arrival
    mean_rate: float | None  # requests per second of span
    iat_cv: float | None
    num_distinct_arrivals: int  # far fewer than requests: arrivals were written on a grid
    peak: dict[int, int]
    sliding_peak: dict[int, int]
    dispersion: dict[int, float | None]
    prompt: LengthStatistics
    output: LengthStatistics
    correlation: float | None  # of prompt and output lengths
    log_correlation: float | None  # of their logarithms: not ruled by the few longest
    num_sessions: int | None
    blocks: BlockStatistics | None

    def as_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(slots=True)
class Shapes:
    """What the plots show beyond the numbers."""

    arrivals: FoldingBins = field(default_factory=FoldingBins)
    gaps: Counter[int] = field(default_factory=Counter)  # log_bin of seconds; zero gaps are not in it
    prompt: Counter[int] = field(default_factory=Counter)  # of each length
    output: Counter[int] = field(default_factory=Counter)
    joint: Counter[tuple[int, int]] = field(default_factory=Counter)  # log_bin of prompt and output tokens


def describe(trace: Trace) -> tuple[TraceStatistics, Shapes] | None:
    """Reads the trace once. None if it has no request. Raises TraceError."""
    tally = _Tally(trace)
    tally.add_all(trace)
    return (tally.statistics(), tally.shapes) if tally.num_requests else None


class _Tally:
    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.shapes = Shapes()
        self.num_requests = 0
        self.first_s = self.last_s = 0.0
        self.num_distinct_arrivals = 0
        self.gaps = Moments()
        self.windows = [Windows(width, trace.origin_s) for width in WIDTHS_S]
        self.sliding = [SlidingPeak(width) for width in WIDTHS_S]
        self.lengths, self.log_lengths = CoMoments(), CoMoments()
        self.blocks: set[int] = set()
        self.num_blocks = self.num_reused = 0
        self.sessions: set[str] = set()

    def add_all(self, requests: Iterable[TraceRequest]) -> None:
        for request in requests:
            self._add_arrival(request.arrival_s)
            self._add_lengths(request.num_prompt_tokens, request.num_output_tokens)
            if request.block_hashes:
                self._add_blocks(request.block_hashes)
            if request.session:
                self.sessions.add(request.session)

    def _add_arrival(self, arrival_s: float) -> None:
        if self.num_requests:
            gap_s = arrival_s - self.last_s
            self.gaps.add(gap_s)
            if gap_s > 0:
                self.shapes.gaps[log_bin(gap_s)] += 1
                self.num_distinct_arrivals += 1
        else:
            self.first_s = arrival_s
            self.num_distinct_arrivals = 1
        self.last_s = arrival_s
        self.num_requests += 1
        for windows in self.windows:
            windows.add(arrival_s)
        for sliding in self.sliding:
            sliding.add(arrival_s)
        self.shapes.arrivals.add(arrival_s)

    def _add_lengths(self, prompt: int, output: int) -> None:
        self.shapes.prompt[prompt] += 1
        self.shapes.output[output] += 1
        self.shapes.joint[log_bin(prompt), log_bin(output)] += 1
        self.lengths.add(prompt, output)
        self.log_lengths.add(math.log(prompt), math.log(output))

    def _add_blocks(self, hashes: tuple[int, ...]) -> None:
        self.num_blocks += len(hashes)
        for one in hashes:
            if one not in self.blocks:
                break
            self.num_reused += 1
        self.blocks.update(hashes)

    def statistics(self) -> TraceStatistics:
        span_s = self.last_s - self.first_s
        return TraceStatistics(
            name=self.trace.name,
            num_requests=self.num_requests,
            span_s=span_s,
            mean_rate=self.num_requests / span_s if span_s else None,
            iat_cv=self.gaps.deviation / self.gaps.mean if self.gaps.mean else None,
            num_distinct_arrivals=self.num_distinct_arrivals,
            peak={width: windows.peak for width, windows in zip(WIDTHS_S, self.windows, strict=True)},
            sliding_peak={width: sliding.peak for width, sliding in zip(WIDTHS_S, self.sliding, strict=True)},
            dispersion={
                width: windows.dispersion for width, windows in zip(WIDTHS_S, self.windows, strict=True)
            },
            prompt=_of_lengths(self.shapes.prompt, self.lengths.x.mean),
            output=_of_lengths(self.shapes.output, self.lengths.y.mean),
            correlation=self.lengths.correlation,
            log_correlation=self.log_lengths.correlation,
            num_sessions=len(self.sessions) or None,
            blocks=self._of_blocks(),
        )

    def _of_blocks(self) -> BlockStatistics | None:
        if self.trace.block_size is None:
            return None
        reuse = self.num_reused / self.num_blocks if self.num_blocks else None
        return BlockStatistics(self.trace.block_size, self.num_blocks, len(self.blocks), reuse)


def _of_lengths(lengths: Counter[int], mean: float) -> LengthStatistics:
    values = sorted(lengths.items())
    p50, p90, p99 = percentiles(values, SHOWN_PERCENTS)
    return LengthStatistics(mean, p50, p90, p99, values[0][0], values[-1][0])
