"""A simulation under the pool controller: what it decided and why, and what that brought."""

from __future__ import annotations

from typing import Any

from ...coordinator.lifecycle.snapshot import Snapshot
from ...engine.latency_profile import Profile
from ...steering.fleet import Decision
from ...steering.options import SteeringOptions
from ...steering.steering import Steering
from ..errors import SimulationError
from .cluster import Cluster
from .simulation import Simulation
from .slo import ServiceLevel

MOST_SHOWN = 20
"""Changes of ratio that are printed; the JSON file has all."""


class RecordedSteering(Steering):
    """Keeps all that it has ever decided."""

    def __init__(self, options: SteeringOptions, profile: Profile) -> None:
        super().__init__(options, profile)
        self.decided: list[Decision] = []

    def look(self, snapshot: Snapshot, now: float) -> list[Decision]:
        found = super().look(snapshot, now)
        self.decided += found
        return found


def steering_of(cluster: Cluster, level: ServiceLevel, believed: Profile | None) -> RecordedSteering:
    """The controller as ``--steer act`` has it. ``believed``: by which it predicts; None: the first flexible
    pool's. Raises SimulationError."""
    bounds = level.bounds
    if bounds.ttft_s is None or bounds.tpot_s is None:
        raise SimulationError(
            "--steer needs to know what is good enough: give --slo with both, such as ttft=2,tpot=0.05@p90"
        )
    flexible = [pool for pool in cluster.pools if pool.flexible or pool.borrow]
    if not flexible:
        raise SimulationError(
            "--steer has nobody to steer: write `flexible: true` to the pools whose workers can "
            "change their roles"
        )
    options = SteeringOptions(bounds.ttft_s, bounds.tpot_s, level.attainment, "act")
    return RecordedSteering(options, believed or flexible[0].profile)


def steering_summary(
    steered: Simulation, steering: RecordedSteering, left_alone: Simulation
) -> dict[str, Any]:
    """JSON-ready. ``left_alone``: the same cluster, trace and seed, whose workers stayed in their roles."""
    return {
        "decisions": [
            {
                "at_s": d.at - steered.began_at,
                "kind": d.kind,
                "worker": d.worker,
                "role": d.role,
                "reason": d.reason,
            }
            for d in steering.decided
        ],
        "flips": int(steered.coordinator.core.counters()["flips"]),
        "state": steering.controller.state,
        "left_alone": {
            "attainment": left_alone.tallies.attainment,
            "goodput_per_s": left_alone.goodput_per_s,
        },
    }


def steering_words(steered: Simulation, steering: RecordedSteering, left_alone: Simulation) -> list[str]:
    """Each change of the ratio with its reason, then what they brought."""
    changes: dict[tuple[float, str], list[Decision]] = {}
    for decision in steering.decided:
        changes.setdefault((decision.at, decision.reason), []).append(decision)
    lines = [
        f"{at - steered.began_at:.0f} s: {_who(found)}: {reason}"
        for (at, reason), found in list(changes.items())[:MOST_SHOWN]
    ]
    if len(changes) > MOST_SHOWN:
        lines.append(f"and {len(changes) - MOST_SHOWN} more times (--json-file has all)")
    if not changes:
        lines.append(f"The pool controller decided nothing; at the end: {steering.controller.state}.")
    met, unmet = steered.tallies.attainment, left_alone.tallies.attainment
    lines.append(
        f"Steered {met:.2%} of the requests were good{_rate(steered)}; with every worker in the "
        f"role that it began with {unmet:.2%}"
        f"{_rate(left_alone)}."
    )
    return lines


def _who(found: list[Decision]) -> str:
    flips = [decision for decision in found if decision.kind == "flip"]
    if not flips:
        return found[0].kind
    return f"{', '.join(decision.worker for decision in flips)} to {flips[0].role}"


def _rate(simulation: Simulation) -> str:
    goodput = simulation.goodput_per_s
    return "" if goodput is None else f" ({goodput:.2f}/s)"
