"""Synthetic workloads have the arrivals, lengths and reuse that were asked for, and repeat from their
seed."""

from __future__ import annotations

from collections import Counter
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from support.traces import trace_of

from splitserve.traces.errors import WorkloadError
from splitserve.traces.request import TraceRequest
from splitserve.traces.statistics import TraceStatistics, describe
from splitserve.traces.workload.arrivals import Arrivals, OperationalClock, diurnal_profile, draw_arrivals
from splitserve.traces.workload.fit import class_edges, fit
from splitserve.traces.workload.lengths import JointLengths, MarginalLengths, draw_pairs, lengths_at
from splitserve.traces.workload.sessions import Sessions
from splitserve.traces.workload.workload import Workload, read_workload, write_workload

SINGLE = Workload(
    arrivals=Arrivals(rate=5), lengths=MarginalLengths(prompt="lognormal:300,1", output="lognormal:50,0.5")
)


def statistics(workload: Workload, num_requests: int = 20_000, seed: int = 1) -> TraceStatistics:
    found = describe(workload.trace(seed, max_requests=num_requests))
    assert found is not None
    return found[0]


@pytest.mark.parametrize("cv", [0.0, 0.5, 1.0, 4.0])
def test_gaps_have_the_rate_and_the_burstiness_asked_for(cv: float) -> None:
    times = np.array(list(islice(draw_arrivals(Arrivals(rate=20, cv=cv), np.random.default_rng(3)), 60_000)))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(0.05, rel=0.01 + 0.02 * cv)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.05, abs=1e-9)


def test_a_day_swings_around_its_mean() -> None:
    arrivals = Arrivals(rate=10, profile=diurnal_profile(0.8), step_s=1000 / 288)
    times = np.fromiter(islice(draw_arrivals(arrivals, np.random.default_rng(0)), 100_000), float)
    phase = (times % 1000)[times < 9000] / 1000
    counts = np.histogram(phase, 4, (0, 1))[0] / 9 / 250  # arrivals per second in each quarter
    swing = 0.8 * 2 / np.pi  # mean of the sine over a quarter
    assert counts == pytest.approx(10 * np.array([1 + swing, 1 + swing, 1 - swing, 1 - swing]), rel=0.03)


PROFILES = st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda rates: sum(rates) > 0.1)


@given(PROFILES, st.floats(0.1, 100), st.lists(st.floats(0, 5000), max_size=30).map(sorted))
def test_operational_time_goes_there_and_back(
    profile: list[float], step_s: float, seconds: list[float]
) -> None:
    clock = OperationalClock(Arrivals(rate=3, profile=tuple(profile), step_s=step_s))
    operational = np.array([clock.operational_at(second) for second in seconds])
    assert (np.diff(operational) >= -1e-9).all()
    again = [clock.operational_at(second) for second in clock.seconds(operational)]
    assert again == pytest.approx(operational.tolist(), rel=1e-9, abs=1e-6)
    period_s = step_s * len(profile)
    assert clock.operational_at(period_s * 7) == pytest.approx(3 * period_s * 7)


@pytest.mark.parametrize("spec", ["7", "uniform:10,30", "normal:100,10", "lognormal:100,0.5"])
def test_marginals_stay_as_given_under_any_correlation(spec: str) -> None:
    alone = lengths_at(spec, np.random.default_rng(0).standard_normal(40_000))
    for correlation in (-1.0, 0.7):
        prompt, output = MarginalLengths(prompt="uniform:1,1000", output=spec, correlation=correlation).draw(
            40_000, np.random.default_rng(1)
        )
        assert np.percentile(output, [10, 50, 90]) == pytest.approx(
            np.percentile(alone, [10, 50, 90]), rel=0.02
        )
        if output.std():
            scores = np.corrcoef(np.argsort(np.argsort(prompt)), np.argsort(np.argsort(output)))[0, 1]
            assert scores == pytest.approx(
                6 / np.pi * np.arcsin(correlation / 2), abs=0.04
            )  # Spearman's of a Gaussian copula


def test_joint_lengths_keep_to_their_cells() -> None:
    lengths = JointLengths(prompt_edges=(1, 2, 100), output_edges=(5, 10, 11), cells=((0, 1, 1), (1, 0, 3)))
    pairs = list(islice(draw_pairs(lengths, np.random.default_rng(0)), 8000))
    cells = Counter((prompt >= 2, output >= 10) for prompt, output in pairs)
    assert set(cells) == {(False, True), (True, False)}
    assert cells[True, False] / 8000 == pytest.approx(0.75, abs=0.02)
    assert {output for _, output in pairs} == {5, 6, 7, 8, 9, 10}
    assert max(prompt for prompt, _ in pairs) == 99


def test_the_same_seed_gives_the_same_trace_and_lengths_do_not_move_arrivals() -> None:
    first = list(SINGLE.trace(7, max_requests=5000))
    assert first == list(SINGLE.trace(7, max_requests=5000))
    assert first != list(SINGLE.trace(8, max_requests=5000))
    other = SINGLE.model_copy(update={"lengths": MarginalLengths(prompt="9", output="9")})
    assert [one.arrival_s for one in other.trace(7, max_requests=5000)] == [one.arrival_s for one in first]


def test_a_trace_ends_at_its_time_or_number() -> None:
    assert max(one.arrival_s for one in SINGLE.trace(0, duration_s=100)) < 100
    assert len(list(SINGLE.trace(0, max_requests=10, duration_s=1e9))) == 10


CONVERSATIONS = Workload(
    arrivals=Arrivals(rate=2),
    lengths=MarginalLengths(prompt="uniform:20,60", output="uniform:10,40"),
    sessions=Sessions(
        turns=3, think_s=20, system_prompts=2, system_prompt_len=100, block_size=16, max_len=400
    ),
)


