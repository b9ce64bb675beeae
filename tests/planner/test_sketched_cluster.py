"""``simulate --sketch``: near the simulator's results, for clusters that a sketch can describe, and for no
others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from planner.test_simulate_command import write_trace
from pydantic import ValidationError
from support.simulated import cluster, profile, run, trace

from splitserve.bench.studies.simulator_speed import LENGTHS, PROFILE, cluster_of
from splitserve.engine.latency_profile import Piece, Profile, StepModel
from splitserve.planner.errors import SimulationError
from splitserve.planner.search.step_times import StepTimes
from splitserve.planner.settings import SimulateSettings
from splitserve.planner.simulate_command import simulate
from splitserve.planner.simulator.cluster import Cluster, Failure, Pool, PoolRole
from splitserve.planner.simulator.records import RequestRecord
from splitserve.planner.simulator.simulation import Simulation
from splitserve.planner.simulator.slo import Slo
from splitserve.planner.sketched_cluster import sketched
from splitserve.traces.request import TraceRequest
from splitserve.traces.workload.arrivals import Arrivals
from splitserve.traces.workload.workload import Workload


def test_the_command_sketches_where_it_is_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile().write(tmp_path / "p.json")
    given = {
        "trace": write_trace(tmp_path / "t.jsonl"),
        "profile": tmp_path / "p.json",
        "prefill": 1,
        "decode": 2,
        "slo": "ttft=0.2@p90",
    }
    assert simulate(SimulateSettings(**given, json_file=tmp_path / "s.json")) == 0
    assert simulate(SimulateSettings(**given, json_file=tmp_path / "k.json", sketch=True)) == 0
    simulated, sketch = (json.loads((tmp_path / name).read_text()) for name in ("s.json", "k.json"))
    assert sketch["sketched"]
    assert sketch.keys() - {"sketched"} <= simulated.keys()
    assert sketch["requests"] == simulated["requests"]
    assert (sketch["arrivals_s"], sketch["offered_per_s"]) == (
        simulated["arrivals_s"],
        simulated["offered_per_s"],
    )
    assert sketch["latency_s"].keys() == {"ttft", "tpot", "e2e"}
    for name, values in sketch["latency_s"].items():
        assert values == pytest.approx(simulated["latency_s"][name], rel=0.1)
    for ours, theirs in zip(sketch["pools"], simulated["pools"], strict=True):
        assert [ours[name] for name in ("role", "count", "profile")] == [
            theirs[name] for name in ("role", "count", "profile")
        ]
        busy = ("busy", "busy_prefill", "busy_decode")
        assert [ours[name] for name in busy] == pytest.approx([theirs[name] for name in busy], rel=0.1)
    message = " ".join(capsys.readouterr().out.split())
    assert "Sketched: the coordinator decides as live" in message
    assert "sketched requests a second of processor time" in message


def test_a_sketch_sees_a_pools_own_memory_and_link() -> None:
    requests = trace(TraceRequest(0.05 * i, 300, 20) for i in range(60))
    pools = [
        Pool(role="prefill", count=2, profile=profile()),
        Pool(role="decode", count=1, profile=profile()),
    ]
    plain, slow, slow_to_arrive, small = (
        sketched(
            Cluster(pools=(pools[0].model_copy(update=of_prefill), pools[1].model_copy(update=of_decode))),
            requests,
            Slo(),
        )
        for of_prefill, of_decode in (
            ({}, {}),
            ({"link_bytes_per_s": 1e5}, {}),
            ({}, {"link_bytes_per_s": 1e5}),
            ({}, {"num_blocks": 40}),
        )
    )
    assert min(slow.e2e_s) > min(plain.e2e_s) + 0.2  # 30 kB at 100 kB/s
    assert slow_to_arrive.e2e_s == slow.e2e_s
    assert max(small.ttft_s) > 2 * max(plain.ttft_s)  # two prompts fit in


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"steer": True}, "--steer"),
        ({"records": Path("r.csv")}, "--records"),
        ({"html_file": Path("t.html")}, "--html-file"),
    ],
)
def test_what_a_sketch_does_not_know_is_refused(given: dict[str, Any], flag: str) -> None:
    with pytest.raises(ValidationError, match=f"{flag}.* means nothing to --sketch"):
        SimulateSettings(
            trace=Path("t.jsonl"), profile=Path("p.json"), prefill=1, decode=1, sketch=True, **given
        )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"failures": (Failure(worker="decode-1-0", at_s=1.0),)}, "failures"),
        ({"workers_per_host": 2}, "workers_per_host"),
        ({"routing": "sticky"}, "routing: sticky"),
    ],
)
def test_what_a_sketch_does_not_know_of_a_cluster_is_refused(changes: dict[str, Any], what: str) -> None:
    with pytest.raises(SimulationError, match=f"a sketch knows nothing of {what}"):
        sketched(cluster(**changes), trace([TraceRequest(0.0, 10, 5)]), Slo())


def test_a_sketch_sees_how_long_a_request_takes_to_come_in() -> None:
    requests = trace(TraceRequest(0.5 * i, 300, 20) for i in range(10))
    quick, slow = (
        sketched(cluster().model_copy(update={"coordinator_s": s}), requests, Slo()) for s in (0.0, 0.2)
    )
    assert [b - a for a, b in zip(quick.ttft_s, slow.ttft_s, strict=True)] == pytest.approx([0.2] * 10)


SEVERAL = (Piece(below=9, curve=((2, 0.01), (5, 0.02), (8, 0.02)), read_s=1e-6), Piece(curve=((4, 0.03),)))
"""A curve that is followed beyond both its ends, then a constant."""


@pytest.mark.parametrize(
    "of",
    [
        profile(),
        Profile.read(Path("llama2-70b-h100x8")),
        profile(prefill=StepModel(pieces=SEVERAL), decode=StepModel(pieces=SEVERAL[::-1])),
    ],
    ids=["one piece", "published", "several pieces"],
)
def test_a_sketchs_tables_have_the_times_of_the_profile(of: Profile) -> None:
    times = StepTimes(of, 40, 20)
    for n in range(41):
        assert times.prompts_s(n, 0, 0, 0) == of.prefill.seconds(n, 0, 0) + of.prefill_loop_s
    for n in range(21):
        expected = of.decode.seconds(n, 3000, n) + of.decode_loop_s
        assert times.decode_s(n, 3000) == pytest.approx(expected, rel=1e-9)


def of_pools(*pools: Pool) -> Cluster:
    return Cluster(pools=pools, max_queue=1 << 30)


def split(prefill: int, decode: int, rows: int = 256, **changes: Any) -> Cluster:
    prefills = Pool(role="prefill", count=prefill, profile=PROFILE, max_batch_tokens=2048)
    decodes = Pool(role="decode", count=decode, profile=PROFILE, max_num_seqs=rows)
    return of_pools(prefills, decodes.model_copy(update=changes))


MIXED = Pool(role="colocated", count=4, profile=PROFILE)
CASES: dict[str, tuple[Cluster, str, float, int]] = {  # kind of load, its rate a worker, requests
    "code": (cluster_of("code", 8), "code", 3.6, 120),
    "conversations": (cluster_of("conversation", 8), "conversation", 3.2, 80),
    "too much": (cluster_of("code", 8), "code", 9.0, 160),
    "one prefill worker": (split(1, 3), "conversation", 3.2, 100),
    "few rows": (split(3, 5, rows=8), "conversation", 3.2, 100),
    "a slow link": (split(3, 5, link_bytes_per_s=5e9), "conversation", 3.2, 80),
    "puts that outlast their step": (split(1, 5, rows=4, link_bytes_per_s=5.5e9), "code", 1.0, 60),
    "few blocks": (split(3, 5, num_blocks=100), "conversation", 3.2, 80),
    "few blocks for prompts": (
        of_pools(
            Pool(role="prefill", count=3, profile=PROFILE, max_batch_tokens=2048, num_blocks=150),
            split(3, 5).pools[1],
        ),
        "conversation",
        3.2,
        100,
    ),
    "colocated": (of_pools(MIXED), "conversation", 2.0, 60),
    "fewer blocks for both": (
        of_pools(MIXED.model_copy(update={"num_blocks": 1500})),
        "conversation",
        2.0,
        60,
    ),
    "few blocks for both": (of_pools(MIXED.model_copy(update={"num_blocks": 300})), "conversation", 4.0, 80),
    "both kinds": (of_pools(split(2, 1).pools[0], MIXED), "conversation", 2.0, 80),
    "100 workers": (cluster_of("code", 100), "code", 3.6, 150),
}
FEW = [name for name in CASES if name.startswith("few")]
"""Those with the decisions that are hardest to follow have a second load."""


@pytest.mark.parametrize(("name", "seed"), [*((name, 0) for name in CASES), *((name, 1) for name in FEW)])
def test_each_requests_times_are_the_simulators(name: str, seed: int) -> None:
    """In the order in which they end, by number where they end together; so each decision was the same."""
    cluster, kind, rate, count = CASES[name]
    arrivals = Arrivals(rate=rate * cluster.num_workers)
    workload = Workload(arrivals=arrivals, lengths=LENGTHS[kind], sessions=None)
    requests = workload.trace(seed, max_requests=count)
    records: list[RequestRecord] = []
    Simulation(cluster, on_record=records.append).run(requests)
    finished = [record for record in records if record.finished]
    finished.sort(key=lambda record: (round(record.ended_at, 6), record.number))
    found, some_return = sketched(cluster, requests, Slo()), any(r.num_dispatches > 1 for r in records)
    assert found.num_ended == len(records) == count
    assert some_return == (name == "few blocks")
    off_s = 1e-3 if some_return else 1e-6  # to blocks that their worker has cached, and a sketch sends
    assert found.ttft_s == pytest.approx([record.ttft_s for record in finished], abs=off_s)
    assert found.tpot_s == pytest.approx([record.tpot_s or 0.0 for record in finished], abs=off_s)
    assert found.e2e_s == pytest.approx([record.e2e_s for record in finished], abs=off_s)


def test_a_sequence_without_a_block_is_computed_anew() -> None:
    """Every request ends, as in the simulator, and in about the same time."""
    few = cluster(
        of=profile().model_copy(update={"memory": profile().memory.model_copy(update={"num_blocks": 40})})
    )
    requests = [TraceRequest(0.02 * i, 100, 120) for i in range(12)]
    _, records = run(few, requests)
    found = sketched(few, trace(requests), Slo())
    assert any(record.num_dispatches > 1 for record in records)
    assert len(found.e2e_s) == len(requests) == sum(record.finished for record in records)
    assert max(found.e2e_s) == pytest.approx(max(record.e2e_s for record in records), rel=0.2)


def tight(
    role: PoolRole, count: int, num_blocks: int, rows: int = 64, budget: int = 2048, link: float = 2e11
) -> Pool:
    return Pool(
        role=role, count=count, profile=PROFILE, num_blocks=num_blocks, max_num_seqs=rows,
        max_batch_tokens=budget, link_bytes_per_s=link,
    )  # fmt: skip


TIGHT = {  # pools, kind of load, its rate a worker, seed, requests
    "a prompt starves for blocks": (
        [tight("prefill", 1, 150, 16, 256, 1e9), tight("decode", 3, 150, 16, 256, 1e9)], "code", 6.0, 0, 80,
    ),
    "one place crowds out others": (
        [tight("prefill", 1, 100, link=3e9), tight("decode", 4, 2000, 16, link=3e9)],
        "conversation", 5.0, 0, 80,
    ),
    "both roles of a worker report": (
        [tight("prefill", 1, 100, 4, 256), tight("colocated", 3, 100, 4, 256)], "code", 6.0, 3, 40,
    ),
    "a mover is tested with a block": (
        [tight("prefill", 2, 150), tight("decode", 4, 150, 4, link=1e9)], "code", 3.0, 105, 40,
    ),
    "an answer that would outgrow its worker": (
        [tight("colocated", 2, 150, 4)], "conversation", 0.3, 95, 120,
    ),
    "links differ": (
        [tight("prefill", 1, 400), tight("decode", 4, 300, 16, link=3e9), tight("colocated", 1, 400)],
        "conversation", 0.3, 18, 80,
    ),
    "a prompt as large as its worker": (
        [tight("prefill", 4, 100, 64), tight("decode", 1, 100, 64)], "code", 3.0, 12, 80,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TIGHT)
def test_where_blocks_are_few_the_times_are_the_simulators_too(name: str) -> None:
    pools, kind, rate, seed, count = TIGHT[name]
    arrivals = Arrivals(rate=rate * sum(pool.count for pool in pools))
    workload = Workload(arrivals=arrivals, lengths=LENGTHS[kind], sessions=None)
    requests, records = workload.trace(seed, max_requests=count), list[RequestRecord]()
    Simulation(of_pools(*pools), on_record=records.append).run(requests)
    found = sketched(of_pools(*pools), requests, Slo())
    assert found.is_exact
    finished = [record for record in records if record.finished]
    assert sorted(found.e2e_s) == pytest.approx(sorted(r.e2e_s for r in finished), abs=1e-6)
    assert sorted(found.ttft_s) == pytest.approx(sorted(r.ttft_s for r in finished), abs=1e-6)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("roles", [("colocated",), ("prefill", "decode")])
def test_requests_of_one_instant_all_end_where_messages_take_no_time(roles: tuple[PoolRole, ...]) -> None:
    """Such are the profiles from splitwise-sim and DistServe, and traces whose clock is coarse."""
    of = Profile.read(Path("llama2-70b-h100x8"))
    assert of.handoff.message_s == 0
    pools = [Pool(role=role, count=2, profile=of) for role in roles]
    requests, records = trace(TraceRequest(float(i // 10), 500, 50) for i in range(60)), list[RequestRecord]()
    Simulation(of_pools(*pools), on_record=records.append).run(requests)
    found = sketched(of_pools(*pools), requests, Slo())
    assert found.num_ended == len(records) == 60
    assert sorted(found.ttft_s) == pytest.approx(sorted(r.ttft_s for r in records), abs=2e-4)
    assert sorted(found.e2e_s) == pytest.approx(sorted(r.e2e_s for r in records), abs=2e-4)


def test_a_sketch_says_that_a_transfer_took_too_long_for_it() -> None:
    """The live workers give such a handoff up."""
    pools = tight("prefill", 1, 400), tight("decode", 2, 400, link=1e7)
    found = sketched(of_pools(*pools), trace(TraceRequest(5.0 * i, 300, 20) for i in range(8)), Slo())
    assert not found.is_exact
