"""The pool controller on the simulated cluster: the short form of ``python -m splitserve.bench.steer``."""

from __future__ import annotations

from splitserve.bench.steer import run
from splitserve.bench.steer_workload import CHAT, CODE, worker

PHASE_S, NUM_WORKERS = 45.0, 4


def test_it_beats_every_static_ratio_where_the_load_shifts() -> None:
    static = [run([CODE, CHAT], PHASE_S, prefill, 1, NUM_WORKERS) for prefill in (1, 2, 3)]
    steered = run([CODE, CHAT], PHASE_S, 3, 1, NUM_WORKERS, steered=True)
    assert steered.num_good > 1.4 * max(outcome.num_good for outcome in static)
    assert steered.good[1] > 0.93 * max(outcome.good[1] for outcome in static)
    assert len({decision.at for decision in steered.flips}) <= 2
    assert sum(steered.total) == sum(static[0].total), "no request was lost"


def test_a_profile_that_is_three_times_wrong_does_no_lasting_harm() -> None:
    misled = run([CHAT], PHASE_S, 2, 1, NUM_WORKERS, steered=True, believed=worker("wrong", 3.0))
    assert misled.num_good > 0.9 * sum(misled.total)
    assert len({decision.at for decision in misled.flips}) <= 3
