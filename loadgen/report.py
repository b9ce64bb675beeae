"""What a load run showed: percentiles, throughput, goodput; as a table, as JSON, as a plot.

    TTFT  time to first token: from the start of a request to its first streamed event
    TPOT  time per output token: (last - first) / (tokens - 1)
    ITL   inter-token latency: every gap between two events of one request
    E2E   from the start of a request to its last event

Goodput counts the requests that met every objective.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console

from ..traces.console import figures_table
from .settings import LoadSettings


@dataclass(slots=True)
class Sample:
    """Times are seconds since the start of the run; ``arrivals`` has one a streamed event."""

    start: float
    end: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    error: str = ""


PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Times:
    """The four latencies of one request in seconds; ``itl`` has one entry a gap. ``tpot`` is None below two
    tokens."""

    ttft: float
    tpot: float | None
    itl: list[float]
    e2e: float


@dataclass(frozen=True, slots=True)
class Report:
    """A whole run. ``latencies``: name -> {mean, p50, p90, p95, p99, max} in seconds."""

    num_requests: int
    num_failed: int
    duration_s: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    latencies: dict[str, dict[str, float]]
    num_good: int | None  # None: no objectives were given
    goodput_requests_per_s: float | None
    errors: dict[str, int]


def times_of(sample: Sample) -> Times:
    """The latencies of a request that did not fail."""
    first, last = sample.arrivals[0], sample.arrivals[-1]
    tpot = (last - first) / (sample.num_output_tokens - 1) if sample.num_output_tokens > 1 else None
    return Times(first - sample.start, tpot, np.diff(sample.arrivals).tolist(), last - sample.start)


def summarize(samples: Sequence[Sample], duration_s: float, slo: str = "") -> Report:
    """``slo`` as in ``ttft=0.5,tpot=0.05`` (seconds); empty for none."""
    errors: dict[str, int] = {}
    for sample in samples:
        if sample.error or not sample.arrivals:
            message = sample.error or "no token arrived"
            errors[message] = errors.get(message, 0) + 1
    served = [sample for sample in samples if not sample.error and sample.arrivals]
    times = [times_of(sample) for sample in served]
    num_output = sum(sample.num_output_tokens for sample in served)
    num_prompt = sum(sample.num_prompt_tokens for sample in served)
    objectives = {name: float(limit) for name, limit in (part.split("=") for part in slo.split(",") if part)}
    num_good = sum(_is_good(one, objectives) for one in times) if objectives else None
    return Report(
        num_requests=len(samples),
        num_failed=len(samples) - len(served),
        duration_s=duration_s,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=sum(sample.num_cached_tokens for sample in served),
        num_output_tokens=num_output,
        requests_per_s=len(served) / duration_s,
        output_tokens_per_s=num_output / duration_s,
        total_tokens_per_s=(num_prompt + num_output) / duration_s,
        latencies={name: _distribution(values) for name, values in _by_latency(times).items()},
        num_good=num_good,
        goodput_requests_per_s=None if num_good is None else num_good / duration_s,
        errors=errors,
    )


def _by_latency(times: Sequence[Times]) -> dict[str, list[float]]:
    return {
        "ttft": [one.ttft for one in times],
        "tpot": [one.tpot for one in times if one.tpot is not None],
        "itl": [gap for one in times for gap in one.itl],
        "e2e": [one.e2e for one in times],
    }


def _is_good(times: Times, objectives: dict[str, float]) -> bool:
    seen = {
        "ttft": times.ttft,
        "tpot": times.tpot or 0.0,
        "itl": max(times.itl, default=0.0),
        "e2e": times.e2e,
    }
    return all(seen[name] <= limit for name, limit in objectives.items())


def _distribution(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    points = np.percentile(values, PERCENTILES)
    named = {f"p{percentile}": float(point) for percentile, point in zip(PERCENTILES, points, strict=True)}
    return {"mean": float(np.mean(values)), **named, "max": float(np.max(values))}


def print_report(report: Report, settings: LoadSettings, console: Console) -> None:
    """The report as tables for a person."""
    load = f"{settings.rate:g} requests/s" if settings.rate else f"{settings.open_requests} at a time"
    load = f"as in {settings.trace.name}" if settings.trace else load
    columns = ["mean", *(f"p{percentile}" for percentile in PERCENTILES), "max"]
    table = figures_table("", *columns)
    for name, values in report.latencies.items():
        table.add_row(
            name.upper(), *(f"{values[column] * 1e3:,.1f}" if values else "-" for column in columns)
        )
    console.print(f"{report.num_requests} requests, {load}; milliseconds", highlight=False)
    console.print(table)
    console.print(
        f"{report.requests_per_s:,.2f} requests/s · {report.output_tokens_per_s:,.1f} output tokens/s · "
        f"{report.total_tokens_per_s:,.1f} tokens/s in all · {report.duration_s:,.1f} s\n"
        f"{report.num_output_tokens:,} output and {report.num_prompt_tokens:,} prompt tokens, "
        f"{report.num_cached_tokens:,} of them cached",
        highlight=False,
    )
    if report.num_good is not None:
        share = report.num_good / report.num_requests
        console.print(
            f"goodput under {settings.slo}: {report.goodput_requests_per_s:,.2f} requests/s ({share:.1%})",
            highlight=False,
        )
    for message, count in report.errors.items():
        console.print(f"{count} failed: {message}", style="red", markup=False, highlight=False)


def write_json(path: Path, report: Report, settings: LoadSettings, samples: Sequence[Sample]) -> None:
    """The settings, the report, and one entry a request."""
    requests = [
        {
            **asdict(sample),
            "arrivals": [round(at, 6) for at in sample.arrivals],
            "start": round(sample.start, 6),
        }
        for sample in samples
    ]
    content = {"settings": settings.model_dump(mode="json"), "report": asdict(report), "requests": requests}
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def draw_plot(path: Path, report: Report, samples: Sequence[Sample]) -> None:
    """Cumulative distributions of the latencies, as PNG."""
    from matplotlib.figure import Figure

    series = _by_latency([times_of(sample) for sample in samples if not sample.error and sample.arrivals])
    figure = Figure((4 * len(series), 3.2), layout="constrained")
    axes = figure.subplots(1, len(series), sharey=True)
    for axis, (name, values) in zip(axes, series.items(), strict=True):
        axis.plot(
            np.sort(values) * 1e3, np.arange(1, len(values) + 1) / max(1, len(values)), drawstyle="steps-post"
        )
        axis.set(title=name.upper(), xlabel="milliseconds", ylim=(0, 1.02))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of requests or gaps")
    figure.suptitle(
        f"{report.requests_per_s:.2f} requests/s, {report.output_tokens_per_s:.1f} output tokens/s"
    )
    figure.savefig(path, format="png", dpi=120)
