"""Workers of one host slow each other while they compute: by hand on a host alone, and in whole clusters."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.test_flips_simulated import AtRandom
from planner.test_simulator_jumps import BESIDE, clusters, loads, outcome
from support.simulated import DECODE_S, cluster, colocated, profile, run

from splitserve.engine.latency_profile import Contention, StepRole
from splitserve.planner.simulator.cluster import Cluster
from splitserve.planner.simulator.device import LeavingLayers
from splitserve.planner.simulator.events import EventQueue
from splitserve.planner.simulator.host import Host, HostedStep
from splitserve.traces.request import TraceRequest

TWICE = Contention(prefill_beside_decode=1.5, decode_beside_prefill=2.0)
STEP = None  # a step that nobody looks into


@dataclass
class Watched:
    """Steps on one host, and when they have ended."""

    queue: EventQueue = field(default_factory=EventQueue)
    ended: dict[str, float] = field(default_factory=dict)
    moved: list[tuple[str, float, float]] = field(default_factory=list)
    steps: dict[str, HostedStep] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.host = Host(self.queue)

    def begin(
        self,
        name: str,
        role: StepRole,
        at: float,
        seconds: float,
        beside: Contention = TWICE,
        loop_s: float = 0.0,
    ) -> None:
        self.queue.at(at, self._begin, name, role, seconds, beside, loop_s)

    def _begin(self, name: str, role: StepRole, seconds: float, beside: Contention, loop_s: float) -> None:
        def moved(ends_at: float, by_s: float) -> None:
            self.moved.append((name, ends_at, by_s))

        def done() -> None:
            self.ended[name] = self.queue.now

        self.steps[name] = self.host.begin(role, beside, loop_s, seconds, moved, done)

    def run(self) -> dict[str, float]:
        self.queue.run_while(lambda: True)
        return self.ended


def test_what_is_left_of_a_step_goes_on_at_another_pace_whenever_a_neighbours_step_begins_or_ends() -> None:
    on = Watched()
    on.begin("prompts", "prefill", 0.0, 1.0)
    on.begin("tokens", "decode", 0.2, 0.4)
    # beside each other from 0.2 on: tokens takes 2 * 0.4; prompts has 0.8 left, of which 0.8 / 1.5 are done
    # when tokens ends
    assert on.run() == pytest.approx({"tokens": 1.0, "prompts": 1.0 + (0.8 - 0.8 / 1.5)})
    assert [name for name, _, _ in on.moved] == ["prompts", "tokens", "prompts"]
    assert [ends_at for _, ends_at, _ in on.moved] == pytest.approx([1.4, 1.0, 1.0 + 4 / 15])
    assert sum(by for name, _, by in on.moved if name == "prompts") == pytest.approx(4 / 15)


def test_what_neighbours_add_is_added_up() -> None:
    on = Watched()
    on.begin("tokens", "decode", 0.0, 1.0)
    for number in range(3):
        on.begin(f"prompts {number}", "prefill", 0.0, 10.0)
    assert on.run()["tokens"] == pytest.approx(1.0 + 3 * 1.0)


def test_the_loop_around_a_step_slows_nobody_and_is_not_slowed() -> None:
    on = Watched()
    on.begin("tokens", "decode", 0.0, 0.5)
    on.begin("prompts", "prefill", 0.1, 1.0, loop_s=0.2)  # computes from 0.3 on
    assert on.run() == pytest.approx({"tokens": 0.3 + 2 * 0.2, "prompts": 0.7 + (1.0 - 0.4 / 1.5)})


def test_a_worker_that_has_died_slows_nobody() -> None:
    on = Watched()
    on.begin("tokens", "decode", 0.0, 1.0)
    on.begin("prompts", "prefill", 0.0, 10.0)
    on.queue.at(0.5, lambda: on.host.stop(on.steps["prompts"]))
    assert on.run() == pytest.approx({"tokens": 0.5 + 0.75})


factors = st.floats(1.0, 4.0)
contentions = st.builds(
    Contention,
    prefill_beside_prefill=factors,
    prefill_beside_decode=factors,
    decode_beside_prefill=factors,
    decode_beside_decode=factors,
)
hosted = st.tuples(
    st.sampled_from(["prefill", "decode"]),
    st.floats(0, 3),
    st.floats(0, 2),
    contentions,
    st.sampled_from([0.0, 0.01]),
)


@settings(max_examples=150)
@given(st.lists(hosted, min_size=1, max_size=7))
def test_a_step_never_ends_sooner_than_alone_nor_later_than_with_all_others_beside_it_all_the_time(
    steps: list[tuple[StepRole, float, float, Contention, float]],
) -> None:
    on = Watched()
    for number, (role, at, seconds, beside, loop_s) in enumerate(steps):
        on.begin(str(number), role, at, seconds, beside, loop_s)
    ended = on.run()
    assert len(ended) == len(steps)
    for number, (role, at, seconds, beside, loop_s) in enumerate(steps):
        others = [other for i, (other, *_) in enumerate(steps) if i != number]
        most = beside.slowdown(role, others.count("prefill"), others.count("decode"))
        took = ended[str(number)] - at - loop_s
        assert seconds * (1 - 1e-9) - 1e-9 <= took <= most * seconds * (1 + 1e-9) + 1e-9


def test_layers_leave_at_the_steps_new_pace() -> None:
    leaving = LeavingLayers(STEP, 10.0, 0.0, 1.0, 1, 10)  # type: ignore[arg-type]
    slowed = leaving.ending_at(11.5, 10.5)
    assert [slowed.time_of(n) for n in (5, 6, 10)] == pytest.approx([10.5, 10.7, 11.5])
    assert [slowed.num_done(now) for now in (10.5001, 10.69, 10.71)] == [5, 5, 6]


# --- clusters ----------------------------------------------------------------------------------------


def test_tokens_come_at_half_the_pace_while_prompts_are_computed_on_the_same_host() -> None:
    of = profile(contention=TWICE)
    requests = [TraceRequest(0.0, 200, 11), TraceRequest(0.01, 3000, 1)]
    tpot = [run(cluster(1, 1, of, workers_per_host=n), requests)[1][0].tpot_s for n in (1, 2)]
    assert tpot == pytest.approx([DECODE_S * 1.01, 2 * DECODE_S * 1.01], rel=0.02)


def test_the_time_that_neighbours_cost_is_time_in_which_a_worker_is_busy() -> None:
    requests = [TraceRequest(0.0, 200, 11), TraceRequest(0.01, 3000, 1)]
    alone, beside = (
        run(cluster(1, 1, profile(contention=TWICE), workers_per_host=n), requests)[0] for n in (1, 2)
    )
    (computes, generates), (computed, generated) = ([m.device for m in s.machines] for s in (alone, beside))
    slowed_s = generated.decode_s - generates.decode_s
    assert slowed_s == pytest.approx(10 * DECODE_S * 1.01, rel=0.02)
    assert computed.prefill_s - computes.prefill_s == pytest.approx(
        (generated.decode_s) / 1.5 * 0.5, rel=0.02
    )
    assert generated.busy_seconds == generated.decode_s


def test_workers_are_dealt_out_to_hosts_in_turn() -> None:
    """Of 2P2D on two hosts, each has one of either role."""
    of = profile(contention=Contention(prefill_beside_prefill=3.0, decode_beside_decode=3.0))
    requests = [TraceRequest(0.0, 400, 30), TraceRequest(0.0, 400, 30)]
    alone, paired, together = (run(cluster(2, 2, of, workers_per_host=n), requests)[1] for n in (1, 2, 4))
    assert [r.row() for r in paired] == [r.row() for r in alone]
    assert together[0].ttft_s > 2 * alone[0].ttft_s


def test_a_profile_without_the_part_neither_slows_nor_is_slowed() -> None:
    of, known = profile(), profile(contention=BESIDE)
    requests = [TraceRequest(0.01 * i, 300, 20) for i in range(20)]
    for one in (cluster(2, 2, of), colocated(2, of=of)):
        assert _rows(one.model_copy(update={"workers_per_host": 4}), requests) == _rows(one, requests)
    mixed = cluster(1, 1, of)
    mixed = mixed.model_copy(
        update={
            "pools": (mixed.pools[0], mixed.pools[1].model_copy(update={"profile": known})),
            "workers_per_host": 2,
        }
    )
    assert _rows(mixed, requests) == _rows(cluster(1, 1, of), requests)


def _rows(of: Cluster, requests: list[TraceRequest]) -> list[object]:
    return [r.row() for r in run(of, requests)[1]]


@settings(max_examples=20)
@given(of=clusters(), load=loads(), seed=st.integers(0, 99))
def test_neighbours_that_cost_nothing_change_nothing(
    of: tuple[Cluster, bool], load: list[TraceRequest], seed: int
) -> None:
    built, flips = of
    harmless = tuple(
        pool.model_copy(update={"profile": pool.profile.model_copy(update={"contention": Contention()})})
        for pool in built.pools
    )
    beside = built.model_copy(update={"pools": harmless, "workers_per_host": built.num_workers})
    (_, alone), (_, together) = (
        outcome(one, load, True, seed=seed, steering=AtRandom(seed) if flips else None)
        for one in (built, beside)
    )
    assert alone == together
