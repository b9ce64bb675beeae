"""Planning: the search finds the same as trying everything, and explains it so that a person can act."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from planner.test_simulator import profile
from pydantic import ValidationError

from splitserve.engine.latency_profile import Piece, Power, ProfileError, Residuals
from splitserve.planner.errors import SimulationError
from splitserve.planner.plan_command import (
    pareto,
    pareto_table,
    require_reachable,
    the_goal,
    the_hardware,
    with_enough,
)
from splitserve.planner.plan_command import plan as plan_command
from splitserve.planner.search.candidates import Candidate, Hardware, Kind
from splitserve.planner.search.demand import Demand, bound, largest_batch
from splitserve.planner.search.goal import Goal, Limits, shapes
from splitserve.planner.search.goodput import Load, Question, answer, num_failed, simulate
from splitserve.planner.search.hardware_file import read_hardware
from splitserve.planner.search.looks import glance
from splitserve.planner.search.plan_json import as_json
from splitserve.planner.search.search import search
from splitserve.planner.search.stopped import Stopped
from splitserve.planner.search.words import sentences
from splitserve.planner.settings import PlanSettings
from splitserve.planner.simulator.cluster import Pool
from splitserve.planner.simulator.link import Link
from splitserve.planner.simulator.slo import ServiceLevel, Slo
from splitserve.traces.own_format import write_trace
from splitserve.traces.request import Trace, TraceRequest

HARDWARE = Hardware((Kind.of(profile()),))
LEVEL = ServiceLevel(Slo(0.4, 0.03), 0.9)


def question(prompt: int, output: int, count: int = 40) -> Question:
    requests = tuple(
        TraceRequest(0.125 * i + 0.03125 * (i % 3), prompt + i % 7, output + i % 5) for i in range(count)
    )
    return Question.of(HARDWARE, Load(requests, None), LEVEL)


def test_the_search_finds_what_trying_everything_finds() -> None:
    asked = question(400, 3, count=60)
    found = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    alike = [replace(found.best.candidate, prefill=n, decode=3 - n, colocated=0) for n in (1, 2)]
    best = max((answer(asked, candidate) for candidate in alike), key=lambda a: a.goodput)
    assert found.best.candidate.ratio == best.candidate.ratio
    assert found.best.goodput == pytest.approx(best.goodput, rel=0.06)


def test_a_neighbour_that_was_a_rival_before_is_told_with_its_own_goodput(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rival was given up as soon as it was not better."""
    monkeypatch.setattr("splitserve.planner.search.search.NEARLY", 0.0)
    asked = question(400, 3, count=24)
    (neighbour,) = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1).neighbours
    assert neighbour.candidate.ratio == "1P:2D"
    assert neighbour.goodput == pytest.approx(answer(asked, neighbour.candidate).goodput, rel=0.06)


def test_the_sketch_is_near_the_simulation() -> None:
    asked = question(400, 6, count=80)
    split, local = (
        [(Candidate(1, 1, 0, 512, 16), 9.0), (Candidate(2, 1, 0, 512, 16), 14.0)],
        (Candidate(1, 0, 2, 512, 16), 9.0),
    )
    for candidate, rate in (*split, local, (Candidate(0, 0, 2, 512, 16), 5.0)):
        seen = glance(asked, (candidate, rate))
        simulated = simulate(asked, candidate, rate, give_up=False).tallies
        latency = simulated.percentiles()
        assert seen.ttft_p90_s == pytest.approx(latency["ttft"]["p90"], rel=0.15)
        assert seen.tpot_p90_s == pytest.approx(latency["tpot"]["p90"], rel=0.15)
        assert seen.attainment == pytest.approx(simulated.attainment, abs=0.1)
    assert glance(asked, (Candidate(1, 1, 0, 512, 16), 100.0)).attainment < 0.5


