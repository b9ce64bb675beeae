"""Whatever the adversary does: every request ends once, no token is lost, doubled or wrong, no block leaks, no ended lease is written."""

from __future__ import annotations

import os

import pytest
from simulation.world import Faults, World

NONE = Faults()
NETWORK = Faults(drop=0.01, double=0.02, late=0.02, cancel=0.1)
PROCESSES = Faults(kill_every=3.0, freeze_every=4.0, freeze_in_put=0.003, cancel=0.1)
CORRUPTION = Faults(corrupt=0.02, late=0.01)
EVERYTHING = Faults(
    drop=0.005,
    double=0.01,
    late=0.01,
    corrupt=0.01,
    freeze_in_put=0.002,
    kill_every=5.0,
    freeze_every=6.0,
    coordinator_restart_every=25.0,
    cancel=0.1,
)
ALL = {"none": NONE, "network": NETWORK, "processes": PROCESSES, "corruption": CORRUPTION, "everything": EVERYTHING}
SEEDS = int(os.environ.get("SPLITSERVE_SIMULATION_SEEDS", "4"))
REQUESTS = 150


def simulate(seed: int, faults: Faults, requests: int = REQUESTS, **sizes: int) -> World:
    """Requests arrive over some twenty seconds among faults; then the faults stop, and everything must come to rest."""
    world = World(seed, faults, **sizes)
    world.run(1.5)
    for number in range(requests):
        world.run(world.now + world.random.expovariate(requests / 20))
        world.submit(number)
    world.run(world.now + 10)
    world.calm = True
    world.run(world.now + 300, stop=lambda: not world.pending())
    world.run(world.now + 15)
    world.check_end()
    return world


@pytest.mark.parametrize("faults", ALL.values(), ids=ALL)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost(seed: int, faults: Faults) -> None:
    world = simulate(seed, faults)
    assert not world.violations, f"seed {seed}: {world.violations[:5]}; {dict(world.counts)}"


@pytest.mark.parametrize("seed", range(SEEDS))
def test_too_little_memory_preempts_and_finishes(seed: int) -> None:
    world = simulate(seed, NONE, requests=80, prefill_blocks=40, decode_blocks=27)
    assert not world.violations, f"seed {seed}: {world.violations[:5]}; {dict(world.counts)}"


def test_a_seed_replays() -> None:
    first, second = (simulate(99, EVERYTHING, requests=40) for _ in range(2))
    assert first.counts == second.counts
    assert {k: c.tokens for k, c in first.clients.items()} == {k: c.tokens for k, c in second.clients.items()}
