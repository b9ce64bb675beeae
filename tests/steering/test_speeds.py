"""Speeds of workers, from their reports."""

from __future__ import annotations

import pytest

from splitserve.bench.studies.steer_workload import worker as profile
from splitserve.coordinator.lifecycle.snapshot import WorkerState
from splitserve.steering.capacity import Capacity
from splitserve.steering.fleet import Fleet
from splitserve.steering.load_watch import LoadPicture
from splitserve.steering.options import SteeringOptions
from splitserve.steering.speeds import Speed, Speeds
from splitserve.transport.messages.messages import Load, Role

OPTIONS = SteeringOptions(4.0, 0.15)
PICTURE = LoadPicture(100, 5.0, new_tokens=1000.0, pairs=5e5, output_tokens=100.0, context=1050.0)
CAPACITY = Capacity(profile(), OPTIONS, 2048, 128)


def state(process: str, role: Role, steps: int = 0, num_running: int = 0, **counters: float) -> WorkerState:
    name = f"{process}:{role}"
    load = Load(
        worker_id=name, incarnation=1, blocks_free=0, blocks_cached=0, blocks_used=0, blocks_leased=0,
        num_running=num_running, num_waiting=0, num_waiting_tokens=0, steps=steps, busy=True, accepting=True,
        counters=counters,
    )  # fmt: skip
    return WorkerState(name, process, role, False, True, False, 0, 2048, 128, 2000, load)


def prompts(process: str, tokens: float, seconds: float) -> WorkerState:
    return state(process, "prefill", full_step_tokens=tokens, full_step_seconds=seconds)


def measured(speed: float, role: Role, seconds: int = 120) -> Speed:
    """Return the speed of a worker that computes all the time."""
    speeds, found = Speeds(OPTIONS, profile()), {}
    token_s, step_s = CAPACITY.prompt_s(PICTURE) / 1000, CAPACITY.step_s(32, PICTURE)
    for now in range(seconds):
        if role == "prefill":
            worker = prompts("a", now * speed / token_s, float(now))
        else:
            worker = state("a", "decode", round(now * speed / step_s), 32)
        found = speeds.look([worker], PICTURE, float(now))
    return found["a"]


def test_a_worker_is_as_fast_as_its_steps_are_and_in_the_other_role_too_as_far_as_is_known() -> None:
    for speed in (0.33, 1.0, 2.0):
        prefill, decode = measured(speed, "prefill"), measured(speed, "decode")
        assert (prefill.prefill, decode.decode) == (pytest.approx(speed, 0.1), pytest.approx(speed, 0.1))
        assert (prefill.decode, decode.prefill) == (pytest.approx(speed, 0.15), pytest.approx(speed, 0.15))
    assert measured(0.33, "decode", 2).decode > 0.6, "it takes more than a second"


def test_what_says_nothing_of_its_speed_changes_none() -> None:
    speeds = Speeds(OPTIONS, profile())
    idle = [state("idle", "decode", 7), prompts("new", 0.0, 0.0)]
    for now in range(60):
        found = speeds.look(idle, PICTURE, float(now))
    assert found == {"idle": pytest.approx(Speed()), "new": pytest.approx(Speed())}
    restarted = speeds.look([state("idle", "decode", 0, 5), prompts("new", -100.0, -5.0)], PICTURE, 60.0)
    assert restarted == {"idle": pytest.approx(Speed()), "new": pytest.approx(Speed())}
    assert not speeds.look([], PICTURE, 61.0), "and those that left are forgotten"
    assert not Speeds(OPTIONS, None).look(idle, PICTURE, 0.0), "without a profile there is nothing to compare"


def test_a_ratio_is_worth_what_its_workers_are_once_those_that_suit_best_have_changed() -> None:
    fast, slow = Speed(), Speed(0.25, 1.0)
    fleet = Fleet(2, 2, {}, speeds={"prefill": [slow, slow], "decode": [fast, fast]})
    assert fleet.size == (0.5, 2.0)
    assert fleet.sizes() == {1: (0.25, 3.0), 2: (0.5, 2.0), 3: (1.5, 1.0)}
    assert Fleet(1, 2, {}).sizes() == {1: (1.0, 2.0), 2: (2.0, 1.0)}
    assert slow.suits_prefill < Speed(0.95, 1.0).suits_prefill == fast.suits_prefill == 0
