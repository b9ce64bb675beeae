"""What the live validation calls a miss, and how long its workloads last."""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import pytest

from splitserve.bench.handoff.live_pace import LivePace, processor_times, stolen_share
from splitserve.bench.studies import validate_live
from splitserve.bench.studies.live_errors import LATE_S, late, simulated
from splitserve.bench.studies.live_workloads import limited
from splitserve.bench.studies.validate_live import BOUNDS, PACED, missed, parsed, simulated_cluster, validated
from splitserve.engine.latency_profile import Contention
from splitserve.engine.step_log import LoggedStep
from splitserve.loadgen.report import Sample
from splitserve.loadgen.settings import LoadSettings
from splitserve.loadgen.workload import planned_requests
from splitserve.traces.readers import open_trace
from splitserve.traces.request import Trace, TraceRequest


def result(ttft_p99: float, runner: str) -> dict[str, Any]:
    errors = {
        "ttft": {"p50": 0.04, "p90": -0.049, "p99": ttft_p99},
        "e2e": {"p50": 0.0, "p90": 0.0, "p99": 0.0},
    }
    when_late = {name: dict.fromkeys(of_name, (-0.07, 0.02)) for name, of_name in errors.items()}
    return {"bounds": BOUNDS[runner], "workloads": {"code": {"error": errors, "error_when_late": when_late}}}


def test_a_percentile_that_is_further_off_than_allowed_is_named() -> None:
    found = {"2P2D": result(0.03, "paced"), "4P4D": result(-0.12, "paced")}
    late = "-7.0% to +2.0% with arrivals up to 2 ms late"
    assert list(missed(found, "error")) == [f"4P4D, code: ttft p99 is off by -12.0% ({late}), 5% are allowed"]
    assert not list(missed({"1P1D": result(-0.12, "model")}, "error"))


def test_late_arrivals_are_the_same_requests_a_little_later(tmp_path: Path) -> None:
    options = {
        "prefill": 1,
        "decode": 1,
        "mixed": 0,
        "max_batch_tokens": 512,
        "max_num_seqs": 64,
        "traces": None,
    }
    arguments = argparse.Namespace(**options, requests=40, seconds=0.0, load=0.7)
    trace = open_trace(limited(arguments, PACED, "conversation", tmp_path))
    once, again, otherwise = (list(late(trace, seed)) for seed in (1, 1, 2))
    assert once == again != otherwise
    assert sorted(r.num_prompt_tokens for r in once) == sorted(r.num_prompt_tokens for r in trace)
    on_time = sorted(r.arrival_s for r in trace)
    assert all(0 <= moved.arrival_s - at <= LATE_S for moved, at in zip(once, on_time, strict=True))


def test_a_workload_lasts_as_long_as_asked_however_large_the_cluster(tmp_path: Path) -> None:
    lasting = []
    for workers in (1, 4):
        options = {
            "prefill": workers,
            "decode": workers,
            "mixed": 0,
            "max_batch_tokens": 512,
            "max_num_seqs": 64,
            "traces": None,
        }
        arguments = argparse.Namespace(**options, requests=50, seconds=120.0, load=0.7)
        requests = list(open_trace(limited(arguments, PACED, "conversation", tmp_path)))
        lasting.append((len(requests), requests[-1].arrival_s - requests[0].arrival_s))
    (few, short), (many, long) = lasting
    assert many > 3 * few > 150
    assert abs(short - 120) < 20
    assert abs(long - 120) < 20


def test_a_mixed_worker_is_held_against_a_colocated_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["validate_live", "--clusters", "6P2D", "1M", "1P2M", "--requests", "30"])
    arguments = parsed()
    assert arguments.clusters == {"6P2D": (6, 2, 0), "1M": (0, 0, 1), "1P2M": (1, 0, 2)}
    arguments.prefill, arguments.decode, arguments.mixed = arguments.clusters["1M"]
    cluster = simulated_cluster(arguments, PACED, 0.0)
    assert [(pool.role, pool.count) for pool in cluster.pools] == [("colocated", 1)]
    records = simulated(cluster, open_trace(limited(arguments, PACED, "code", tmp_path)))
    assert len(records) == 30
    monkeypatch.setattr("sys.argv", ["validate_live", "--clusters", "2D1X"])
    with pytest.raises(SystemExit):
        parsed()


