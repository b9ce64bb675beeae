"""The share in use of a role's workers, and which of them may leave."""

from __future__ import annotations

import pytest
from support.lifecycle_bench import Bench

from splitserve.coordinator.lifecycle.snapshot import snapshot_of
from splitserve.steering.pool_use import PoolUse
from splitserve.steering.steering import fleet_of


def test_use_is_the_mean_over_the_workers_and_over_the_last_seconds() -> None:
    bench, use = Bench(), PoolUse(3.0)
    bench.hello("d2", "decode")
    assert use.look(snapshot_of(bench.core).workers, 0.0) == {"prefill": 0.0, "decode": 0.0}, (
        "nothing was reported yet"
    )
    bench.load("p", [], busy=True)
    bench.load("d", [], num_running=1, blocks_used=40)  # of 4 rows and 50 blocks
    bench.load("d2", [], num_running=2, blocks_used=5)
    assert use.look(snapshot_of(bench.core).workers, 1.0) == {
        "prefill": 0.5,
        "decode": pytest.approx((0.8 + 0.5) / 2 / 2),
    }
    use.look(snapshot_of(bench.core).workers, 2.0)
    assert use.look(snapshot_of(bench.core).workers, 3.0) == {
        "prefill": 1.0,
        "decode": pytest.approx(0.65),
    }, "the first look is forgotten"


def test_of_those_with_least_to_do_the_first_goes_that_is_not_kept() -> None:
    bench = Bench()
    for name in ("p2", "scaled-1"):
        bench.hello(name, "prefill")
    bench.hello("w1:decode", "decode", process="w1")
    assert fleet_of(snapshot_of(bench.core)).spare == {"prefill": ["p", "p2"], "decode": ["d"]}
    assert fleet_of(snapshot_of(bench.core), ("p", "p?", "d")).spare == {
        "prefill": ["scaled-1"],
        "decode": ["w1:decode"],
    }
    assert fleet_of(snapshot_of(bench.core), ("p*", "d", "w1")).spare == {"prefill": ["scaled-1"]}
