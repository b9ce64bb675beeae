"""Roles change at random, and machines die at random, under load: every request still ends whole, and every
block comes back."""

from __future__ import annotations

import random

import pytest
from planner.test_simulator import assert_no_block_is_lost

from splitserve.coordinator.lifecycle.snapshot import Snapshot
from splitserve.engine.latency_profile import HandoffModel, Memory, Piece, Profile, StepModel
from splitserve.planner.simulator.cluster import Cluster, Pool, PoolRole
from splitserve.planner.simulator.records import RequestRecord
from splitserve.planner.simulator.simulation import Simulation
from splitserve.steering.fleet import Decision
from splitserve.steering.options import SteeringOptions
from splitserve.steering.steering import Steering, fleet_of
from splitserve.traces.request import Trace, TraceRequest
from splitserve.transport.messages.messages import Role

WORKER = Profile(
    name="small",
    memory=Memory(block_size=16, num_blocks=96, block_bytes=1 << 14, num_layers=4, max_model_len=1024),
    prefill=StepModel(pieces=(Piece(curve=((0, 0.02), (1000, 0.2))),)),
    decode=StepModel(pieces=(Piece(curve=((0, 0.02), (100, 0.04))),)),
    handoff=HandoffModel(put_s=1e-3, bytes_per_s=1e8, message_s=5e-4),
    start_s=0.3,
    flip_s=0.05,
)
LINGER_S = 1.0
"""Seconds for which a role with nothing left answers its peers: see ``worker/roles.py``."""
OTHER: dict[Role, Role] = {"prefill": "decode", "decode": "prefill"}


class AtRandom(Steering):
    """Has some worker change its role twice a second, and does not wait for what is under way."""

    def __init__(self, seed: int) -> None:
        super().__init__(SteeringOptions(1.0, 0.1, mode="act", every_s=0.5), None)
        self._draw = random.Random(seed)

    def look(self, snapshot: Snapshot, now: float) -> list[Decision]:
        able = [(name, role) for role, names in fleet_of(snapshot).flexible.items() for name in names]
        if not able:
            return []
        name, role = self._draw.choice(able)
        return [Decision(now, "flip", name, OTHER[role], "at random")]


def run(seed: int, mean_seconds_between_failures: float | None) -> tuple[Simulation, list[RequestRecord]]:
    draw, records = random.Random(seed), list[RequestRecord]()
    requests = [TraceRequest(0.05 * i, draw.randrange(8, 400), draw.randrange(2, 120)) for i in range(200)]
    begins: tuple[PoolRole, ...] = ("prefill", "decode")
    cluster = Cluster(
        pools=tuple(Pool(role=role, count=2, profile=WORKER, flexible=True) for role in begins),
        mean_seconds_between_failures=mean_seconds_between_failures,
    )
    simulation = Simulation(cluster, seed, on_record=records.append, steering=AtRandom(seed))
    simulation.run(Trace("test", lambda: iter(requests), None))
    return simulation, records


@pytest.mark.parametrize("mean_seconds_between_failures", [None, 15.0])
@pytest.mark.parametrize("seed", range(2))
def test_every_request_ends_whole_and_every_block_comes_back(
    seed: int, mean_seconds_between_failures: float | None
) -> None:
    simulation, records = run(seed, mean_seconds_between_failures)
    assert [r for r in records if r.outcome != "finished" or r.num_received != r.num_asked_tokens] == []
    assert len(records) == 200
    assert simulation.coordinator.core.counters()["flips"] > 10
    assert bool(simulation.num_killed) == (mean_seconds_between_failures is not None)
    assert_no_block_is_lost(simulation)


class OneFlip(Steering):
    """Has one decode worker change its role, and sees when the coordinator knows of it in the new one."""

    def __init__(self, at_s: float) -> None:
        super().__init__(SteeringOptions(1.0, 0.1, mode="act", every_s=0.01), None)
        self._at_s, self.seen_s = at_s, 0.0
        self._ordered = False

    def look(self, snapshot: Snapshot, now: float) -> list[Decision]:
        if fleet_of(snapshot).prefill == 3 and not self.seen_s:
            self.seen_s = now - self._at_s
        if now < self._at_s or self._ordered:
            return []
        self._ordered = True
        return [Decision(now, "flip", fleet_of(snapshot).flexible["decode"][0], "prefill", "once")]


@pytest.mark.parametrize("flip_s", [None, 0.8])
def test_a_change_of_role_takes_as_long_as_the_profile_says(flip_s: float | None) -> None:
    worker = WORKER.model_copy(update={"flip_s": flip_s})
    begins: tuple[PoolRole, ...] = ("prefill", "decode")
    steering = OneFlip(3.0)
    simulation = Simulation(
        Cluster(pools=tuple(Pool(role=role, count=2, profile=worker, flexible=True) for role in begins)),
        1,
        steering=steering,
    )
    requests = [TraceRequest(0.1 * i, 50, 20) for i in range(60)]
    simulation.run(Trace("test", lambda: iter(requests), None))
    assert steering.seen_s == pytest.approx(flip_s or 0.0, abs=0.03)
    (flip,) = simulation.coordinator.core.flips.latest
    assert flip.began_s == pytest.approx(flip_s or 0.0, abs=0.01)
    assert flip.began_s is not None
    assert flip.worked_s is not None
    assert flip.ended_s is not None
    assert flip.began_s < flip.worked_s < flip.ended_s, "for a while the process is of both roles"
    assert LINGER_S < flip.ended_s - flip.began_s < LINGER_S + 1.0


@pytest.mark.parametrize("num_mixed", [0, 2])
def test_the_pool_controller_flips_nobody_beside_mixed_workers(num_mixed: int) -> None:
    """Long prompts come, which two workers of four cannot compute: without mixed workers one more takes that
    role."""
    requests = [TraceRequest(0.1 * i, 600, 3) for i in range(250)]
    others: tuple[PoolRole, ...] = ("prefill", "decode")
    pools = [
        Pool(role=role, count=count, profile=WORKER, flexible=True)
        for role, count in zip(others, (1, 3 - num_mixed), strict=True)
    ]
    if num_mixed:
        pools.append(Pool(role="colocated", count=num_mixed, profile=WORKER))
    steering = Steering(SteeringOptions(0.5, 0.1, mode="act"), WORKER)
    records = list[RequestRecord]()
    simulation = Simulation(Cluster(pools=tuple(pools)), 1, on_record=records.append, steering=steering)
    simulation.run(Trace("test", lambda: iter(requests), None))
    decisions = steering.controller.decisions
    assert {d.kind for d in decisions} == {"hold" if num_mixed else "flip"}
    assert bool(simulation.coordinator.core.counters()["flips"]) == (num_mixed == 0)
    assert [r for r in records if not r.finished] == []
    if num_mixed:
        assert [d.reason[:31] for d in decisions] == ["2 of 4 workers are mixed, and w"]
