"""The sentences of a plan: bounds, doubts, costs, interrupted searches."""

from __future__ import annotations

import json
import signal
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
from rich.table import Table
from support.planned_loads import HARDWARE, LEVEL, planned, question
from support.simulated import profile

from splitserve.engine.latency_profile import Residuals
from splitserve.planner.errors import SimulationError
from splitserve.planner.plan_command import plan as plan_command
from splitserve.planner.plan_command import require_reachable
from splitserve.planner.search.candidates import Hardware, Kind
from splitserve.planner.search.crew import Stopped
from splitserve.planner.search.goal import Goal, Limits
from splitserve.planner.search.goodput import LOWEST, Load, Question, answer, simulate
from splitserve.planner.search.plan import Plan
from splitserve.planner.search.plan_json import as_json
from splitserve.planner.search.search import search
from splitserve.planner.search.tables import clusters_table, pareto, pareto_table, rates_table
from splitserve.planner.search.words import answer as told
from splitserve.planner.search.words import sentences
from splitserve.planner.settings import PlanSettings
from splitserve.planner.several import STOPPED, plan_each
from splitserve.planner.simulator.slo import ServiceLevel, Slo
from splitserve.traces.own_format import write_trace
from splitserve.traces.request import Trace, TraceRequest


def test_a_neighbour_that_was_a_rival_before_is_told_with_its_own_goodput(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rival was given up as soon as it was not better."""
    monkeypatch.setattr("splitserve.planner.search.search.NEARLY", 0.0)
    asked = question(400, 3, count=24)
    (neighbour,) = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1).neighbours
    assert neighbour.candidate.ratio == "1P:2D"
    assert neighbour.goodput == pytest.approx(answer(asked, neighbour.candidate).goodput, rel=0.06)


def test_a_load_that_is_over_before_the_cluster_has_filled_is_told_as_a_bound() -> None:
    """Such a burst is good at any rate: the search ends at the rate that workers keep up with for long, and
    reports it."""
    requests = tuple(TraceRequest(0.01 * i, 40, 20) for i in range(24))
    asked = Question.of(HARDWARE, Load(requests, None), ServiceLevel(Slo(5.0, 0.5), 0.9))
    found = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    assert found.winner.at_bound
    assert found.winner.goodput <= found.winner.bound
    message = sentences(found)
    assert any(line.startswith("Limited by the workers' pace alone") for line in message)
    assert any("read that as `at most`" in line for line in message)
    assert any(line.startswith("Whether to disaggregate this load does not tell: ") for line in message)
    (growth,) = (row for row in rows_of(clusters_table(found)) if row[0].startswith("for 50% more load "))
    assert growth[1].endswith(f"keeps up with {found.winner.bound:.2f}/s for long")
    assert asked.bound(found.growth.candidate) >= 1.5 * found.winner.goodput


def test_a_load_that_is_over_too_soon_is_not_taken_for_what_the_cluster_serves_for_long() -> None:
    """It ends just below the rate that workers keep up with by mean lengths, and nothing has queued up."""
    requests = tuple(
        TraceRequest(0.05 * i + 0.02 * (i % 3), 300 + 37 * i % 250, 40 + 11 * i % 30) for i in range(100)
    )
    asked = Question.of(HARDWARE, Load(requests, None), ServiceLevel(Slo(0.25, 0.5), 0.9))
    found = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    winner, over_and_over = found.winner, asked.repeated(6)
    assert not winner.at_bound
    assert simulate(over_and_over, winner.candidate, winner.goodput, give_up=False).tallies.attainment < 0.8
    assert found.sustained is not None
    assert simulate(over_and_over, winner.candidate, found.sustained, give_up=False).tallies.attainment >= 0.9
    message = sentences(found)
    assert f"Serves about {found.sustained:.2f} requests/s for long (sketched) with " in message[1]
    assert rates_of(found)["most, over and over"][0] == f"about {found.sustained:.2f}"
    assert any("they are over before the cluster has filled" in line for line in message)
    assert any(
        line.startswith("Whether to disaggregate this load does not tell: ") and "at most" in line
        for line in message
    )
    assert as_json(found)["sustained_per_s"] == found.sustained


def test_a_load_that_lasts_is_told_as_it_is() -> None:
    found = planned(60)
    assert found.sustained is None
    assert "most, over and over" not in rates_of(found)
    assert not any("over before the cluster has filled" in line for line in sentences(found))


def test_what_errors_of_the_profile_would_make_of_the_goodput_is_told() -> None:
    load, off, plain = (
        question(400, 3, count=60).load,
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
    assert rates_of(found)["most, steps 20.0%, 20.0% slower"][0] == f"{found.if_slower:.2f}"
    assert as_json(found)["goodput_if_slower"] == found.if_slower


def test_a_profile_that_does_not_know_its_errors_is_told() -> None:
    found = planned(24)
    assert found.if_slower is None
    assert any("By how much the profile is off it does not say." in line for line in sentences(found))


def test_the_best_pure_split_is_told_beside_a_colocated_recommendation() -> None:
    asked = replace(question(100, 30, count=30), level=ServiceLevel(Slo(2.0, 0.2), 0.9))
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
    assert plan_command(settings) is not None
    message = json.loads((tmp_path / "j.json").read_text())
    (warning,) = message["warnings"]
    assert warning.startswith("Over 100 requests of the trace, at the same compression, only about ")
    assert warning in message["recommendation"]
    assert message["whole_trace_per_s"] < message["best"]["goodput_per_s"]
    lead = f"Serves about {message['whole_trace_per_s']:.2f} requests/s over 100 requests of the trace"
    assert message["recommendation"][1].startswith(lead)
    assert warning in " ".join(capsys.readouterr().out.split())
    first, *_ = (tmp_path / "up.yaml").read_text().splitlines()
    assert first.startswith("# ")
    assert warning in first


def test_the_sustained_rate_leads_and_costs_are_told_by_tokens() -> None:
    (kind,) = HARDWARE.kinds
    hardware = Hardware((replace(kind, price_per_hour=2.0),))
    asked = Question.of(hardware, question(400, 3, count=60).load, LEVEL)
    found = replace(planned(60), question=asked)  # a price changes no search for goodput
    message = sentences(found)
    hours = 1e6 / (3600 * found.winner.goodput * asked.demand.output)
    assert message[3].startswith(f"Costs 3 GPUs, {3 * hours:.2f} GPU hours a million output tokens; 6.00 an ")
    assert f"{6.0 * hours:.2f} a million output tokens" in message[3]
    found.sustained = 1.25
    assert found.served == 1.25
    assert sentences(found)[1].startswith("Serves about 1.25 requests/s for long (sketched)")
    dearer = hours * found.winner.goodput / 1.25
    assert f"{3 * dearer:.2f} GPU hours a million output tokens" in sentences(found)[3]
    found.whole = 90, 0.0  # too many of them are refused at any rate
    least = f"less than {found.winner.bound / LOWEST:.2g}"
    assert sentences(found)[1].startswith(
        f"Serves {least} requests/s over 90 requests of the trace (sketched)"
    )
    assert rates_of(found)["most, 90 of the trace"][0] == least


def test_the_answer_comes_first_and_each_rate_is_named_by_what_it_is() -> None:
    found = deepcopy(planned(60))
    found.winner.bound *= 2  # as where the search ends at a bound on latency
    built, served, limit, costs, verdict, *_ = told(found)
    assert built.startswith("Recommended: 2 prefill and 1 decode workers (2P:1D), steps of ")
    goodput = found.winner.goodput
    assert served.startswith(f"Serves {goodput:.2f} requests/s ({goodput / 3:.3f} a GPU) with ttft <= ")
    assert limit.startswith("Limited by T")
    assert " ms); workers are busy: prefill " in limit
    assert costs.startswith("Costs 3 GPUs, ")
    assert "isaggregat" in verdict
    rates = rates_of(found)
    assert rates["most that it serves"][0] == f"{goodput:.2f}"
    assert float(rates["most that it serves"][1].rstrip("%")) >= 90
    assert rates["four fifths of the most"][0] == f"{found.relaxed.rate:.2f}"
    assert rates["50% more load"][0] == f"{1.5 * goodput:.2f}"


def test_a_bound_that_no_request_has_a_time_for_is_told_with_that_bound() -> None:
    """Answers of one token have no time per token."""
    asked = replace(question(400, 1, count=24), level=ServiceLevel(Slo(tpot_s=0.03), 0.9))
    asked = Question.of(
        HARDWARE, Load(tuple(replace(r, num_output_tokens=1) for r in asked.load.requests), None), asked.level
    )
    found = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    found.winner.bound *= 2  # as where the search ends at a bound on latency
    assert told(found)[2].startswith("Limited by TPOT (p90 0 of 30 ms); ")


def rows_of(table: Table) -> list[tuple[str, ...]]:
    return list(zip(*(map(str, column.cells) for column in table.columns), strict=True))


def rates_of(found: Plan) -> dict[str, tuple[str, ...]]:
    return {row[0]: row[1:] for row in rows_of(rates_table(found))}


def test_an_interrupted_search_has_its_results_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    asked, goal = question(400, 3, count=24), Goal("goodput", Limits(3), chunks=(512,))
    for stage, how in (("_around", "simulated"), ("_simulate", "only sketched")):
        monkeypatch.setattr(f"splitserve.planner.search.search._Search.{stage}", interrupted)
        with pytest.raises(Stopped, match=rf"Best so far \({how}\): 2P:1D [\d.]+ requests/s"):
            search(asked, goal, processes=1)


def test_a_time_limit_ends_a_plan_as_ctrl_c_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile().write(tmp_path / "p.json")
    requests = [TraceRequest(0.5 * i, 300, 3) for i in range(40)]
    write_trace(tmp_path / "t.jsonl", Trace("t", lambda: iter(requests)))
    slo = "ttft=0.4@p90,tpot=0.03@p90"
    settings = PlanSettings(trace=tmp_path / "t.jsonl", profile=tmp_path / "p.json", gpus=3, slo=slo, jobs=1)
    stage = "splitserve.planner.search.search._Search._simulate"
    monkeypatch.setattr(stage, lambda *_: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert plan_each(settings) == STOPPED
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "Best so far (only sketched)" in capsys.readouterr().out


def test_where_no_cluster_meets_the_bounds_none_is_written_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twenty prompts come at a time, and are computed one by one: the last are late at any rate."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    profile().write(tmp_path / "p.json")
    requests = [TraceRequest(60.0 * (i // 20), 300, 3) for i in range(60)]
    write_trace(tmp_path / "t.jsonl", Trace("t", lambda: iter(requests)))
    settings = PlanSettings(
        trace=tmp_path / "t.jsonl", profile=tmp_path / "p.json", gpus=3, slo="ttft=0.4@p90,tpot=0.03@p90",
        jobs=1, chunk_budgets="512", launch_file=tmp_path / "up.yaml",
    )  # fmt: skip
    assert plan_each(settings) == 1
    assert capsys.readouterr().out.startswith("No way to divide 3 GPUs meets ttft <= 0.4 s, tpot <= 0.03 s ")
    assert not (tmp_path / "up.yaml").exists()


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
