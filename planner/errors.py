"""The planner's errors.

    PlannerError
    ├── TraceError       a trace cannot be read: names the file, the line and the field
    ├── WorkloadError    a workload's description cannot be used
    ├── ProfilingError   a profile cannot be measured or imported
    └── SimulationError  a cluster cannot be simulated or planned

Each message states what was wrong, what is allowed and what to do.
"""

from __future__ import annotations

from pathlib import Path


class PlannerError(Exception):
    """Base of all errors of this folder."""


class TraceError(PlannerError):
    """A trace cannot be read or written. ``line`` counts from 1; ``field`` is the column or key at fault, if
    any."""

    def __init__(
        self, path: Path, message: str, *, line: int | None = None, field: str | None = None
    ) -> None:
        place = [f"{path}", *([f"line {line}"] if line else []), *([field] if field else [])]
        super().__init__(f"{', '.join(place)}: {message}")
        self.path, self.line, self.field = path, line, field


class WorkloadError(PlannerError):
    """A workload cannot be used."""


class ProfilingError(PlannerError):
    """A profile cannot be made."""


class SimulationError(PlannerError):
    """A simulation or a plan cannot be made."""
