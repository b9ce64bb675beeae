"""What the simulator has found, each as small as it can be told."""

from __future__ import annotations

import pytest
from simulation.campaign import simulate
from simulation.scenario import Cluster, Faults, Scenario


@pytest.mark.parametrize("seed", [0, 25, 31])
def test_a_failed_mover_leaves_nothing_in_quarantine(seed: int) -> None:
    """A one-sided mover failed, nothing more was sent to that decode worker, and its leased blocks stayed in quarantine for ever: the
    prefill worker closed the channel on which it would have said Release."""
    world = simulate(seed, Scenario(Faults(mover_error=0.05), Cluster(one_sided=1.0)), requests=8)
    assert world.counts["mover errors"]
    assert not world.violations


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_lost_cache_report_is_made_good(seed: int) -> None:
    """The coordinator missed a BlockEvents message, and believed ever after what that one would have changed."""
    world = simulate(seed, Scenario(Faults(drop=0.05)), requests=40)
    assert world.counts["messages dropped"]
    assert not world.violations