def test_the_cheapest_cluster_for_a_rate_takes_each_kind_for_what_it_is_good_at() -> None:
    slow_prompts = profile(name="old")
    pieces = tuple(
        p.model_copy(update={"curve": tuple((x, 4 * y) for x, y in p.curve)})
        for p in slow_prompts.prefill.pieces
    )
    old = slow_prompts.model_copy(
        update={"prefill": slow_prompts.prefill.model_copy(update={"pieces": pieces})}
    )
    watts = Power(idle_w=50, prefill_w=300, decode_w=200)
    hardware = Hardware((Kind("new", profile(), 1, 4.0, watts), Kind("old", old, 1, 1.0, watts)))
    base = question(400, 8, count=40)
    asked = Question.of(hardware, base.load, LEVEL)
    found = search(asked, Goal("cost", Limits(6), rate=4.0, chunks=(512,)), processes=1)
    winner = found.winner
    assert winner.goodput >= 4.0
    assert simulate(asked, winner.candidate, 4.0, give_up=False).tallies.attainment >= 0.9
    others = [Candidate(1, 1, 0, 512, winner.candidate.max_num_seqs, p, d) for p in (0, 1) for d in (0, 1)]
    cheaper = [
        c
        for c in others
        if (hardware.price_per_hour(c) or 0) < (hardware.price_per_hour(winner.candidate) or 0)
    ]
    assert all(simulate(asked, c, 4.0, give_up=False).tallies.attainment < 0.9 for c in cheaper)
    assert found.energy_wh is not None
    assert found.energy_wh > 0
    for neighbour in found.neighbours:
        (line,) = (
            line for line in sentences(found) if line.startswith(f"Neighbour {neighbour.candidate.ratio}: ")
        )
        assert (
            neighbour.goodput >= 4.0
            or f"serves {neighbour.goodput:.2f} requests/s only" in line
            or "lowest rate tried" in line
        )
        assert "lowest rate tried" not in line or neighbour.goodput == 0


def test_limits_of_price_and_power_hold(tmp_path: Path) -> None:
    profile().write(tmp_path / "p.json")
    (tmp_path / "hardware.yaml").write_text(
        "- {profile: p.json, name: big, gpus_per_worker: 2, gpus: 8, price_per_hour: 10, "
        "power: {idle_w: 1, prefill_w: 100, decode_w: 50}}\n"
        "- {profile: p.json, name: capped, price_per_hour: 3, power: {idle_w: 1, prefill_w: 60, "
        "decode_w: 30}, roles: [decode]}\n"
    )
    hardware = read_hardware(tmp_path / "hardware.yaml")
    mixed = Candidate(2, 3, 0, 512, 16, 0, 1)
    assert (hardware.num_gpus(mixed), hardware.price_per_hour(mixed), hardware.watts(mixed)) == (
        7,
        29.0,
        290.0,
    )
    assert hardware.words(mixed) == "2P (big) : 3D (capped)"
    found = list(shapes(hardware, Limits(8, price_per_hour=29.0, watts=290.0)))
    assert replace(mixed, max_batch_tokens=1, max_num_seqs=1) in found
    assert all((hardware.price_per_hour(c) or 0) <= 29 and (hardware.watts(c) or 0) <= 290 for c in found)
    assert not any(c.prefill and c.prefill_kind == 1 for c in found)
    (tmp_path / "hardware.yaml").write_text("- {profile: p.json, roles: [decode]}\n")
    with pytest.raises(SimulationError, match="nothing may prefill"):
        read_hardware(tmp_path / "hardware.yaml")


def test_a_worker_spans_the_gpus_that_its_profile_says(tmp_path: Path) -> None:
    profile().model_copy(update={"gpus": 4}).write(tmp_path / "p.json")
    (tmp_path / "hardware.yaml").write_text(
        "- {profile: p.json, name: own}\n- {profile: p.json, name: told, gpus_per_worker: 2, gpus: 8}\n"
    )
    assert [(kind.gpus, kind.most) for kind in read_hardware(tmp_path / "hardware.yaml").kinds] == [
        (4, None),
        (2, 4),
    ]
    common: dict[str, Any] = {
        "trace": tmp_path / "t.jsonl",
        "profile": tmp_path / "p.json",
        "gpus": 8,
        "slo": "ttft=0.5@p90",
    }
    for reported, spanned in ((None, 4), (2, 2)):
        (kind,) = the_hardware(PlanSettings(**common, gpus_per_worker=reported)).kinds
        assert kind.gpus == spanned


