"""The streamed statistics are those that numpy computes from the whole trace."""

from __future__ import annotations

import io
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from support.traces import MOONCAKE, trace_of, written

from splitserve.traces.plots import draw_traces
from splitserve.traces.readers import open_trace
from splitserve.traces.request import TraceRequest
from splitserve.traces.statistics import Shapes, TraceStatistics, describe
from splitserve.traces.tables import print_statistics
from splitserve.traces.tallies import FOLD_AT, FoldingBins, Windows

ARRIVALS = st.lists(st.floats(0, 3000), min_size=2, max_size=80).map(sorted)
LENGTH_PAIRS = st.tuples(st.integers(1, 5000), st.integers(1, 500))


def described(
    requests: list[TraceRequest], block_size: int | None = None, origin_s: float = 0.0
) -> TraceStatistics:
    found = describe(trace_of(requests, block_size, origin_s))
    assert found is not None
    return found[0]


@given(ARRIVALS, st.floats(0, 120))
def test_arrivals(arrivals: list[float], origin_s: float) -> None:
    statistics = described([TraceRequest(arrival, 1, 1) for arrival in arrivals], origin_s=origin_s)
    gaps = np.diff(arrivals)
    assert statistics.num_requests == len(arrivals)
    assert statistics.span_s == arrivals[-1] - arrivals[0]
    if gaps.mean() > 1e-9:
        assert statistics.iat_cv == pytest.approx(gaps.std() / gaps.mean(), rel=1e-6, abs=1e-6)
    for width in (1, 10, 60):
        counts = np.bincount([math.floor((arrival + origin_s) / width) for arrival in arrivals])
        counts = counts[math.floor((arrivals[0] + origin_s) / width) :]
        assert statistics.peak[width] == counts.max()
        assert statistics.sliding_peak[width] == max(
            sum(end - width < at <= end for at in arrivals) for end in arrivals
        )
        whole = counts[:-1]
        if len(whole) > 1:
            assert statistics.dispersion[width] == pytest.approx(whole.var() / whole.mean())


@given(st.lists(LENGTH_PAIRS, min_size=1, max_size=60))
def test_lengths(pairs: list[tuple[int, int]]) -> None:
    statistics = described([TraceRequest(0.0, *pair) for pair in pairs])
    for one, values in zip((statistics.prompt, statistics.output), np.array(pairs).T, strict=True):
        assert [one.p50, one.p90, one.p99] == pytest.approx(list(np.percentile(values, [50, 90, 99])))
        assert (one.mean, one.min, one.max) == (pytest.approx(values.mean()), values.min(), values.max())
    deviations = np.array(pairs).std(axis=0)
    if deviations.all():
        assert statistics.correlation == pytest.approx(np.corrcoef(np.array(pairs).T)[0, 1], abs=1e-6)
    else:
        assert statistics.correlation is None


def test_prefix_reuse_stops_at_the_first_block_that_is_new() -> None:
    requests = [TraceRequest(0.0, 48, 1, hashes) for hashes in ((1, 2, 3), (1, 2, 4), (9, 2, 3), ())]
    blocks = described(requests, 16).blocks
    assert blocks is not None
    assert (blocks.num_blocks, blocks.num_distinct_blocks, blocks.reuse) == (9, 5, 2 / 9)
    assert described(requests[3:]).blocks is None


def test_windows_pass_silence_in_one_step() -> None:
    windows = Windows(1.0)
    for arrival_s in (0.0, 0.5, 1e12, 1e12 + 1):
        windows.add(arrival_s)
    assert windows.counts.count == 1e12 + 1
    assert windows.dispersion == pytest.approx(5 / 3)


@given(st.lists(st.floats(0, 1e7), min_size=1, max_size=30))
def test_bins_over_time_fold_and_lose_nothing(arrivals: list[float]) -> None:
    bins = FoldingBins()
    for arrival in arrivals:
        bins.add(arrival)
    assert len(bins.counts) <= FOLD_AT
    expected = np.bincount([int(arrival / bins.width_s) for arrival in arrivals], minlength=len(bins.counts))
    assert bins.counts == expected.tolist()


def test_the_table_and_the_picture_show_all_of_it(tmp_path: Path) -> None:
    mooncake = open_trace(written(tmp_path / "mooncake.jsonl", MOONCAKE))
    one_request = trace_of([TraceRequest(5.0, 10, 10)])
    found: list[tuple[TraceStatistics, Shapes]] = [
        one for trace in (mooncake, one_request) if (one := describe(trace))
    ]
    text = io.StringIO()
    print_statistics([statistics for statistics, _ in found], Console(file=text, width=120))
    assert all(part in text.getvalue() for part in ("mooncake.jsonl", "CV of gaps", "1,100", "28.6%"))
    draw_traces(tmp_path / "plot.png", found[1:])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_coarse_clock_is_told() -> None:
    statistics = described([TraceRequest(float(3 * (index // 10)), 5, 5) for index in range(100)])
    text = io.StringIO()
    print_statistics([statistics], Console(file=text, width=200))
    assert "only 10 distinct arrival times for 100 requests" in text.getvalue()


def test_nothing_is_described_of_an_empty_trace() -> None:
    assert describe(trace_of([])) is None