def test_each_turn_holds_the_turns_before_it() -> None:
    requests = list(CONVERSATIONS.trace(5, max_requests=6000))
    assert [one.arrival_s for one in requests] == sorted(one.arrival_s for one in requests)
    by_session: dict[str, list[TraceRequest]] = {}
    for request in requests:
        by_session.setdefault(request.session, []).append(request)
        assert request.num_prompt_tokens + request.num_output_tokens <= 400
        assert len(request.block_hashes) == request.num_prompt_tokens // 16
    for turns in by_session.values():
        assert 120 <= turns[0].num_prompt_tokens <= 160
        for before, after in pairwise(turns):
            assert 20 <= after.num_prompt_tokens - before.num_prompt_tokens - before.num_output_tokens <= 60
            assert after.block_hashes[: len(before.block_hashes)] == before.block_hashes
    firsts = Counter(
        turns[0].block_hashes[:6] for turns in by_session.values()
    )  # 6 full blocks of the 100 tokens
    assert sorted(firsts.values())[1] / len(by_session) == pytest.approx(2 / 3, abs=0.05)
    own = Counter(hash for turns in by_session.values() for hash in turns[-1].block_hashes[6:])
    assert set(own.values()) == {1}


def test_sessions_have_their_turns_rate_and_reuse() -> None:
    assert CONVERSATIONS.sessions is not None
    unlimited = CONVERSATIONS.sessions.model_copy(update={"max_len": 1 << 20, "think_s": 1.0})
    found = statistics(CONVERSATIONS.model_copy(update={"sessions": unlimited}).at_rate(30))
    assert found.num_sessions is not None
    assert found.num_requests / found.num_sessions == pytest.approx(3, rel=0.05)
    assert found.mean_rate == pytest.approx(30, rel=0.1)
    assert found.blocks is not None
    assert found.blocks.reuse is not None
    assert found.blocks.reuse > 0.6
    alone = statistics(CONVERSATIONS.model_copy(update={"sessions": Sessions(turns=1)}), 1000)
    assert alone.blocks is not None
    assert alone.blocks.reuse == 0


def test_a_system_prompt_that_fills_the_context_is_refused() -> None:
    with pytest.raises(ValidationError, match="room for two tokens"):
        Sessions(system_prompts=1, system_prompt_len=399, max_len=400)


@given(st.lists(st.integers(1, 300), min_size=1, max_size=300))
def test_classes_cover_every_length(lengths: list[int]) -> None:
    edges = class_edges(Counter(lengths))
    assert edges[0] == min(lengths)
    assert edges[-1] == max(lengths) + 1
    assert list(edges) == sorted(set(edges))


@pytest.mark.parametrize(("cv", "correlation", "seed"), [(0.7, -0.8, 1), (1.0, 0.0, 2), (3.0, 0.6, 3)])
def test_a_fit_finds_what_a_trace_was_drawn_from(cv: float, correlation: float, seed: int) -> None:
    lengths = MarginalLengths(prompt="lognormal:300,1", output="lognormal:50,0.5", correlation=correlation)
    true = Workload(arrivals=Arrivals(rate=8, cv=cv), lengths=lengths)
    trace = true.trace(seed, max_requests=10_000)
    fitted = fit(trace, step_s=1e6)
    assert fitted.arrivals.cv == pytest.approx(cv, rel=0.12)
    found = describe(trace)
    assert found is not None
    one, other = found[0], statistics(fitted, 10_000, seed + 1)
    assert other.mean_rate == pytest.approx(one.mean_rate, rel=0.12)
    assert other.log_correlation == pytest.approx(one.log_correlation, abs=0.04)
    for a, b in ((one.prompt, other.prompt), (one.output, other.output)):
        assert (b.p50, b.p90, b.p99) == pytest.approx((a.p50, a.p90, a.p99), rel=0.12)


def test_a_fit_follows_the_rate_over_time() -> None:
    bursts = [
        TraceRequest(100.0 * burst + 0.01 * index, 10, 10) for burst in range(20) for index in range(200)
    ]
    gamma, stepped = fit(trace_of(bursts), step_s=1e6), fit(trace_of(bursts), step_s=2.0)
    assert gamma.arrivals.cv > 5
    assert stepped.arrivals.cv < 1.5
    drawn = describe(stepped.trace(0, duration_s=1900))
    assert drawn is not None
    assert drawn[0].num_requests == pytest.approx(3800, rel=0.1)
    assert drawn[0].peak[60] == pytest.approx(200, rel=0.2)


def test_too_little_to_fit_is_an_error() -> None:
    with pytest.raises(WorkloadError, match="3 requests over 2 s are too few"):
        fit(trace_of(TraceRequest(float(at), 1, 1) for at in range(3)))
    with pytest.raises(WorkloadError, match="50 requests over 0 s"):
        fit(trace_of([TraceRequest(1.0, 1, 1)] * 50))


def test_a_workload_file_is_read_back_and_a_wrong_one_names_the_place(tmp_path: Path) -> None:
    path = tmp_path / "w.json"
    for workload in (SINGLE, CONVERSATIONS, fit(SINGLE.trace(0, max_requests=500))):
        write_workload(path, workload)
        assert read_workload(path) == workload
    path.write_text(path.read_text().replace('"rate"', '"rat"'))
    with pytest.raises(WorkloadError, match=r"w\.json: arrivals\.rat"):
        read_workload(path)
    with pytest.raises(WorkloadError, match="cannot be read"):
        read_workload(tmp_path / "none")
    with pytest.raises(WorkloadError, match="cannot be written"):
        write_workload(tmp_path / "no folder" / "w.json", SINGLE)