def test_long_prompts_want_prefill_workers_and_long_answers_decode_workers() -> None:
    code, talk = question(600, 2, count=30), question(20, 20, count=30)
    ratios = [Candidate(2, 1, 0, 512, 16), Candidate(1, 2, 0, 512, 16)]
    (code_prefill, code_decode), (talk_prefill, talk_decode) = (
        [answer(q, c).goodput for c in ratios] for q in (code, talk)
    )
    assert code_prefill > 1.3 * code_decode
    assert talk_decode > 1.3 * talk_prefill


def test_no_candidate_exceeds_its_bound_by_more_than_a_short_trace_explains() -> None:
    found = answer(question(400, 6, count=60), Candidate(0, 0, 1, 512, 16))
    assert 0 < found.goodput <= 1.1 * found.bound


def test_what_is_not_better_than_the_best_known_is_not_bisected() -> None:
    asked = question(200, 6)
    candidate = Candidate(1, 1, 0, 512, 16)
    full = answer(asked, candidate)
    pruned = answer(asked, candidate, at_least=full.goodput * 1.2)
    assert pruned.pruned
    assert len(pruned.tried) <= 1 < len(full.tried)
    assert answer(asked, candidate, at_least=full.bound + 1).tried == []


def test_a_simulation_that_is_given_up_would_have_failed_too() -> None:
    """Requests that are late already count as missed before they end; on the answer that has no influence."""
    asked = question(300, 60, count=40)
    candidate, given_up = Candidate(1, 1, 0, 512, 64), 0
    for rate in (4.0, 40.0):
        early, whole = (simulate(asked, candidate, rate, give_up=give_up) for give_up in (True, False))
        assert (num_failed(early) > asked.allowed) == (
            whole.tallies.num_requests - whole.tallies.num_good > asked.allowed
        )
        assert num_failed(early) <= num_failed(whole)
        given_up += early.num_ended - early.tallies.num_good <= asked.allowed < num_failed(early)
    assert given_up, "some of them earlier than by those that had ended"


def test_the_goodput_is_where_the_attainment_falls() -> None:
    asked = question(300, 4, count=50)
    found = answer(asked, Candidate(1, 1, 0, 512, 16))
    assert simulate(asked, found.candidate, found.goodput, give_up=False).tallies.attainment >= 0.9
    assert simulate(asked, found.candidate, 1.3 * found.goodput, give_up=False).tallies.attainment < 0.9


