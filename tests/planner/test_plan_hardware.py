"""Which hardware a plan chooses: kinds of GPUs, degrees of parallelism, inventories, movers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from support.planned_loads import LEVEL, question
from support.simulated import profile

from splitserve.cli.config import Sources, load
from splitserve.engine.latency_profile import Power, ProfileError
from splitserve.planner.errors import SimulationError
from splitserve.planner.plan_command import the_goal, the_hardware, the_load
from splitserve.planner.search.candidates import Candidate, Hardware, Kind
from splitserve.planner.search.goal import Goal, Limits, settings_of, shapes
from splitserve.planner.search.goodput import Question, answer, simulate
from splitserve.planner.search.hardware_file import read_hardware
from splitserve.planner.search.search import search
from splitserve.planner.search.verdict import compared
from splitserve.planner.settings import PlanSettings
from splitserve.planner.several import names_of, plan_each
from splitserve.planner.simulator.slo import ServiceLevel, Slo
from splitserve.traces.errors import TraceError
from splitserve.traces.own_format import write_trace
from splitserve.traces.request import Trace, TraceRequest


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
        line = compared(found, neighbour)
        assert (
            neighbour.goodput >= 4.0
            or f"serves {neighbour.goodput:.2f} requests/s only" in line
            or "lowest rate tried" in line
        )
        assert "lowest rate tried" not in line or neighbour.goodput == 0


def test_a_rate_that_no_cluster_sustains_is_refused_though_a_short_load_is_good_at_any() -> None:
    priced = Hardware((replace(Kind.of(profile()), price_per_hour=1.0),))
    asked = Question.of(priced, question(40, 20, count=24).load, ServiceLevel(Slo(5.0, 0.5), 0.9))
    with pytest.raises(SimulationError, match="nothing can be built that could serve the load"):
        search(asked, Goal("cost", Limits(3), rate=1e5, chunks=(512,)), processes=1)


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


def test_a_mover_is_chosen_where_several_were_measured() -> None:
    slow, quick = (profile().handoff.model_copy(update={"bytes_per_s": rate}) for rate in (2e5, 1e10))
    hardware = Hardware((Kind.of(profile().model_copy(update={"movers": {"tcp": slow, "shm": quick}})),))
    assert hardware.movers == ("shm", "tcp")
    asked = Question.of(hardware, question(300, 4, count=24).load, LEVEL)
    best = search(asked, Goal("goodput", Limits(2), chunks=(512,)), processes=1).best
    assert best.candidate.mover == "shm"
    assert hardware.cluster(best.candidate, 10).pools[0].profile.handoff.bytes_per_s == 1e10


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
        for group, kind in hardware.pools(built):
            used[kind.stock] += group.count * kind.gpus
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


def test_a_pool_takes_workers_of_another_kind_where_that_serves_more() -> None:
    """Three new workers and two old ones, half as quick: together they serve more than either kind."""
    old = profile(name="old")
    slower = {name: getattr(old, name).times(2.0) for name in ("prefill", "decode")}
    new = Kind("new", profile(), price_per_hour=3.0, stock="n")
    kinds = new, Kind("old", old.model_copy(update=slower), price_per_hour=1.0, stock="o")
    asked = Question.of(Hardware(kinds), question(300, 8, count=16).load, LEVEL)
    limits = Limits(5, stocks=(("n", 3), ("o", 2)))
    goal = Goal("goodput", limits, chunks=(512,))
    found = search(asked, goal, processes=1)
    assert all(limits.hold(one, asked.hardware) for one in found.sketches)
    assert all(limits.hold(one.candidate, asked.hardware) for one in found.answers)
    winner = found.winner
    used = {kind.name: 0 for kind in kinds}
    for group, kind in asked.hardware.pools(winner.candidate):
        used[kind.name] += group.count
    assert winner.candidate.beside
    assert used == {"new": 3, "old": 2}
    pure = [c for c in shapes(asked.hardware, limits) if c.prefill]
    each = [answer(asked, one).goodput for c in pure for one in settings_of(asked, goal, c)]
    assert winner.goodput > max(each)
    rate = (winner.goodput + max(each)) / 2
    cheapest = search(asked, Goal("cost", limits, rate, (512,)), processes=1).winner
    assert cheapest.candidate.beside
    assert cheapest.goodput >= rate


def test_several_models_share_an_inventory_by_their_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The one with four times the load gets most of the GPUs; each gets a plan and a file of its own."""
    for name, scale in (("much", 0.25), ("few", 1.0)):
        requests = [
            replace(r, arrival_s=scale * r.arrival_s) for r in question(300, 20, count=24).load.requests
        ]
        write_trace(tmp_path / f"{name}.jsonl", Trace(name, lambda given=requests: iter(given)))
    (tmp_path / "plan.yaml").write_text(
        f"plan:\n  trace: {tmp_path}/much.jsonl\n  profile: llama-3.1-8b\n  slo: ttft=1@p90,tpot=0.1@p90\n"
        f"  inventory: 5xl40s:1.5\n  jobs: 1\n  chunk_budgets: '512'\n  launch_file: {tmp_path}/up.yaml\n"
        f"  other_models:\n  - {{trace: {tmp_path}/few.jsonl, profile: qwen3-30b-a3b-fp8, slo: ttft=1@p90}}\n"
    )
    settings = load("plan", {}, Sources.read(tmp_path / "plan.yaml", env={}))
    assert isinstance(settings, PlanSettings)
    assert plan_each(settings) == 0
    lines = capsys.readouterr().out.splitlines()
    *_, much, few = [line.split() for line in lines if line.strip()]
    assert [(row[0], len(row)) for row in (much, few)] == [("llama-3.1-8b", 8), ("qwen3-30b-a3b-fp8", 8)]
    paid = [float(row[5]) for row in (much, few)]
    assert 1.5 <= min(paid) <= sum(paid) <= 5 * 1.5
    shares = [int(line.partition(" on ")[2].partition("x")[0]) for line in lines[:2]]
    assert sum(shares) == 5
    dealt = [line.partition("DEVICES=")[2].split(" and ") for line in lines if "DEVICES=" in line]
    assert [int(gpu) for gpus, _ in dealt for gpu in gpus.split(",")] == list(range(5))
    assert [port for _, port in dealt] == ["--port 8000", "--port 8001"]
    assert shares[0] > shares[1] > 0
    assert {path.name for path in tmp_path.glob("*up.yaml")} == {
        "llama-3.1-8b-up.yaml", "qwen3-30b-a3b-fp8-up.yaml",
    }  # fmt: skip
    other = settings.model_copy(update={"profile": Path("qwen3-32b")})
    assert names_of([settings, other, settings]) == ["llama-3.1-8b-1", "qwen3-32b", "llama-3.1-8b-3"]
    with pytest.raises(ValidationError, match="several models share an --inventory"):
        PlanSettings.model_validate({**settings.model_dump(), "objective": "cost"})


