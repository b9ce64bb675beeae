"""The pool controller on the simulated cluster: the short form of ``python -m
splitserve.bench.studies.steer``."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from splitserve.bench.studies import steer
from splitserve.bench.studies.steer import OPTIONS, SLO, run
from splitserve.bench.studies.steer_verdict import missed_in_simulation, missed_live, num_undone
from splitserve.bench.studies.steer_workload import CHAT, CODE, Phase, load, worker
from splitserve.engine.latency_profile import Profile
from splitserve.planner.errors import SimulationError
from splitserve.planner.settings import SimulateSettings
from splitserve.planner.simulate_command import simulate
from splitserve.planner.simulator.cluster import Cluster, Pool, PoolRole
from splitserve.planner.simulator.simulation import Simulation
from splitserve.steering.fleet import Decision
from splitserve.steering.steering import Steering
from splitserve.traces.own_format import write_trace
from splitserve.transport.messages.messages import Role

PHASE_S, NUM_WORKERS = 45.0, 4
BUSY = [
    replace(CODE, rate=1.0),
    replace(CHAT, rate=1.15, output=450),
]  # no single ratio serves both, be they ever so short


def test_it_beats_every_static_ratio_where_the_load_shifts() -> None:
    static = [run(BUSY, PHASE_S, prefill, 1, NUM_WORKERS) for prefill in (1, 2, 3)]
    steered = run(BUSY, PHASE_S, 3, 1, NUM_WORKERS, steered=True)
    assert steered.good[1] > 0.93 * max(outcome.good[1] for outcome in static)
    assert len({decision.at for decision in steered.flips}) <= 2
    assert sum(steered.total) == sum(static[0].total), "no request was lost"
    assert steered.num_good > 1.3 * max(outcome.num_good for outcome in static)


def test_code_that_comes_while_conversations_still_run_is_seen_as_code() -> None:
    """Nothing of it has ended: what is known of its answers is that code had short ones before, or that the
    first ones are."""
    there_and_back = run([CODE, CHAT, CODE], PHASE_S, 3, 1, NUM_WORKERS, steered=True)
    assert there_and_back.num_good > 0.88 * sum(there_and_back.total)
    for_the_first_time = run([CHAT, CODE], PHASE_S, 2, 1, NUM_WORKERS, steered=True)
    assert for_the_first_time.num_good > 0.9 * sum(for_the_first_time.total)


def test_a_profile_that_is_three_times_wrong_does_no_lasting_harm() -> None:
    misled = run([CHAT], PHASE_S, 2, 1, NUM_WORKERS, steered=True, believed=worker("wrong", 3.0))
    assert misled.num_good > 0.9 * sum(misled.total)
    assert len({decision.at for decision in misled.flips}) <= 3


def test_workers_of_unequal_speed_are_steered_by_what_each_can_do() -> None:
    """Two slow ones cannot compute these prompts, which two of the model's speed could. That is measured."""
    alone, _ = good_of_slow_prefill(steered=False)
    steered, flips = good_of_slow_prefill(steered=True)
    assert alone < 0.1
    assert steered > 0.55, "it begins with a queue"
    assert [d.role for d in flips] == ["prefill"]


def good_of_slow_prefill(steered: bool) -> tuple[float, list[Decision]]:
    """Two prefill workers take three times as long as the two decode workers would."""
    kinds: list[tuple[PoolRole, Profile]] = [("prefill", worker("slow", 3.0)), ("decode", worker())]
    pools = [
        Pool(role=role, count=2, profile=profile, flexible=True, max_batch_tokens=2048, max_num_seqs=128)
        for role, profile in kinds
    ]
    steering, good = Steering(OPTIONS, worker()) if steered else None, list[bool]()
    cluster = Cluster(pools=tuple(pools), max_queue=1 << 30)
    simulation = Simulation(
        cluster, 1, SLO, lambda record: good.append(SLO.met_by(record)), steering=steering
    )
    simulation.run(load([replace(CODE, rate=0.45)], 90.0, 1, NUM_WORKERS))
    return sum(good) / len(good), [] if steering is None else list(steering.controller.decisions)


@pytest.mark.parametrize(("phase", "prefill", "good"), [(CODE, 1, 0.45), (CHAT, 3, 0.9)])
def test_rules_without_a_profile_mend_a_wrong_ratio_and_rest(phase: Phase, prefill: int, good: float) -> None:
    alone = run([phase], 90.0, prefill, 1, NUM_WORKERS)  # for longer it only falls
    ruled = run([phase], 200.0, prefill, 1, NUM_WORKERS, steered=True, by_rules=True)
    assert alone.num_good < 0.25 * sum(alone.total)
    assert ruled.num_good > good * sum(ruled.total)
    assert len(ruled.flips) == 2


