"""What steering must reach, and whether it did: for ``bench.steer`` and ``bench.steer_live``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from ...steering.fleet import Decision

OF_ORACLE = 0.93
RECOVERY_S = 30.0


def missed_in_simulation(found: Mapping[str, Any]) -> list[str]:
    """Goals that a study of ``bench.steer`` has missed, a sentence each."""
    missed = []
    if found["of_oracle"] < OF_ORACLE:
        missed.append(f"{found['of_oracle']:.3f} of the oracle's goodput, below {OF_ORACLE}")
    if found["over_best_static"] <= 1:
        missed.append(
            f"{found['over_best_static']:.3f} times the goodput of the best single ratio, not above it"
        )
    for phase, count in found["undone_under_constant_load"].items():
        if count:
            missed.append(f"oscillation: {count} changes undid the one before, under a constant {phase} load")
    return missed


def missed_live(found: Mapping[str, Any]) -> list[str]:
    """Goals that a run of ``bench.steer_live`` has missed, a sentence each."""
    missed = [f"{found['num_lost']} of {found['num_streams']} streams were lost"] if found["num_lost"] else []
    if found["recovery_s"] is None:
        missed.append("the objectives had not recovered from the shift when the load ended")
    elif found["recovery_s"] > RECOVERY_S:
        missed.append(
            f"the objectives had recovered {found['recovery_s']:g} s after the shift, later than "
            f"{RECOVERY_S:g} s"
        )
    return missed


def num_undone(flips: Sequence[Decision]) -> int:
    """Changes of roles that go the other way than the change before. Flips of one time are one change."""
    roles = [role for _, role in dict.fromkeys((flip.at, flip.role) for flip in flips)]
    return sum(one != next_one for one, next_one in pairwise(roles))
