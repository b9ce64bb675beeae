"""Service levels: bounds kept at once, bounds by percentile, and bounds relative to an unloaded request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.planned_loads import planned
from support.simulated import profile

from splitserve.planner.errors import SimulationError
from splitserve.planner.search.candidates import Candidate, Hardware, Kind
from splitserve.planner.search.goodput import (
    PRECISION,
    Load,
    Question,
    _bisected,
    _bracketed,
    num_failed,
    simulate,
    sketch,
)
from splitserve.planner.search.words import answer as told
from splitserve.planner.simulator.cluster import Cluster, Pool
from splitserve.planner.simulator.records import RequestRecord
from splitserve.planner.simulator.slo import parse_slo
from splitserve.planner.simulator.steered import steering_of
from splitserve.planner.simulator.tallies import Tallies
from splitserve.traces.request import TraceRequest

NINE = ",".join(
    f"{name}={times}x@p{percent}"
    for name, all_times in (("ttft", (2, 3, 6)), ("tpot_all", (1.25, 1.5, 5)), ("e2e", (1.25, 1.5, 5)))
    for times, percent in zip(all_times, (50, 90, 99), strict=True)
)
"""Splitwise's service levels."""


def record(ttft_s: float, e2e_s: float, prompt: int = 100, output: int = 11) -> RequestRecord:
    return RequestRecord(
        0, 0.0, 1.0, prompt, output, output, first_at=1.0 + ttft_s, ended_at=1.0 + e2e_s, outcome="finished"
    )


def test_each_percentile_is_kept_by_its_own_share() -> None:
    """A request that misses one level fails no other."""
    level = parse_slo("ttft=0.1@p50,ttft=1@p90,tpot=0.05@p90")
    assert [(part.share, part.ttft_s, part.tpot_s) for part in level.bounds.levels] == [
        (0.5, 0.1, None), (0.9, 1.0, None), (0.9, None, 0.05),
    ]  # fmt: skip
    tallies = Tallies(level.bounds)
    for i in range(100):
        tallies.add(record(ttft_s=0.05 if i < 51 else 0.5 if i < 91 else 2.0, e2e_s=2.4))
    assert tallies.missed == [49, 9, 91]
    assert tallies.attainment < level.attainment  # tpot: (2.4 - 0.5) / 10
    without = parse_slo("ttft=0.1@p50,ttft=1@p90")
    kept = Tallies(without.bounds)
    for i in range(100):
        kept.add(record(ttft_s=0.05 if i < 51 else 0.5 if i < 91 else 2.0, e2e_s=2.4))
    assert without.attainment <= kept.attainment < 0.92
    assert without.bounds.words() == "ttft <= 0.1 s at p50, ttft <= 1 s at p90"


def test_a_multiple_is_of_a_request_alone_on_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    alone = profile()
    alone.write(path)
    bounds = parse_slo(f"{NINE},of={path}").bounds
    assert len(bounds.parts) == 9
    first, step = alone.prefill.seconds(700, 700 * 701 / 2, 1), alone.decode.seconds(1, 700, 1)
    assert bounds.parts[0].most(700, 11).ttft == pytest.approx(2 * first)
    assert bounds.parts[3].most(700, 11).tpot_all == pytest.approx(1.25 * step)
    assert bounds.parts[8].most(700, 11).e2e == pytest.approx(5 * (first + 10 * step))
    assert not bounds.parts[0].met_by(record(2.1 * first, 9.0, prompt=700))
    assert bounds.parts[1].met_by(record(2.1 * first, 9.0, prompt=700))


@pytest.mark.parametrize("text", ["ttft=1", "tpot=0.1"])
def test_steering_needs_both_bounds(text: str) -> None:
    pools = (
        Pool(role="prefill", count=1, profile=profile()),
        Pool(role="decode", count=1, profile=profile()),
    )
    cluster = Cluster(pools=pools)
    with pytest.raises(SimulationError, match="give --slo with both"):
        steering_of(cluster, parse_slo(text), None)


def test_a_goodput_is_found_in_few_steps_from_a_good_guess_and_in_a_few_more_where_there_is_none() -> None:
    asked: list[float] = []

    def passes(rate: float) -> bool:
        asked.append(rate)
        return rate <= 10.0

    for guess in (9.7, 10.3):
        low, high = _bracketed(passes, 0.0, 1000.0, guess)
        assert low <= 10.0 < high < 1.1 * low
    assert len(asked) <= 4
    assert _bisected(passes, 0.0, 100.0) == pytest.approx(10.0, rel=PRECISION)
    asked.clear()
    assert _bisected(lambda rate: passes(10.0 + rate), 0.0, 8.0) == 0.0
    assert len(asked) < 40


def test_a_request_that_runs_is_given_up_no_sooner_than_it_misses_a_bound() -> None:
    (part,) = parse_slo("ttft=1,tpot=0.1").bounds.parts

    def missed(now: float, output: int, first_at: float) -> bool:
        return part.is_missed_by(RequestRecord(0, 0.0, 1.0, 100, output, first_at=first_at), now)

    assert [missed(now, 11, 0.0) for now in (1.9, 2.1)] == [False, True]
    assert [missed(now, 11, 1.5) for now in (2.4, 2.6)] == [False, True]
    assert not missed(9.0, 1, 1.5), "it has no further token"


@pytest.mark.parametrize(
    "text", ["ttft=2x@p50", "ttft=2x@p50,tpot=0.1@p50,of=opt-13b-a100", "ttft=1,of=opt-13b-a100",
             "ttft=1@p50,ttft=2@p50", "ttft=1@p0,ttft=2@p50"],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused(text: str) -> None:
    with pytest.raises(SimulationError, match="--slo"):
        parse_slo(text)


def test_a_lighter_load_keeps_all_nine_levels_and_a_heavier_one_does_not(tmp_path: Path) -> None:
    """The simulator and the sketch agree, and a simulation that is given up has failed."""
    path = tmp_path / "p.json"
    profile().write(path)
    requests = tuple(TraceRequest(0.1 * i + 0.02 * (i % 3), 300 + i % 7, 8) for i in range(200))
    level = parse_slo(f"{NINE},of={path}")
    asked = Question.of(Hardware((Kind.of(profile()),)), Load(requests, None), level)
    for rate, kept in ((1.0, True), (60.0, False)):
        candidate = Candidate(2, 2, 0, 512, 16)
        assert (num_failed(simulate(asked, candidate, rate)) <= asked.allowed) is kept
        assert (sketch(asked, candidate, rate, give_up=False).attainment >= level.attainment) is kept


@pytest.mark.parametrize(("slo", "share"), [("ttft=9@p99.9", "99.9%"), ("ttft=9@p90", "90%")])
def test_the_share_is_told_as_it_was_asked_for(slo: str, share: str) -> None:
    asked = replace(planned(24).question, level=parse_slo(slo))
    found = replace(planned(24), question=asked)  # only the words are looked at
    assert any(f"for {share} of the requests" in line for line in told(found))
