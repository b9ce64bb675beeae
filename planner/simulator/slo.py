"""Service levels as people write them: ``ttft=0.5,tpot=0.05`` or ``ttft=0.5@p90,tpot=0.05@p90``."""

from __future__ import annotations

from dataclasses import dataclass

from ...transport.latency_bounds import attainment, notation, parse_bounds
from ..errors import SimulationError
from .tallies import Slo

NOTATION = notation("ttft", "tpot", "e2e")


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """``bounds``: seconds a request may take. ``attainment``: which share of all requests must be within
    *all* of them at once (as DistServe defines goodput); of several percents, the largest. ``share_given``:
    whether the user has given one."""

    bounds: Slo
    attainment: float = 0.9
    share_given: bool = False


def parse_slo(text: str) -> ServiceLevel:
    """Raises SimulationError."""
    try:
        bounds = parse_bounds(text)
    except ValueError as error:
        raise SimulationError(f"--slo: {error}") from None
    ttft, tpot, e2e = (bounds[name].seconds if name in bounds else None for name in ("ttft", "tpot", "e2e"))
    return ServiceLevel(Slo(ttft, tpot, e2e), attainment(bounds), "@p" in text)
