"""Service levels as people write them: ``ttft=0.5,tpot=0.05`` or ``ttft=0.5@p90,tpot=0.05@p90``."""

from __future__ import annotations

from dataclasses import dataclass

from .errors import SimulationError
from .simulator.tallies import Slo

NAMES = ("ttft", "tpot", "e2e")
NOTATION = r"^$|^(ttft|tpot|e2e)=\d*\.?\d+(@p\d+(\.\d+)?)?(,(ttft|tpot|e2e)=\d*\.?\d+(@p\d+(\.\d+)?)?)*$"


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """``bounds``: seconds a request may take. ``attainment``: which share of all requests must be within *all* of them at once (as
    DistServe defines goodput). Several percents are taken by their largest. ``says_share``: it was said, and not taken for granted."""

    bounds: Slo
    attainment: float = 0.9
    says_share: bool = False


def parse_slo(text: str) -> ServiceLevel:
    """Raises SimulationError."""
    seconds: dict[str, float] = {}
    percents = []
    for part in text.split(",") if text else []:
        name, _, value = part.partition("=")
        bound, _, percent = value.partition("@p")
        if name in seconds:
            raise SimulationError(f"--slo names {name} twice")
        seconds[name] = float(bound)
        percents.append(float(percent or 90))
    if any(not 0 < percent < 100 for percent in percents):
        raise SimulationError("--slo: a percentile lies between p0 and p100, as in ttft=0.5@p90")
    bounds = Slo(seconds.get("ttft"), seconds.get("tpot"), seconds.get("e2e"))
    return ServiceLevel(bounds, max(percents, default=90.0) / 100, "@p" in text)