def test_a_burst_is_planned_for_where_a_mean_is_not_enough() -> None:
    even = tuple(TraceRequest(0.2 * i, 300, 4) for i in range(80))
    bursts = tuple(replace(r, arrival_s=4.0 * (i // 20)) for i, r in enumerate(even))
    calm, bursty = (Question.of(HARDWARE, Load(requests, None), LEVEL) for requests in (even, bursts))
    candidate = Candidate(2, 1, 0, 512, 16)
    assert bound(candidate, HARDWARE, calm.demand, 0.03) == bound(candidate, HARDWARE, bursty.demand, 0.03)
    at = 0.8 * answer(calm, candidate).goodput
    assert simulate(calm, candidate, at, give_up=False).tallies.attainment > 0.9
    assert simulate(bursty, candidate, bursty.load.rate, give_up=False).tallies.attainment < 0.9


def test_demand_counts_what_a_prefix_cache_would_have_once() -> None:
    requests = [TraceRequest(float(i), 100, 10, (1, 2, 3)) for i in range(4)]
    assert Demand.of(requests, 32).prompt == pytest.approx((100 + 3 * 4) / 4)


def test_the_batch_meets_the_bound_and_the_memory() -> None:
    demand = Demand(prompt=100, output=10, context=100, reads=50)
    assert largest_batch(profile(), demand, None) == 64  # 512 blocks of 16 tokens
    assert largest_batch(profile(), demand, 0.025) == 16
    assert largest_batch(profile(), demand, 0.001) == 1


def test_what_growth_needs_serves_what_growth_brings() -> None:
    asked = question(500, 3, count=40)
    found = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    assert found.growth.unchanged < 0.9 <= found.growth.attainment
    assert found.growth.candidate.num_workers > 3
    assert any(line.startswith("When load grows by 50%") and "go to" in line for line in sentences(found))
    found.growth.unchanged = 0.9  # no more was asked for
    assert any(
        line.startswith("When load grows by 50%") and "good still" in line for line in sentences(found)
    )


def test_a_load_that_is_over_before_the_cluster_has_filled_is_told_as_a_bound() -> None:
    """Such a burst is good at any rate: the search ends at the rate that workers keep up with for long, and
    reports it."""
    requests = tuple(TraceRequest(0.01 * i, 40, 20) for i in range(24))
    asked = Question.of(HARDWARE, Load(requests, None), ServiceLevel(Slo(5.0, 0.5), 0.9))
    found = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    assert found.winner.at_bound
    assert found.winner.goodput <= found.winner.bound
    message = sentences(found)
    assert any(line.startswith("That is what these workers could keep up with for long") for line in message)
    assert any(line.startswith("Whether to disaggregate this load does not tell: ") for line in message)
    (growth,) = (line for line in message if line.startswith("When load grows by 50%"))
    assert f"keep up with {found.winner.bound:.2f} for long; go to " in growth
    assert asked.bound(found.growth.candidate) >= 1.5 * found.winner.goodput


def test_a_load_that_is_over_too_soon_is_not_taken_for_what_the_cluster_serves_for_long() -> None:
    """It ends just below the rate that workers keep up with by mean lengths, and nothing has queued up."""
    requests = tuple(TraceRequest(0.05 * i + 0.02 * (i % 3), 300 + i % 7, 40 + i % 5) for i in range(100))
    asked = Question.of(HARDWARE, Load(requests, None), ServiceLevel(Slo(0.3, 0.5), 0.9))
    found = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    winner, over_and_over = found.winner, asked.repeated(20)
    assert not winner.at_bound
    assert simulate(over_and_over, winner.candidate, winner.goodput, give_up=False).tallies.attainment < 0.3
    assert found.sustained is not None
    assert simulate(over_and_over, winner.candidate, found.sustained, give_up=False).tallies.attainment >= 0.9
    message = sentences(found)
    assert any(
        f"over and over it would serve about {found.sustained:.2f} requests/s" in line for line in message
    )
    assert any(
        line.startswith("Whether to disaggregate this load does not tell: ") and "at most" in line
        for line in message
    )
    assert as_json(found)["sustained_per_s"] == found.sustained


def test_a_load_that_lasts_is_told_as_it_is() -> None:
    found = search(question(400, 3, count=60), Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    assert found.sustained is None
    assert not any("over and over" in line for line in sentences(found))


def test_what_errors_of_the_profile_would_make_of_the_goodput_is_told() -> None:
    load, off, plain = (
        question(400, 3, count=120).load,
        Residuals(num_points=9, mean=0.2, p95=0.3, worst=0.4),
        profile(),
    )
    rough = plain.model_copy(
        update={
            role: getattr(plain, role).model_copy(update={"held_out": off}) for role in ("prefill", "decode")
        }
    )
    asked = Question.of(Hardware((Kind.of(rough),)), load, ServiceLevel(Slo(0.8, 0.05), 0.9))
    found = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    steps = asked.with_slower_steps().hardware.kinds[0].profile
    assert steps.prefill.seconds(300, 45_150, 1) == pytest.approx(1.2 * rough.prefill.seconds(300, 45_150, 1))
    assert steps.decode.seconds(8, 4_000, 8) == pytest.approx(1.2 * rough.decode.seconds(8, 4_000, 8))
    assert found.if_slower == pytest.approx(
        answer(asked.with_slower_steps(), found.winner.candidate).goodput, rel=0.06
    )
    assert found.if_slower < 0.9 * found.winner.goodput
    assert any(
        f"(of prompts 20.0%, of sequences 20.0%): {found.if_slower:.2f} (sketched)." in line
        for line in sentences(found)
    )
    assert as_json(found)["goodput_if_slower"] == found.if_slower


def test_a_profile_that_does_not_know_its_errors_is_told() -> None:
    found = search(question(400, 3, count=24), Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    assert found.if_slower is None
    assert any("By how much the profile is off it does not say." in line for line in sentences(found))


def test_the_best_pure_split_is_told_beside_a_colocated_recommendation() -> None:
    asked = replace(question(100, 30, count=60), level=ServiceLevel(Slo(2.0, 0.2), 0.9))
    found = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1, with_curves=True)
    assert not found.disaggregates
    assert found.split.candidate.is_split
    assert found.split.goodput == pytest.approx(answer(asked, found.split.candidate).goodput, rel=0.06)
    assert found.split.goodput < found.winner.goodput
    worse = f"{found.split.goodput / found.winner.goodput - 1:+.0%}"
    assert any(
        f"purely split, {found.split.candidate.ratio}" in line and worse in line for line in sentences(found)
    )
    message = as_json(found)
    assert message["split"]["compared"] == pytest.approx(found.split.goodput / found.winner.goodput)
    assert message["colocated"]["compared"] == 1.0
    assert found.split.candidate in found.curves
    assert found.winner.candidate in found.curves
    assert {c.colocated > 0 for c in found.sizes} == {True, False}


def test_limits_within_which_nothing_can_be_built_are_an_error() -> None:
    wide = Hardware((replace(Kind.of(profile()), gpus=8),))
    asked = Question.of(wide, question(100, 3).load, LEVEL)
    with pytest.raises(SimulationError, match="nothing can be built"):
        search(asked, Goal("goodput", Limits(4), chunks=(512,)), processes=1)


def test_a_mover_is_chosen_where_several_were_measured() -> None:
    slow, quick = (profile().handoff.model_copy(update={"bytes_per_s": rate}) for rate in (2e5, 1e10))
    hardware = Hardware((Kind.of(profile().model_copy(update={"movers": {"tcp": slow, "shm": quick}})),))
    assert hardware.movers == ("shm", "tcp")
    asked = Question.of(hardware, question(300, 4, count=24).load, LEVEL)
    best = search(asked, Goal("goodput", Limits(2), chunks=(512,)), processes=1).best
    assert best.candidate.mover == "shm"
    assert hardware.cluster(best.candidate, 10).pools[0].profile.handoff.bytes_per_s == 1e10


def test_what_nobody_could_meet_is_refused_with_the_reason() -> None:
    impossible = replace(question(400, 8), level=ServiceLevel(Slo(0.01), 0.9))
    with pytest.raises(SimulationError, match=r"only 0\.0% of the requests could meet ttft <= 0\.01 s"):
        require_reachable(impossible, 512)


def test_a_harder_rest_of_the_trace_is_told_wherever_the_plan_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts that come one by one, then as many at once as no three workers compute in time."""
    profile().write(tmp_path / "p.json")
    easy = [TraceRequest(0.5 * i, 300, 3) for i in range(40)]
    hard = [TraceRequest(20 + 0.01 * (i % 20) + 10 * (i // 20), 300, 3) for i in range(60)]
    write_trace(tmp_path / "t.jsonl", Trace("t", lambda: iter([*easy, *hard])))
    settings = PlanSettings(
        trace=tmp_path / "t.jsonl", profile=tmp_path / "p.json", gpus=3, slo="ttft=0.4@p90,tpot=0.03@p90",
        jobs=1, chunk_budgets="512", json_file=tmp_path / "j.json", requests=40,
        launch_file=tmp_path / "up.yaml",
    )  # fmt: skip
    assert plan_command(settings) == 0
    message = json.loads((tmp_path / "j.json").read_text())
    (warning,) = message["warnings"]
    assert warning.startswith("Over 100 requests of the trace, at the same compression, only about ")
    assert warning in message["recommendation"]
    assert warning in " ".join(capsys.readouterr().out.split())
    first, *_ = (tmp_path / "up.yaml").read_text().splitlines()
    assert first.startswith("# ")
    assert warning in first


def test_distserves_own_example_two_prefill_workers_for_one_decode_worker() -> None:
    """13B on an A100, 512 prompt and 64 output tokens: 5.6 requests/s a prefill worker, 10 a decode worker;
    2P1D bears 10, 3.3 a GPU."""
    base = profile(memory=profile().memory.model_copy(update={"num_blocks": 4096}))
    step_s, batch = 1 / 5.6, 32
    of = base.model_copy(
        update={
            "prefill": base.prefill.model_copy(update={"pieces": (Piece(curve=((0, 0.0), (512, step_s))),)}),
            "decode": base.decode.model_copy(
                update={"pieces": (Piece(curve=((0, batch / 640), (64, batch / 640))),)}
            ),
        }
    )
    demand = Demand(prompt=512, output=65, context=544, reads=256)
    hardware = Hardware((Kind.of(of),))
    bounds = {
        c.ratio: bound(c, hardware, demand, None)
        for c in (Candidate(1, 2, 0, 512, batch), Candidate(2, 1, 0, 512, batch))
    }
    assert bounds == pytest.approx({"1P:2D": 5.6, "2P:1D": 10.0})
    assert max(bounds, key=lambda ratio: bounds[ratio]) == "2P:1D"


def test_requests_that_are_too_long_come_first() -> None:
    asked = question(400, 3, count=60)
    (kind,) = HARDWARE.kinds
    longer = kind.profile.memory.max_model_len
    load = list(asked.load.requests)
    load[::20] = [replace(r, num_prompt_tokens=longer) for r in load[::20]]
    asked = Question.of(HARDWARE, Load(tuple(load), None), LEVEL)
    first, *_ = sentences(search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1))
    assert first.startswith("Refused at any rate: 3 of 60 requests (5.0%), longer than the model's ")
    assert f"{longer:,} tokens" in first


def test_the_sustained_rate_leads_and_costs_are_told_by_tokens() -> None:
    (kind,) = HARDWARE.kinds
    hardware = Hardware((replace(kind, price_per_hour=2.0),))
    asked = Question.of(hardware, question(400, 3, count=60).load, LEVEL)
    found = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    message = sentences(found)
    hours = 1e6 / (3600 * found.winner.goodput * asked.demand.output)
    assert f"{3 * hours:.2f} GPU hours a million output tokens" in message[1]
    assert any(f"{6.0 * hours:.2f} a million output tokens" in line for line in message)
    found.sustained = 1.25
    assert found.served == 1.25
    assert sentences(found)[1].startswith("It serves about 1.25 requests/s for long (sketched)")


def test_an_interrupted_search_has_its_results_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    asked, goal = question(400, 3, count=24), Goal("goodput", Limits(3), chunks=(512,))
    for stage, how in (("_around", "simulated"), ("_simulate", "only sketched")):
        monkeypatch.setattr(f"splitserve.planner.search.search._Search.{stage}", interrupted)
        with pytest.raises(Stopped, match=rf"Best so far \({how}\): 2P:1D [\d.]+ requests/s"):
            search(asked, goal, processes=1)


def test_the_pareto_table_has_no_cluster_that_another_beats() -> None:
    found = search(question(400, 3, count=60), Goal("goodput", Limits(4), chunks=(512,)), processes=1)
    rows = pareto(found)
    assert rows
    assert all(seen.attainment >= 0.9 for _, seen in rows)
    values = [(c.num_workers, seen.ttft_p90_s, seen.tpot_p90_s) for c, seen in rows]
    assert not any(a != b and all(x <= y for x, y in zip(a, b, strict=True)) for a in values for b in values)
    table = pareto_table(found)
    assert table is not None
    assert table.row_count == len(rows)


def test_as_many_requests_are_planned_on_as_the_goodput_depends_on() -> None:
    steady = tuple(TraceRequest(0.2 * i, 300 + i % 7, 3) for i in range(4000))
    goal = Goal("goodput", Limits(3), chunks=(512,))
    asked = Question.of(HARDWARE, Load(steady, None), LEVEL)
    assert len(with_enough(asked, goal).load.requests) <= 2000
    bursts = tuple(replace(r, arrival_s=r.arrival_s / (1 + i // 500) ** 2) for i, r in enumerate(steady))
    harder = Question.of(HARDWARE, Load(tuple(sorted(bursts, key=lambda r: r.arrival_s)), None), LEVEL)
    assert len(with_enough(harder, goal).load.requests) > len(with_enough(asked, goal).load.requests)


def test_degrees_of_parallelism_and_quantisation_are_profiles_to_choose_from(tmp_path: Path) -> None:
    """Kinds whose weights are quantised unequally do not hand blocks to each other."""
    names = [f"llama-3.1-8b{q}@{n}xh100" for q, n in (("", 1), ("", 2), ("-fp8", 1))]
    settings = PlanSettings(
        trace=tmp_path / "t", profile=Path(",".join(names)), gpus=8, slo="ttft=1@p90", workers_per_host=1
    )
    kinds = the_hardware(settings).kinds
    assert [kind.gpus for kind in kinds] == [1, 2, 1]
    assert kinds[0].hands_to(kinds[1])
    assert not kinds[0].hands_to(kinds[2])
    built = {(c.prefill_kind, c.decode_kind) for c in shapes(the_hardware(settings), Limits(8)) if c.prefill}
    assert built == {(0, 0), (0, 1), (1, 0), (1, 1), (2, 2)}


def test_an_inventory_gives_every_degree_that_fits_and_shares_its_gpus(tmp_path: Path) -> None:
    """70 GB of weights fit on no single H100 and no single A100; kinds of one GPU share its number."""
    settings = PlanSettings(
        trace=tmp_path / "t", profile=Path("llama-3.1-70b-fp8"), inventory="8xh100 4xa100", slo="ttft=1@p90",
        workers_per_host=1,
    )  # fmt: skip
    hardware = the_hardware(settings)
    assert [kind.name.partition("@")[2] for kind in hardware.kinds] == [
        "2xh100", "4xh100", "8xh100", "2xa100", "4xa100",
    ]  # fmt: skip
    limits = the_goal(settings, replace(question(300, 3), hardware=hardware)).limits
    assert (limits.gpus, limits.stocks) == (12, (("h100", 8), ("a100", 4)))
    for built in shapes(hardware, limits):
        used = dict.fromkeys(("h100", "a100"), 0)
        for _, count, kind in hardware.pools(built):
            used[kind.stock] += count * kind.gpus
        assert used["h100"] <= 8
        assert used["a100"] <= 4
    ratios = {hardware.words(built) for built in shapes(hardware, limits)}
    assert "4P (llama-3.1-70b-fp8@2xh100) : 2D (llama-3.1-70b-fp8@2xa100)" in ratios
    with pytest.raises(ProfileError, match="the GPU v100 is not known here"):
        the_hardware(settings.model_copy(update={"inventory": "8xv100"}))


@pytest.mark.parametrize(
    ("given", "message"),
    [({}, "give --gpus, or --inventory"), ({"inventory": "8xh100"}, "--profile only the model")],
)
def test_an_inventory_takes_the_place_of_gpus(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=message):
        PlanSettings(trace=tmp_path / "t", profile=Path("llama-3.1-8b@h100"), slo="ttft=1@p90", **given)


def test_a_put_that_waits_for_a_busy_receiver_holds_no_other_put() -> None:
    pool = Pool(role="decode", count=3, profile=profile())
    first, second, busy, idle = (Link(pool) for _ in range(4))
    once = first.transfer(busy, 4, None, 0.0)
    waiting = second.transfer(busy, 4, None, 0.0)
    assert waiting == pytest.approx(2 * once)
    assert second.transfer(idle, 4, None, 0.0) == pytest.approx(2 * once)