def test_a_wrong_row_ends_the_command_before_the_search(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    write_trace(path, Trace("t", lambda: (TraceRequest(0.1 * i, 300, 3) for i in range(5000))))
    with path.open("a") as file:
        file.write("{}\n")
    settings = PlanSettings(trace=path, profile=Path("p.json"), gpus=3, slo="ttft=0.4", requests=20)
    with pytest.raises(TraceError, match=r"t\.jsonl, line 5002, num_prompt_tokens: is missing"):
        the_load(settings)


def test_gpus_per_worker_are_not_for_an_inventory() -> None:
    with pytest.raises(ValidationError, match=r"--gpus-per-worker: .*--inventory tries"):
        PlanSettings(
            trace=Path("t"), profile=Path("llama-3.1-8b"), inventory="4xh100", gpus_per_worker=2, slo="ttft=1"
        )


def test_a_chunk_budget_that_no_worker_takes_is_refused() -> None:
    """A table of each budget's steps is made, which took minutes."""
    given: dict[str, Any] = {"trace": Path("t"), "profile": Path("p"), "gpus": 2, "slo": "ttft=1"}
    PlanSettings(**given, chunk_budgets="512,999999")
    with pytest.raises(ValidationError, match="chunk_budgets"):
        PlanSettings(**given, chunk_budgets="512,9999999")
