"""The simulator: its results for cases that can be worked out by hand, and invariants of any case."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tracemalloc
from collections import defaultdict
from itertools import islice, pairwise, repeat

import pytest
from support.simulated import DECODE_S, PREFILL_S, TOKEN_S, cluster, colocated, profile, run, trace

from splitserve.engine.latency_profile import HandoffModel, Memory
from splitserve.planner.errors import SimulationError
from splitserve.planner.simulator.cluster import Cluster, Failure, Pool
from splitserve.planner.simulator.records import RequestRecord
from splitserve.planner.simulator.report import summary
from splitserve.planner.simulator.simulation import Simulation
from splitserve.planner.simulator.slo import Slo, parse_slo
from splitserve.planner.simulator.tallies import Distribution
from splitserve.traces.request import Trace, TraceRequest
from splitserve.transport.handoff import protocol

SECOND = HandoffModel(put_s=0.0, bytes_per_s=1e6, message_s=0.001, check_bytes_per_s=1e12)


def assert_no_block_is_lost(simulation: Simulation) -> None:
    held: dict[int, set[int]] = defaultdict(set)  # two roles of one process have one block manager
    for worker in simulation.workers.values():
        held[id(worker.core.blocks)] |= {block for table in worker.core.block_tables() for block in table}
    for worker in simulation.workers.values():
        assert worker.core.blocks.num_used == len(held[id(worker.core.blocks)])


def test_one_request_takes_what_can_be_added_up() -> None:
    _, (record,) = run(cluster(), [TraceRequest(0.0, 200, 11)])
    step = PREFILL_S + 200 * TOKEN_S
    assert record.ttft_s == pytest.approx(0.001 + step + 0.001)  # to the worker, the step, back
    decode_step = DECODE_S * 1.01
    assert record.tpot_s == pytest.approx(
        decode_step + 0.0001, rel=0.02
    )  # and once two messages of the handoff
    assert (record.num_prompt_tokens, record.num_received, record.outcome) == (200, 11, "finished")


def test_blocks_take_their_time_on_the_link() -> None:
    slow = profile(handoff=SECOND)
    _, (record,) = run(cluster(of=slow), [TraceRequest(0.0, 160, 2)])
    assert record.stages is not None
    assert record.stages.handoff == pytest.approx(10 * 1600 / 1e6 + 0.001, abs=0.002)


def test_a_block_of_which_some_layers_leave_takes_its_time_too() -> None:
    """So large a prompt's blocks leave layer by layer: what is exposed is the last of four slices."""
    exposed, rate, block_bytes = [], 2e8, 320_000
    for slice_s in (0.0, 1e-3):
        slow = profile(
            memory=profile().memory.model_copy(update={"block_bytes": block_bytes}),
            handoff=SECOND.model_copy(update={"slice_s": slice_s, "bytes_per_s": rate}),
        )
        _, records = run(cluster(of=slow), [TraceRequest(float(i), 160, 2) for i in range(3)])
        assert records[-1].stages is not None
        exposed.append(records[-1].stages.handoff)
    assert exposed[0] == pytest.approx(10 * block_bytes / rate / 4 + 0.001, abs=0.002)
    assert exposed[1] - exposed[0] == pytest.approx(10 * 1e-3, abs=0.002)


def test_two_handoffs_share_one_link() -> None:
    slow = profile(handoff=SECOND)
    _, records = run(cluster(prefill=2, of=slow), [TraceRequest(0.0, 160, 2)] * 2)
    exposed = sorted(r.stages.handoff for r in records if r.stages)
    assert exposed[1] - exposed[0] == pytest.approx(0.016, abs=0.003)


def test_a_queue_builds_up_where_more_arrives_than_is_computed() -> None:
    requests = [TraceRequest(0.01 * i, 500, 1) for i in range(60)]
    _, few = run(cluster(prefill=1), requests)
    _, many = run(cluster(prefill=4), requests)
    assert max(r.ttft_s for r in few) > 2.0 > 1.5 > max(r.ttft_s for r in many)


