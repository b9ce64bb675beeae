"""The planner's errors.

PlannerError
├── ProfilingError   a profile cannot be measured or imported
└── SimulationError  a cluster cannot be simulated or planned
"""

from __future__ import annotations


class PlannerError(Exception):
    """Base of all errors of this folder."""


class ProfilingError(PlannerError):
    """A profile cannot be made."""


class SimulationError(PlannerError):
    """A simulation or a plan cannot be made."""