def test_nothing_of_a_replay_is_cached_from_the_replays_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calibration, workloads and repeats go to the same cluster; the simulated one begins with empty caches
    each time."""
    prompts: list[tuple[int, ...]] = []

    async def seen(settings: LoadSettings) -> tuple[list[Sample], float]:
        requests = planned_requests(settings)
        prompts.extend(tuple(request.prompt[:16]) for request in requests)
        return [Sample(0.0, 2.0, [1.0, 2.0], num_output_tokens=2) for _ in requests], 2.0

    monkeypatch.setattr(validate_live, "generate_load", seen)
    # measuring them takes ten seconds; tests/planner/test_profile_measuring.py does
    monkeypatch.setattr(validate_live, "measure_movers", lambda *_: {"shm": PACED.handoff})
    monkeypatch.setattr(validate_live, "live_cluster", lambda *_: contextlib.nullcontext("http://nowhere"))
    monkeypatch.setattr(
        "sys.argv", ["validate_live", "--requests", "20", "--workloads", "even", "code", "--repeats", "2"]
    )
    arguments = parsed()
    arguments.prefill, arguments.decode, arguments.mixed = arguments.clusters["2P2D"]
    found = validated(arguments)
    assert len(prompts) == 3 * 7 + 2 * 2 * 20
    assert len(set(prompts)) == len(prompts)
    assert len(found["workloads"]["code"]["live_runs"]) == 2


def test_what_the_hypervisor_gave_to_others_is_a_share_of_what_was_wanted() -> None:
    assert stolen_share([10, 0, 5, 100, 0, 0, 0, 1], [60, 5, 10, 900, 9, 3, 2, 36]) == pytest.approx(35 / 100)
    assert stolen_share([1] * 8, [1] * 8) == 0.0
    assert len(processor_times()) == 8


def test_told_how_fast_the_machine_was_the_simulator_has_its_steps_take_as_long() -> None:
    profile = PACED.model_copy(update={"noise_cv": 0.1, "contention": Contention(decode_beside_prefill=2.0)})
    chunk, row = profile.prefill.seconds(64, 64 * 65 // 2, 1), profile.decode.seconds(1, 64, 1)
    steps = [LoggedStep(100.0 + at, 2 * chunk, "0+64", 0, 0) for at in (1.0, 2.0)]
    steps += [
        LoggedStep(100.0 + at, factor * row, "", 1, 64)
        for at, factor in ((-3.0, 9.0), (0.5, 1.0), (1.5, 2.0), (6.0, 3.0))
    ]
    pace = LivePace(steps, profile, 100.0)
    assert [round(pace("decode", at), 6) for at in (0.0, 1.9, 5.0, 60.0)] == [1.5, 1.5, 3.0, 3.0], (
        "what was before the run does not count"
    )
    assert pace("prefill", 7.0) == pytest.approx(2.0)
    assert pace.summary()["decode"]["mean"] == pytest.approx(2.0)
    assert LivePace([], profile, 100.0)("decode", 1.0) == 1.0
    arguments = argparse.Namespace(
        prefill=1, decode=1, mixed=0, max_batch_tokens=512, max_num_seqs=64, runner="model"
    )
    trace = Trace("one", lambda: iter([TraceRequest(0.0, 64, 21), TraceRequest(20.0, 64, 21)]))
    early, later = simulated(simulated_cluster(arguments, profile, 0.0), trace, pace)
    assert early.ttft_s == pytest.approx(2 * chunk, rel=0.02)
    assert early.tpot_s == pytest.approx(1.5 * row, rel=0.03)
    assert later.tpot_s == pytest.approx(3.0 * row, rel=0.03)


@pytest.mark.parametrize(("runner", "workers_per_host"), [("model", 5), ("paced", 1)])
def test_workers_that_compute_share_this_machine_and_paced_ones_do_not_slow_each_other(
    runner: str, workers_per_host: int
) -> None:
    options = {"prefill": 2, "decode": 2, "mixed": 1, "max_batch_tokens": 512, "max_num_seqs": 64}
    assert (
        simulated_cluster(argparse.Namespace(**options, runner=runner), PACED, 0.0).workers_per_host
        == workers_per_host
    )
