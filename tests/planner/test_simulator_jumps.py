"""Virtual time that passes over layers and idle heartbeats gives what looking at each of them gives, to the
last bit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.test_flips_simulated import AtRandom
from planner.test_simulator import assert_no_block_is_lost
from support.simulated import cluster, colocated, profile, trace

from splitserve.engine.latency_profile import Contention, HandoffModel, Memory
from splitserve.planner.simulator.cluster import Cluster, Failure, Pool
from splitserve.planner.simulator.records import RequestRecord
from splitserve.planner.simulator.report import summary
from splitserve.planner.simulator.simulation import Simulation
from splitserve.traces.request import TraceRequest

UNEVEN = profile(noise_cv=0.02)
"""Two workers' steps never end at the same instant: jumps may only change which of the two is reported
first."""
SMALL = Memory(block_size=16, num_blocks=48, block_bytes=1600, num_layers=4, max_model_len=512)
LAYERED = profile(
    memory=Memory(block_size=16, num_blocks=400, block_bytes=1 << 24, num_layers=40, max_model_len=512),
    handoff=HandoffModel(put_s=1e-4, bytes_per_s=1e10, message_s=1e-3),
    noise_cv=0.02,
)
"""Its chunks leave in many slices, of which there are fewer once it has been seen how fast the link is."""
BESIDE = Contention(
    prefill_beside_prefill=1.1, prefill_beside_decode=1.3, decode_beside_prefill=1.9, decode_beside_decode=1.2
)
CONTENDED = LAYERED.model_copy(update={"contention": BESIDE})
SMALL_LAYERED = LAYERED.memory.model_copy(update={"num_blocks": 48})


def talk(count: int = 60, every_s: float = 0.0131) -> list[TraceRequest]:
    return [
        TraceRequest(every_s * i, 20 + 37 * i % 300, 1 + 7 * i % 61, session=str(i % 5)) for i in range(count)
    ]


def cached_talk() -> list[TraceRequest]:
    hashes = [tuple(range(1, 3 + i % 7)) for i in range(40)]
    return [TraceRequest(0.05 * i, 16 * len(h) + 5, 40 + i % 9, h) for i, h in enumerate(hashes)]


def outcome(
    of: Cluster, requests: Iterable[TraceRequest], jumps: bool, **options: Any
) -> tuple[Simulation, list[object]]:
    records: list[RequestRecord] = []
    seed = options.pop("seed", 5)
    simulation = Simulation(of, seed, on_record=records.append, jumps=jumps, **options)
    simulation.run(trace(requests, 16))
    assert_no_block_is_lost(simulation)
    return simulation, [summary(simulation), *(r.row() for r in records)]


CASES = {
    "plain": (cluster(2, 3), talk()),
    "noise": (cluster(2, 3, profile(noise_cv=0.3)), talk()),
    "no room for all": (cluster(1, 1, profile(memory=SMALL, noise_cv=0.02)), talk(every_s=0.002)),
    "prefixes": (cluster(1, 2), cached_talk()),
    "deaths": (
        cluster(
            2,
            2,
            UNEVEN,
            failures=(Failure(worker="decode-1-0", at_s=0.51), Failure(worker="prefill-0-1", at_s=0.61)),
        ),
        talk(),
    ),
    "deaths at any time": (cluster(3, 3, UNEVEN, mean_seconds_between_failures=2.0), talk(100)),
    "colocated": (colocated(2, of=UNEVEN), talk()),
    "colocated, no room for all": (
        colocated(2, of=profile(memory=SMALL, noise_cv=0.02)),
        talk(every_s=0.002),
    ),
    "colocated, prefixes": (colocated(2, of=UNEVEN), cached_talk()),
    "colocated beside prefill workers": (colocated(2, prefill=1, of=UNEVEN), talk()),
    "colocated, deaths at any time": (
        colocated(3, of=UNEVEN).model_copy(update={"mean_seconds_between_failures": 2.0}),
        talk(),
    ),
    "pauses": (cluster(2, 2, UNEVEN, mean_seconds_between_failures=9.0), talk(40, every_s=1.7)),
    "colocated, pauses": (colocated(2, of=UNEVEN), talk(40, every_s=1.7)),
    "layers": (cluster(2, 3, LAYERED), talk()),
    "layers, deaths at any time": (cluster(3, 3, LAYERED, mean_seconds_between_failures=2.0), talk(100)),
    "layers, no room for all": (
        cluster(2, 1, LAYERED.model_copy(update={"memory": SMALL_LAYERED})),
        talk(every_s=0.002),
    ),
    "on one host": (cluster(2, 3, CONTENDED, workers_per_host=5), talk()),
    "two on a host, deaths at any time": (
        cluster(3, 3, CONTENDED, workers_per_host=2, mean_seconds_between_failures=2.0),
        talk(100),
    ),
    "colocated on one host": (
        colocated(2, prefill=1, of=CONTENDED).model_copy(update={"workers_per_host": 3}),
        talk(),
    ),
    "out of time": (
        cluster(1, 2, UNEVEN, request_timeout_s=1.7),
        [TraceRequest(0.3 * i, 30, 400) for i in range(6)],
    ),
    "long answers": (cluster(1, 2), [TraceRequest(0.3 * i, 30, 400) for i in range(6)]),
}
FEWER_EVENTS = {"layers": 0.97, "pauses": 0.95}
"""At most such a share of those of the stepped run."""


@pytest.mark.parametrize("case", CASES)
def test_jumps_land_where_steps_do(case: str) -> None:
    of, requests = CASES[case]
    jumped, there = outcome(of, requests, True)
    stepped, step_by_step = outcome(of, requests, False)
    assert there == step_by_step
    if case in FEWER_EVENTS:
        assert jumped.queue.num_events < FEWER_EVENTS[case] * stepped.queue.num_events
    if case == "no room for all":
        assert any(worker.core.load().counters.get("preemptions") for worker in jumped.workers.values())


def test_what_is_sampled_on_the_way_is_the_same_too() -> None:
    timelines = [
        outcome(cluster(1, 2), talk(), jumps, sample_s=0.1)[0].timeline.samples for jumps in (True, False)
    ]
    assert timelines[0] == timelines[1]


# --- whatever the cluster and the load ---------------------------------------------------------------


@st.composite
def clusters(draw: st.DrawFn) -> tuple[Cluster, bool]:
    """And whether its workers change their roles. Some noise there always is: see ``UNEVEN``."""
    worker = profile(
        memory=draw(st.sampled_from([SMALL, profile().memory, LAYERED.memory])),
        handoff=draw(st.sampled_from([profile().handoff, LAYERED.handoff])),
        noise_cv=draw(st.sampled_from([0.01, 0.1, 0.4])),
        prefill_loop_s=draw(st.sampled_from([0.0, 3e-4])),
        decode_loop_s=draw(st.sampled_from([0.0, 5e-4])),
        start_s=0.2,
        flip_s=0.05,
    )
    options = {
        "profile": worker,
        "max_batch_tokens": draw(st.sampled_from([64, 512])),
        "max_num_seqs": draw(st.sampled_from([2, 8, 64])),
    }
    kind = draw(st.sampled_from(["split", "flexible", "colocated", "beside prefill", "beside both"]))
    count = st.integers(1, 3)
    pools = []
    if kind != "colocated":
        pools.append(Pool(role="prefill", count=draw(count), flexible=kind == "flexible", **options))
    if kind in ("split", "flexible", "beside both"):
        pools.append(Pool(role="decode", count=draw(count), flexible=kind == "flexible", **options))
    if kind not in ("split", "flexible"):
        pools.append(Pool(role="colocated", count=draw(count), **options))
    names = [f"{pool.role}-{i}-{n}" for i, pool in enumerate(pools) for n in range(pool.count)]
    deaths = st.builds(Failure, worker=st.sampled_from(names), at_s=st.floats(0.013, 2.0))
    made = Cluster(
        pools=tuple(pools),
        coordinator_s=draw(st.sampled_from([0.0, 1e-3])),
        max_queue=draw(st.sampled_from([4, 1024])),
        request_timeout_s=draw(st.sampled_from([1.7, 60.0])),
        failures=tuple(draw(st.lists(deaths, max_size=2))),
    )
    return made, kind == "flexible"


@st.composite
def loads(draw: st.DrawFn) -> list[TraceRequest]:
    """One after another, or all at once; some begin with the same blocks, some are turns of one session."""
    gaps = st.sampled_from([0.0, 0.0031, 0.0477, 0.301])
    found, now = list[TraceRequest](), 0.0
    for _ in range(draw(st.integers(1, 24))):
        now += draw(gaps)
        shared = tuple(range(1, 1 + draw(st.integers(0, 4))))
        prompt = 16 * len(shared) + draw(st.integers(1, 200))
        session = draw(st.sampled_from(["", "a", "b"]))
        found.append(
            TraceRequest(now, prompt, draw(st.sampled_from([1, 2, 17, 60, 180])), shared, session=session)
        )
    return found


@settings(max_examples=40)
@given(of=clusters(), load=loads(), seed=st.integers(0, 99))
def test_jumps_land_where_steps_do_whatever_the_cluster_and_the_load(
    of: tuple[Cluster, bool], load: list[TraceRequest], seed: int
) -> None:
    built, flips = of
    (_, there), (_, step_by_step) = (
        outcome(built, load, jumps, seed=seed, steering=AtRandom(seed) if flips else None)
        for jumps in (True, False)
    )
    assert there == step_by_step
