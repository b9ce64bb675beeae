"""``splitserve trace ...``: each function is one command and returns its exit status. They raise
TraceError."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from .console import result_console, write_json, writing
from .errors import TraceError, TraceFileError, WorkloadError
from .operators import cut, mean_rate, mixed, scaled, thinned
from .own_format import write_trace
from .readers import open_trace
from .request import Trace
from .settings import (
    TraceConvertSettings,
    TraceFitSettings,
    TraceMakeSettings,
    TraceReading,
    TraceStatsSettings,
)
from .statistics import Shapes, TraceStatistics, describe
from .tables import print_statistics
from .workload.arrivals import Arrivals, diurnal_profile
from .workload.fit import fit as fitted
from .workload.lengths import MarginalLengths
from .workload.sessions import Sessions
from .workload.workload import Workload, read_workload, write_workload

DAY_S = 86_400.0
Described = tuple[TraceStatistics, Shapes]


def stats(settings: TraceStatsSettings, files: Sequence[Path]) -> int:
    """``splitserve trace stats``."""
    described = [_described(trace, path) for trace, path in zip(_opened(settings, files), files, strict=True)]
    print_statistics([statistics for statistics, _ in described], result_console())
    if settings.json_file:
        write_json(settings.json_file, [one.as_json() for one, _ in described], TraceError)
    if settings.plot_file:
        _draw(settings.plot_file, described)
    return 0


def convert(settings: TraceConvertSettings, files: Sequence[Path]) -> int:
    """``splitserve trace convert``."""
    parts = []
    for trace in _opened(settings, files):
        kept = thinned(trace, settings.keep, settings.seed) if settings.keep < 1 else trace
        parts.append(cut(kept, settings.start_s, settings.end_s or math.inf, settings.max_requests))
    trace = mixed(parts)
    factor = settings.scale if settings.rate is None else settings.rate / mean_rate(trace)
    return _write(settings.output, scaled(trace, factor) if factor else trace)


def make(settings: TraceMakeSettings) -> int:
    """``splitserve trace make``."""
    workload = read_workload(settings.workload) if settings.workload else _workload(settings)
    if settings.rate is not None:
        workload = workload.at_rate(settings.rate)
    duration_s = settings.duration_s or math.inf
    return _write(
        settings.output, workload.trace(settings.seed, max_requests=settings.requests, duration_s=duration_s)
    )


def fit(settings: TraceFitSettings, files: Sequence[Path]) -> int:
    """``splitserve trace fit``."""
    if len(files) != 1:
        raise WorkloadError(
            f"a workload is fitted to one trace, not to {len(files)}; mix them first: splitserve trace "
            "convert"
        )
    (trace,) = _opened(settings, files)
    workload = fitted(trace, settings.step_s)
    write_workload(settings.output, workload)
    described = _beside(trace, files[0], workload)
    print_statistics([statistics for statistics, _ in described], result_console())
    if described[0][0].blocks:
        print(
            "Prefix reuse is not fitted: what is drawn has no block hashes. Use the trace itself where reuse "
            "matters."
        )
    arrivals = workload.arrivals
    print(
        f"wrote {settings.output}: {len(arrivals.profile):,} steps of {arrivals.step_s:g} s; CV of the gaps "
        f"beside them: {arrivals.cv:.2f}"
    )
    if settings.plot_file:
        _draw(settings.plot_file, described)
    return 0


def _beside(trace: Trace, path: Path, workload: Workload) -> list[Described]:
    """The trace, and as long a one drawn from its workload."""
    of_trace = _described(trace, path)
    start_s = next(iter(trace)).arrival_s
    drawn = workload.trace(0, duration_s=of_trace[0].span_s, name="drawn from the fit")
    of_drawn = describe(Trace(drawn.name, drawn.read, origin_s=trace.origin_s + start_s))
    return [of_trace, *([of_drawn] if of_drawn else [])]


def _opened(settings: TraceReading, files: Sequence[Path]) -> list[Trace]:
    """All files, their first rows checked."""
    return [
        open_trace(path, disorder_s=settings.disorder_s, drop_empty=settings.drop_empty) for path in files
    ]


def _described(trace: Trace, path: Path) -> Described:
    found = describe(trace)
    if found is None:
        raise TraceFileError(path, "has no requests")
    return found


def _write(path: Path, trace: Trace) -> int:
    print(f"wrote {write_trace(path, trace):,} requests to {path}")
    return 0


def _draw(path: Path, described: Sequence[Described]) -> None:
    from .plots import draw_traces

    with writing(path, TraceError):
        draw_traces(path, described)


def _workload(settings: TraceMakeSettings) -> Workload:
    """What the options describe, at the rate of 1 until --rate changes it."""
    profile = diurnal_profile(settings.diurnal_amplitude) if settings.diurnal_amplitude else (1.0,)
    arrivals = Arrivals(rate=1.0, cv=settings.burstiness, profile=profile, step_s=DAY_S / len(profile))
    lengths = MarginalLengths(prompt=settings.prompt_len, output=settings.output_len)
    sessions = Sessions(
        turns=settings.turns, system_prompts=settings.system_prompts, max_len=settings.max_len
    )
    needs_sessions = settings.turns > 1 or settings.system_prompts
    return Workload(
        arrivals=arrivals, lengths=lengths, sessions=sessions if needs_sessions else None
    ).at_rate(1.0)
