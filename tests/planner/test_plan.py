"""Planning: the search finds the same as trying everything, and explains it so that a person can act."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.planned_loads import HARDWARE, LEVEL, planned, question
from support.simulated import profile

from splitserve.engine.latency_profile import Contention, Piece
from splitserve.planner.errors import SimulationError
from splitserve.planner.plan_command import the_load, with_enough
from splitserve.planner.search.candidates import Candidate, Hardware, Kind
from splitserve.planner.search.demand import Demand, bound, largest_batch
from splitserve.planner.search.goal import Goal, Limits
from splitserve.planner.search.goodput import (
    Load,
    Question,
    answer,
    failures,
    num_failed,
    simulate,
    sketch,
    sketched_goodput,
)
from splitserve.planner.search.looks import glance
from splitserve.planner.search.search import search
from splitserve.planner.search.tables import _for_growth
from splitserve.planner.search.verdict import compared
from splitserve.planner.search.words import answer as told
from splitserve.planner.search.words import sentences
from splitserve.planner.settings import PlanSettings
from splitserve.planner.simulator.cluster import Pool
from splitserve.planner.simulator.events import EventQueue
from splitserve.planner.simulator.link import Link, LinkSource
from splitserve.planner.simulator.slo import ServiceLevel, Slo
from splitserve.traces.own_format import write_trace
from splitserve.traces.request import Trace, TraceRequest


def test_the_search_finds_what_trying_everything_finds() -> None:
    asked, found = question(400, 3, count=60), planned(60)
    alike = [replace(found.best.candidate, prefill=n, decode=3 - n, colocated=0) for n in (1, 2)]
    best = max((answer(asked, candidate) for candidate in alike), key=lambda a: a.goodput)
    assert found.best.candidate.ratio == best.candidate.ratio
    assert found.best.goodput == pytest.approx(best.goodput, rel=0.06)


def test_the_sketch_decides_as_the_simulation() -> None:
    asked = question(400, 6, count=80)
    split, local = (
        [(Candidate(1, 1, 0, 512, 16), 9.0), (Candidate(2, 1, 0, 512, 16), 14.0)],
        (Candidate(1, 0, 2, 512, 16), 9.0),
    )
    for candidate, rate in (*split, local, (Candidate(0, 0, 2, 512, 16), 5.0)):
        seen = glance(asked, candidate, rate)
        simulated = simulate(asked, candidate, rate, give_up=False).tallies
        latency = simulated.percentiles()
        assert seen.ttft_p90_s == pytest.approx(latency["ttft"]["p90"], rel=0.15)
        assert seen.tpot_p90_s == pytest.approx(latency["tpot"]["p90"], rel=0.15)
        assert seen.attainment == pytest.approx(simulated.attainment)
        num_missed = simulated.num_requests - simulated.num_good
        assert failures(asked, candidate, rate) == (pytest.approx(num_missed), 0)
    assert glance(asked, Candidate(1, 1, 0, 512, 16), 100.0).attainment < 0.5


def test_where_the_sketch_may_decide_otherwise_a_candidate_is_simulated() -> None:
    """Equal blocks tie requests together; and a sequence without a block is computed anew."""
    asked, candidate = question(400, 6, count=20), Candidate(1, 1, 0, 512, 16)
    tied = Load(tuple(replace(r, block_hashes=(1,)) for r in asked.load.requests), 32)
    assert failures(Question.of(HARDWARE, tied, LEVEL), candidate, 2.0)[1] == 20
    (kind,) = HARDWARE.kinds
    memory = kind.profile.memory.model_copy(update={"num_blocks": 30})
    small = replace(kind, profile=kind.profile.model_copy(update={"memory": memory}))
    lacking = replace(question(200, 150, count=20), hardware=replace(HARDWARE, kinds=(small,)))
    assert not sketch(lacking, candidate, 20.0, give_up=False).is_exact
    assert failures(lacking, candidate, 20.0)[1] > 0


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
    assert _for_growth(found)[0].startswith("for 50% more load ")
    found.growth.unchanged = 0.9  # no more was asked for
    found.goal = replace(found.goal, objective="cost", rate=found.winner.bound / 2)
    assert _for_growth(found) == ("for 50% more load", "the recommended one does")


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


def test_what_a_model_cannot_hold_lowers_no_bound() -> None:
    """Prompts that are refused cost nothing, and answers end with the context: no bound is below what is
    served."""
    asked = question(400, 3, count=60)
    load, (kind,) = list(asked.load.requests), HARDWARE.kinds
    longer = kind.profile.memory.longest
    refused, cut = (
        [replace(r, **{what: 1 << 20}) for r in load] for what in ("num_prompt_tokens", "num_output_tokens")
    )
    plain, fewer, shorter = (
        Question.of(HARDWARE, Load((*load, *more), None), LEVEL).demand for more in ((), refused, cut)
    )
    assert fewer == replace(plain, prompt=plain.prompt / 2, output=plain.output / 2)
    assert shorter.output < longer
    one_more = Question.of(HARDWARE, Load((*load, *cut[-1:]), None), LEVEL)
    found = replace(planned(60), question=one_more)
    assert sentences(found)[0] == f"Cut short: 1 of 61 answers, which end at the model's {longer:,} tokens."


def test_as_many_requests_are_planned_on_as_the_goodput_depends_on() -> None:
    steady = tuple(TraceRequest(0.2 * i, 300 + i % 7, 3) for i in range(4000))
    goal = Goal("goodput", Limits(3), chunks=(512,))
    asked = Question.of(HARDWARE, Load(steady, None), LEVEL)
    assert len(with_enough(asked, goal).load.requests) <= 2000
    bursts = tuple(replace(r, arrival_s=r.arrival_s / (1 + i // 500) ** 2) for i, r in enumerate(steady))
    harder = Question.of(HARDWARE, Load(tuple(sorted(bursts, key=lambda r: r.arrival_s)), None), LEVEL)
    assert len(with_enough(harder, goal).load.requests) > len(with_enough(asked, goal).load.requests)


def test_requests_that_all_come_at_one_time_have_no_rate_to_plan_for(tmp_path: Path) -> None:
    requests = [TraceRequest(3.0, 300, 3)] * 20
    write_trace(tmp_path / "t.jsonl", Trace("t", lambda: iter(requests)))
    settings = PlanSettings(trace=tmp_path / "t.jsonl", profile=Path("p.json"), gpus=3, slo="ttft=0.4")
    with pytest.raises(SimulationError, match=r"t\.jsonl has 20 requests: all at one time"):
        the_load(settings)


def test_a_put_that_waits_for_a_busy_receiver_holds_no_other_put() -> None:
    pool = Pool(role="decode", count=3, profile=profile())
    first, second, busy, idle = (Link(pool) for _ in range(4))
    once = first.transfer(busy, 4, None, 0.0)
    waiting = second.transfer(busy, 4, None, 0.0)
    assert waiting == pytest.approx(2 * once)
    assert second.transfer(idle, 4, None, 0.0) == pytest.approx(2 * once)


def test_a_put_is_under_way_until_it_has_arrived_and_within_one_process_never() -> None:
    link, queue = Link(Pool(role="decode", count=2, profile=profile())), EventQueue()
    for target, is_under_way in (
        (Link(Pool(role="decode", count=2, profile=profile())), True),
        (link, False),
    ):
        source = LinkSource(link, target, queue, lambda: None)
        source.put(7, b"", [(0, 0, 0)])
        source.poll()
        assert (source.writing(7), source.pending()) == (is_under_way, is_under_way)
        queue.run_while(lambda: True)
        source.poll()
        assert not source.writing(7)


@pytest.mark.parametrize(
    "changes", [{"noise_cv": 0.3}, {"contention": Contention(prefill_beside_decode=1.5)}]
)
def test_steps_that_the_sketch_does_not_time_are_simulated(changes: dict[str, Any]) -> None:
    """The plan's rate is good in simulation: steps have noise, or workers of one host slow each other."""
    hardware = Hardware((Kind.of(profile(**changes)),), workers_per_host=2 if "contention" in changes else 1)
    asked = Question.of(hardware, question(600, 3, count=40).load, LEVEL)
    candidate = Candidate(2, 1, 0, 512, 16)
    sketched = sketched_goodput(asked, candidate)
    assert simulate(asked, candidate, sketched, give_up=False).tallies.attainment < 0.9
    found = answer(asked, candidate, guess=sketched)
    assert 0 < found.goodput < sketched
    assert simulate(asked, candidate, found.goodput, give_up=False).tallies.attainment >= 0.9


def test_a_rate_at_which_the_search_ends_is_at_most_however_long_the_load() -> None:
    asked = replace(question(400, 3, count=200), level=ServiceLevel(Slo(60.0, 5.0), 0.9))
    found = search(asked, Goal("goodput", Limits(3), chunks=(512,)), processes=1)
    assert found.sustained is None, "the load lasts"
    assert found.winner.at_bound
    assert compared(found, found.winner).startswith("at most ")
    assert not told(found)[4].startswith("Disaggregat")


def test_other_clusters_are_told_by_their_goodput_and_not_by_the_traces_own_rate() -> None:
    goal = Goal("goodput", Limits(3), rate=1000.0, chunks=(512,))
    found = search(question(400, 3, count=24), goal, processes=1)
    (neighbour,) = found.neighbours
    assert compared(found, neighbour).endswith(f"{neighbour.goodput / found.winner.goodput - 1:+.0%})")
    for one in found.answers:
        one.sketched = 0.0  # where the sketch finds none good enough
    assert not any("the sketch had missed" in line for line in sentences(found))
