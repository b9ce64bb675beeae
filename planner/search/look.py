"""What one simulation of a candidate came to."""

from __future__ import annotations

from dataclasses import dataclass

from ..simulator.report import outside, pools
from ..simulator.simulation import Simulation
from ..simulator.tallies import Tallies


@dataclass(frozen=True, slots=True)
class Look:
    """Simulated to the end. ``busy``: by pool's role; ``extrapolated``: shares of the steps that no
    measurement covers."""

    rate: float
    tallies: Tallies
    busy: dict[str, float]
    extrapolated: dict[str, float]

    @classmethod
    def at(cls, rate: float, simulation: Simulation) -> Look:
        return cls(
            rate,
            simulation.tallies,
            {row["role"]: row["busy"] for row in pools(simulation)},
            outside(simulation),
        )
