"""Pictures of traces, as PNG: one row a trace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .statistics import Shapes, TraceStatistics
from .tallies import BINS_PER_DOUBLING, bin_start


def draw_traces(path: Path, traces: Sequence[tuple[TraceStatistics, Shapes]]) -> None:
    """Arrivals over time, how gaps compare with a Poisson process, distributions of lengths, and prompt
    against output lengths."""
    from matplotlib.figure import Figure

    figure = Figure((17, 3.4 * len(traces)), layout="constrained")
    rows = figure.subplots(len(traces), 4, squeeze=False)
    for axes, (statistics, shapes) in zip(rows, traces, strict=True):
        _draw_arrivals(axes[0], statistics, shapes)
        _draw_gaps(axes[1], statistics, shapes)
        _draw_lengths(axes[2], shapes)
        _draw_joint(axes[3], shapes)
    figure.savefig(path, format="png", dpi=110)


def _draw_arrivals(axis: Any, statistics: TraceStatistics, shapes: Shapes) -> None:
    counts, width_s = np.array(shapes.arrivals.counts), shapes.arrivals.width_s
    together = max(1, len(counts) // 300)  # as many steps as are distinguishable
    padded = np.pad(counts, (0, -len(counts) % together)).reshape(-1, together).sum(axis=1)
    edges = np.arange(len(padded) + 1) * together * width_s
    axis.stairs(padded / (together * width_s), edges, fill=True)
    axis.set(title=statistics.name, xlabel="seconds", ylabel=f"requests/s in {together * width_s:g} s")
    axis.grid(alpha=0.3)


def _draw_gaps(axis: Any, statistics: TraceStatistics, shapes: Shapes) -> None:
    """Share of gaps longer than x, for the trace and for Poisson arrivals at its rate."""
    num_gaps = max(1, statistics.num_requests - 1)
    bins = sorted(shapes.gaps)
    longer = np.cumsum([shapes.gaps[index] for index in reversed(bins)])[::-1] / num_gaps
    starts = [bin_start(index) for index in bins]
    axis.plot(starts, longer, label="trace")
    if statistics.mean_rate and bins:
        x = np.geomspace(starts[0], starts[-1] * 2, 200)
        axis.plot(x, np.exp(-x * statistics.mean_rate), linestyle="--", label="Poisson")
    cv = "-" if statistics.iat_cv is None else f"{statistics.iat_cv:.2f}"
    axis.set(
        title=f"gaps between arrivals, CV {cv}",
        xlabel="seconds",
        ylabel="share longer",
        yscale="log",
        ylim=(0.3 / num_gaps, 1.5),
    )
    if bins:
        axis.set_xscale("log")
    axis.legend()
    axis.grid(alpha=0.3)


def _draw_lengths(axis: Any, shapes: Shapes) -> None:
    for label, lengths in (("prompt", shapes.prompt), ("output", shapes.output)):
        values, shares = _cumulative(lengths)
        axis.plot(values, shares, drawstyle="steps-post", label=label)
    axis.set(title="lengths", xlabel="tokens", ylabel="share of requests", xscale="log", ylim=(0, 1.02))
    axis.legend()
    axis.grid(alpha=0.3)


def _draw_joint(axis: Any, shapes: Shapes) -> None:
    x, y = (np.array([index[of] for index in shapes.joint]) for of in (0, 1))
    grid = np.zeros((np.ptp(y) + 1, np.ptp(x) + 1))
    grid[y - y.min(), x - x.min()] = list(shapes.joint.values())
    edges = (2.0 ** (np.arange(one.min(), one.max() + 2) / BINS_PER_DOUBLING) for one in (x, y))
    mesh = axis.pcolormesh(*edges, np.ma.masked_equal(grid, 0), norm="log", cmap="viridis")
    axis.figure.colorbar(mesh, ax=axis, label="requests")
    axis.set(title="both lengths", xlabel="prompt tokens", ylabel="output tokens", xscale="log", yscale="log")


def _cumulative(counts: Counter[int]) -> tuple[list[int], Any]:
    values = sorted(counts)
    return values, np.cumsum([counts[value] for value in values]) / counts.total()