def test_equal_block_hashes_are_computed_once() -> None:
    shared = tuple(range(1, 11))
    requests = [TraceRequest(float(i), 170, 2, (*shared, 100 + i)) for i in range(4)]
    simulation, records = run(cluster(), requests, block_size=16)
    assert [r.num_cached_tokens for r in records] == [0, 160, 160, 160]
    assert records[1].ttft_s < records[0].ttft_s
    assert_no_block_is_lost(simulation)


PROMPT_STEP_S, TOKEN_STEP_S = PREFILL_S + 400 * TOKEN_S, DECODE_S * 1.01


def test_a_sequence_on_a_colocated_worker_waits_for_one_step_of_prompts_between_two_tokens() -> None:
    """What every step costs, whatever is in it, is paid once."""
    between_s = PROMPT_STEP_S + TOKEN_STEP_S - DECODE_S
    talk = [TraceRequest(0.0, 50, 60), *(TraceRequest(0.2, 400, 1) for _ in range(10))]
    simulation, records = run(colocated(max_batch_tokens=401), talk)
    firsts = sorted(r.ttft_s for r in records[1:])
    assert [later - earlier for earlier, later in pairwise(firsts)] == pytest.approx(
        [between_s] * 9, rel=0.01
    )
    gaps = simulation.tallies.of["gap"]
    assert gaps.percentile(100) == pytest.approx(between_s, rel=0.01)
    assert gaps.percentile(50) == pytest.approx(TOKEN_STEP_S, rel=0.01)
    assert summary(simulation)["pools"][0]["busy_prefill"] * simulation.elapsed_s == pytest.approx(
        10 * between_s + PREFILL_S + 50 * TOKEN_S, rel=0.01
    )
    assert_no_block_is_lost(simulation)


def test_a_colocated_worker_hands_to_itself_what_its_one_cache_has() -> None:
    """Nothing goes over the link, and a follow-up turn finds what was generated, too."""
    hashes = tuple(range(1, 8))
    first, second = TraceRequest(0.0, 48, 65, hashes[:3]), TraceRequest(3.0, 113, 2, hashes)
    simulation, records = run(colocated(), [first, second], block_size=16)
    assert [r.num_cached_tokens for r in records] == [
        0,
        48,
    ]  # the trace cannot know the tokens that are generated here
    assert sum(machine.num_bytes_out for machine in simulation.machines) == 0
    managers = {id(worker.core.blocks) for worker in simulation.workers.values()}
    assert len(managers) == 1
    assert_no_block_is_lost(simulation)


def test_prefill_workers_compute_what_a_colocated_one_has_no_time_for() -> None:
    talk = [TraceRequest(0.02 * i, 300, 30) for i in range(40)]
    simulation, records = run(colocated(2, prefill=1), talk)
    computed = {
        name: worker.core.load().counters["output_tokens"]
        for name, worker in simulation.workers.items()
        if worker.role == "prefill"
    }
    assert all(computed.values()), computed
    assert sum(computed.values()) == 40
    assert {r.num_received for r in records} == {30}
    out = {machine.name: machine.num_bytes_out for machine in simulation.machines}
    assert out["prefill-0-0"] > 0 == out["colocated-1-0"]
    assert_no_block_is_lost(simulation)


def test_clusters_that_could_serve_nothing_are_refused() -> None:
    of = profile()
    with pytest.raises(ValueError, match="decode workers need prefill workers too"):
        Cluster(pools=(Pool(role="colocated", count=1, profile=of), Pool(role="decode", count=1, profile=of)))


