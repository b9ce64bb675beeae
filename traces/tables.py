"""Trace statistics as a table for a person: one column a trace."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from .statistics import WIDTHS_S, LengthStatistics, TraceStatistics

GRID_SHARE = 0.5  # below this share of distinct arrival times the gaps are the clock's, not the load's
Row = tuple[str, str]


def print_statistics(traces: Sequence[TraceStatistics], console: Console) -> None:
    """Arrivals, lengths and, where any trace has them, blocks and sessions; then what is to be read with
    care."""
    table = Table()
    table.add_column("", no_wrap=True)
    for one in traces:
        table.add_column(one.name, justify="right", overflow="fold", min_width=9)
    parts = (
        (_arrivals, _lengths, _reuse)
        if any(one.blocks or one.num_sessions for one in traces)
        else (_arrivals, _lengths)
    )
    for part in parts:
        section = [list(part(one)) for one in traces]
        rows = list(zip(*section, strict=True))
        for row in rows:
            table.add_row(row[0][0], *(value for _, value in row), end_section=row is rows[-1])
    console.print(table)
    for one in traces:
        if one.num_distinct_arrivals < GRID_SHARE * one.num_requests:
            console.print(
                f"{one.name}: only {one.num_distinct_arrivals:,} distinct arrival times for "
                f"{one.num_requests:,} requests: written on a "
                "coarse clock, so that its gaps and short peaks say little",
                style="yellow",
                markup=False,
                highlight=False,
            )


def _arrivals(one: TraceStatistics) -> Iterator[Row]:
    yield "requests", f"{one.num_requests:,}"
    yield "span, s", f"{one.span_s:,.1f}"
    yield "rate, requests/s", _number(one.mean_rate, ",.3f")
    yield "CV of gaps", _number(one.iat_cv, ".2f")
    for width in WIDTHS_S:
        yield f"peak in {width} s, by the clock", f"{one.peak[width]:,}"
        yield f"peak in any {width} s", f"{one.sliding_peak[width]:,}"
        yield f"dispersion over {width} s", _number(one.dispersion[width], ",.1f")


def _lengths(one: TraceStatistics) -> Iterator[Row]:
    yield from _of_lengths("prompt", one.prompt)
    yield from _of_lengths("output", one.output)
    yield "correlation", _number(one.correlation, "+.2f")
    yield "correlation of logarithms", _number(one.log_correlation, "+.2f")


def _of_lengths(name: str, lengths: LengthStatistics) -> Iterator[Row]:
    yield f"{name} tokens, mean", f"{lengths.mean:,.1f}"
    for label, value in (
        ("p50", lengths.p50),
        ("p90", lengths.p90),
        ("p99", lengths.p99),
        ("max", lengths.max),
    ):
        yield f"{name} tokens, {label}", f"{value:,.0f}"


def _reuse(one: TraceStatistics) -> Iterator[Row]:
    blocks = one.blocks
    yield "tokens a block", f"{blocks.block_size}" if blocks else "-"
    yield "prompt blocks", f"{blocks.num_blocks:,}" if blocks else "-"
    yield "distinct blocks", f"{blocks.num_distinct_blocks:,}" if blocks else "-"
    yield "reused, unbounded cache", _number(blocks.reuse if blocks else None, ".1%")
    yield "sessions", _number(one.num_sessions, ",d")


def _number(value: float | None, spec: str) -> str:
    return "-" if value is None else format(value, spec)
