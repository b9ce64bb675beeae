"""What the simulator has found, each with as little around it as it takes. (A seed's schedule changes with the simulator: so, several.)"""

from __future__ import annotations

from simulation.campaign import simulate
from simulation.scenario import Cluster, Faults, Scenario


def test_a_failed_mover_leaves_nothing_in_quarantine() -> None:
    """A one-sided mover failed, nothing more was sent to that decode worker, and its leased blocks stayed in quarantine for ever: the
    prefill worker closed the channel on which it would have said Release."""
    worlds = [simulate(seed, Scenario(Faults(mover_error=0.05), Cluster(one_sided=1.0)), requests=8) for seed in range(40)]
    assert sum(world.counts["mover errors"] for world in worlds) >= 5
    assert not any(world.violations for world in worlds)


def test_a_lost_cache_report_is_made_good() -> None:
    """The coordinator missed a BlockEvents message, and believed ever after what that one would have changed."""
    worlds = [simulate(seed, Scenario(Faults(drop=0.05)), requests=30) for seed in range(8)]
    assert sum(world.counts["messages dropped"] for world in worlds) > 100
    assert not any(world.violations for world in worlds)
