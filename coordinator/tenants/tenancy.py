"""Everything about tenants that the HTTP side asks, in one place; by default there are none."""

from __future__ import annotations

from dataclasses import dataclass, field

from .directory import Directory, Everyone
from .limiter import Limiter, NoLimits
from .meter import Meter


@dataclass(frozen=True, slots=True)
class Tenancy:
    """Whose a request is, what it may use, and what it has used."""

    directory: Directory = field(default_factory=Everyone)
    limiter: Limiter = field(default_factory=NoLimits)
    meter: Meter | None = None
