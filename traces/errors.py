"""The errors of traces and workloads.

TraceError
├── TraceFileError   a trace cannot be read or written: names the file, the line and the field
└── WorkloadError    a workload's description cannot be used
"""

from __future__ import annotations

from pathlib import Path


class TraceError(Exception):
    """Base of all errors of this folder."""


class TraceFileError(TraceError):
    """A trace cannot be read or written. ``line`` counts from 1; ``field`` is the column or key at fault, if
    any."""

    def __init__(
        self, path: Path, message: str, *, line: int | None = None, field: str | None = None
    ) -> None:
        place = [f"{path}", *([f"line {line}"] if line else []), *([field] if field else [])]
        super().__init__(f"{', '.join(place)}: {message}")
        self.path, self.line, self.field = path, line, field


class WorkloadError(TraceError):
    """A workload cannot be used."""
