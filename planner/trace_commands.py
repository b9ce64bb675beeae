"""``splitserve trace ...``: each function is one command and returns its exit status. They raise PlannerError."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson
from rich.console import Console

from .errors import TraceError
from .settings import TraceReading, TraceStatsSettings
from .trace.readers import open_trace
from .trace.request import Trace
from .trace.statistics import Shapes, TraceStatistics, describe
from .trace.tables import print_statistics


def stats(settings: TraceStatsSettings, files: Sequence[Path]) -> int:
    """``splitserve trace stats``."""
    described = [_described(trace, path) for trace, path in zip(opened(settings, files), files, strict=True)]
    print_statistics([statistics for statistics, _ in described], Console())
    if settings.json_file:
        content = orjson.dumps([statistics.as_json() for statistics, _ in described], option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS)
        _write(settings.json_file, content + b"\n")
    if settings.plot_file:
        from .trace.plots import draw_traces

        try:
            draw_traces(settings.plot_file, described)
        except OSError as error:
            raise TraceError(settings.plot_file, f"cannot be written: {error.strerror or error}") from None
    return 0


def opened(settings: TraceReading, files: Sequence[Path]) -> list[Trace]:
    """All files, their first rows checked."""
    return [open_trace(path, disorder_s=settings.disorder_s, drop_empty=settings.drop_empty) for path in files]


def _described(trace: Trace, path: Path) -> tuple[TraceStatistics, Shapes]:
    found = describe(trace)
    if found is None:
        raise TraceError(path, "has no requests")
    return found


def _write(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise TraceError(path, f"cannot be written: {error.strerror or error}") from None