REACHED = {
    "of_oracle": 0.95,
    "over_best_static": 1.4,
    "undone_under_constant_load": {"code-like": 0, "conversation-like": 0},
}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({}, []),
        ({"of_oracle": 0.929}, ["0.929 of the oracle's goodput, below 0.93"]),
        ({"over_best_static": 1.0}, ["1.000 times the goodput of the best single ratio, not above it"]),
        (
            {"undone_under_constant_load": {"code-like": 2}},
            ["oscillation: 2 changes undid the one before, under a constant code-like load"],
        ),
    ],
)
def test_a_missed_goal_is_said(more: dict[str, object], message: list[str]) -> None:
    assert missed_in_simulation({**REACHED, **more}) == message


@pytest.mark.parametrize(
    ("lost", "recovery_s", "message"),
    [
        (0, 29.0, []),
        (1, 0.0, ["1 of 10 streams were lost"]),
        (0, None, ["the objectives had not recovered from the shift when the load ended"]),
        (0, 31.0, ["the objectives had recovered 31 s after the shift, later than 30 s"]),
    ],
)
def test_a_missed_goal_of_the_live_run_is_said(
    lost: int, recovery_s: float | None, message: list[str]
) -> None:
    assert missed_live({"num_streams": 10, "num_lost": lost, "recovery_s": recovery_s}) == message


def test_changes_that_undo_the_one_before_are_counted_whatever_number_of_flips_they_have() -> None:
    def flips(*roles: Role) -> list[Decision]:
        return [
            Decision(float(at), "flip", worker, role, "")
            for at, role in enumerate(roles)
            for worker in ("a", "b")
        ]

    assert num_undone(flips("prefill", "prefill")) == 0
    assert num_undone(flips("prefill", "decode", "decode", "prefill")) == 2


def test_the_command_ends_with_1_where_a_seed_misses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def study(num_phases: int, phase_s: float, seed: int, *_: object) -> dict[str, object]:
        return {**REACHED, "seed": seed, "of_oracle": 0.95 if seed < 3 else 0.5}

    monkeypatch.setattr(steer, "study", study)
    record = tmp_path / "steer.json"
    for seeds, status in (("1 2", 0), ("1 2 3", 1)):
        monkeypatch.setattr("sys.argv", ["steer", "--seeds", *seeds.split(), "--json", str(record)])
        assert steer.main() == status
    written = json.loads(record.read_text())
    assert [found["seed"] for found in written["studies"]] == [1, 2, 3]
    assert written["missed"] == ["seed 3: 0.500 of the oracle's goodput, below 0.93"]


def test_the_command_tells_what_was_changed_on_a_trace_of_ones_own_and_what_that_brought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    worker().write(tmp_path / "p.json")
    write_trace(tmp_path / "t.jsonl", load([CODE], 40.0, 1, NUM_WORKERS))
    pools = [
        {"role": role, "count": count, "profile": "p.json", "max_batch_tokens": 2048, "flexible": True}
        for role, count in (("prefill", 2), ("decode", 4))
    ]
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"pools": pools}))
    usual: dict[str, Any] = {
        "trace": tmp_path / "t.jsonl",
        "cluster": tmp_path / "c.yaml",
        "json_file": tmp_path / "j.json",
    }
    assert simulate(SimulateSettings(**usual, slo="ttft=1.5,tpot=0.15", steer=True)) == 0
    text = " ".join(capsys.readouterr().out.split())
    message = json.loads((tmp_path / "j.json").read_text())["steering"]
    assert message["flips"] == len([d for d in message["decisions"] if d["kind"] == "flip"]) >= 1
    assert {d["role"] for d in message["decisions"]} == {"prefill"}
    assert message["decisions"][0]["worker"].startswith("decode-1-")
    assert message["decisions"][0]["reason"] in text
    assert "with every worker in the role that it began with" in text
    alone = message["left_alone"]["attainment"]
    assert json.loads((tmp_path / "j.json").read_text())["attainment"] > alone
    assert simulate(SimulateSettings(**usual)) == 0
    assert "`flexible: true` changes nothing without --steer" in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "j.json").read_text()).get("steering") is None


def test_steering_in_the_simulator_needs_objectives_and_somebody_to_steer(tmp_path: Path) -> None:
    worker().write(tmp_path / "p.json")
    write_trace(tmp_path / "t.jsonl", load([CODE], 5.0, 1, NUM_WORKERS))
    usual: dict[str, Any] = {"trace": tmp_path / "t.jsonl", "profile": tmp_path / "p.json", "steer": True}
    with pytest.raises(SimulationError, match="give --slo with both"):
        simulate(SimulateSettings(**usual, prefill=1, decode=1, slo="ttft=4"))
    with pytest.raises(SimulationError, match="nobody to steer"):
        simulate(SimulateSettings(**usual, colocated=2, slo="ttft=4,tpot=0.15"))
    with pytest.raises(ValidationError, match="--steer-profile is for --steer"):
        SimulateSettings(**{**usual, "steer": False}, steer_profile=tmp_path / "p.json")
