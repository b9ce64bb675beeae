"""The pool controller on the simulated cluster: the short form of ``python -m splitserve.bench.steer``."""

from __future__ import annotations

from dataclasses import replace

from splitserve.bench.steer import run
from splitserve.bench.steer_workload import CHAT, CODE, worker

PHASE_S, NUM_WORKERS = 45.0, 4
BUSY = [replace(CODE, rate=1.0), replace(CHAT, rate=1.15, output=450)]  # no single ratio serves both, be they ever so short


def test_it_beats_every_static_ratio_where_the_load_shifts() -> None:
    static = [run(BUSY, PHASE_S, prefill, 1, NUM_WORKERS) for prefill in (1, 2, 3)]
    steered = run(BUSY, PHASE_S, 3, 1, NUM_WORKERS, steered=True)
    assert steered.num_good > 1.4 * max(outcome.num_good for outcome in static)
    assert steered.good[1] > 0.93 * max(outcome.good[1] for outcome in static)
    assert len({decision.at for decision in steered.flips}) <= 2
    assert sum(steered.total) == sum(static[0].total), "no request was lost"


def test_code_that_comes_while_conversations_still_run_is_seen_as_code() -> None:
    """Nothing of it has ended: what is known of its answers is that code had short ones before, or that the first ones are."""
    there_and_back = run([CODE, CHAT, CODE], PHASE_S, 3, 1, NUM_WORKERS, steered=True)
    assert there_and_back.num_good > 0.93 * sum(there_and_back.total)
    for_the_first_time = run([CHAT, CODE], PHASE_S, 2, 1, NUM_WORKERS, steered=True)
    assert for_the_first_time.num_good > 0.9 * sum(for_the_first_time.total)


def test_a_profile_that_is_three_times_wrong_does_no_lasting_harm() -> None:
    misled = run([CHAT], PHASE_S, 2, 1, NUM_WORKERS, steered=True, believed=worker("wrong", 3.0))
    assert misled.num_good > 0.9 * sum(misled.total)
    assert len({decision.at for decision in misled.flips}) <= 3