def test_a_worker_that_dies_loses_no_request() -> None:
    requests = [TraceRequest(0.02 * i, 100, 30) for i in range(50)]
    plan = cluster(
        2, 2, failures=(Failure(worker="decode-1-0", at_s=0.5), Failure(worker="prefill-0-1", at_s=0.6))
    )
    simulation, records = run(plan, requests)
    assert {r.outcome for r in records} == {"finished"}
    assert all(r.num_received == 30 for r in records)
    assert simulation.num_killed == 2
    assert max(r.num_dispatches for r in records) > 1


def test_failures_as_they_come_are_survived_too() -> None:
    requests = [TraceRequest(0.05 * i, 100, 20) for i in range(100)]
    simulation, records = run(cluster(3, 3, mean_seconds_between_failures=4.0), requests, seed=3)
    assert simulation.num_killed > 2
    assert {r.outcome for r in records} == {"finished"}


def test_what_cannot_end_is_said() -> None:
    with pytest.raises(SimulationError, match="no requests"):
        Simulation(cluster()).run(trace([]))
    with pytest.raises(SimulationError, match="no worker decode-7"):
        Simulation(cluster(failures=(Failure(worker="decode-7", at_s=1.0),)))


def many_things_at_once(seed: int) -> str:
    requests = [
        TraceRequest(0.013 * i, 50 + 37 * i % 400, 1 + 7 * i % 30, session=str(i % 5)) for i in range(80)
    ]
    plan = cluster(2, 3, profile(noise_cv=0.2), mean_seconds_between_failures=3.0)
    simulation, records = run(plan, requests, seed=seed)
    return f"{[r.row() for r in records]} {simulation.queue.num_events}"


def test_a_seed_gives_the_same_bits_in_every_process() -> None:
    program = (
        "import sys; sys.path.insert(0, 'tests'); from planner.test_simulator import *; "
        "print(many_things_at_once(1))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "77"}
    elsewhere = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=env
    ).stdout
    assert many_things_at_once(1) == elsewhere.strip()
    assert many_things_at_once(1) != many_things_at_once(2)


def test_memory_does_not_grow_with_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MEMORY_OF_PAST", 50)  # else it is full only after as many requests

    def requests(count: int) -> Trace:
        return Trace(
            "long", lambda: islice((TraceRequest(0.1 * i, 40, 3) for i, _ in enumerate(repeat(0))), count)
        )

    def held(count: int) -> int:
        """Return the bytes in use when the simulation is nearly over."""
        of = profile(
            memory=Memory(block_size=16, num_blocks=64, block_bytes=16, num_layers=4, max_model_len=512)
        )
        sizes: list[int] = []

        def look(record: RequestRecord) -> None:
            if record.number == count - 5:
                gc.collect()  # the interpreter's lists of free objects, too
                sizes.append(tracemalloc.get_traced_memory()[0])

        gc.collect()
        tracemalloc.start()
        Simulation(cluster(of=of), on_record=look).run(requests(count))
        tracemalloc.stop()
        return sizes[0]

    held(20)  # caches
    assert held(270) < 1.1 * held(90)


def test_percentiles_are_as_exact_as_promised() -> None:
    found = Distribution()
    for i in range(1, 1001):
        found.add(i / 1000)
    for percent in (1, 50, 90, 99, 100):
        assert found.percentile(percent) == pytest.approx(percent / 100, rel=0.01)
    assert found.mean == pytest.approx(0.5005)


def test_a_good_request_meets_all_bounds_at_once() -> None:
    level = parse_slo("ttft=0.5@p90,tpot=0.05@p95")
    assert (level.bounds, level.attainment) == (Slo(0.5, 0.05, None), 0.95)
    record = RequestRecord(
        0, 0.0, 10.0, 5, 3, num_received=3, first_at=10.4, ended_at=10.49, outcome="finished"
    )
    assert level.bounds.met_by(record)
    record.ended_at = 10.51
    assert not level.bounds.met_by(record)
    with pytest.raises(SimulationError, match="twice"):
        parse_slo("ttft=1,ttft=2")
