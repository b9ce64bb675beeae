"""The pool controller: when it changes roles, when it holds still, and what it makes of missing or wrong
inputs."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from support.steered_cluster import CHAT, CODE, OPTIONS, SteeredCluster, arriving, cluster

from splitserve.bench.studies.steer_workload import worker
from splitserve.steering.capacity import Capacity
from splitserve.steering.controller import PoolController
from splitserve.steering.fleet import Decision, Fleet
from splitserve.steering.load_watch import LoadPicture
from splitserve.transport.messages.messages import Role


def test_it_follows_a_load_that_shifts_and_says_why() -> None:
    tried = cluster()
    tried.run(20, replace(CODE, attainment=0.5))
    many_prefill = tried.fleet.prefill
    found = tried.run(90, replace(CHAT, attainment=0.5, in_pace=0.5))
    assert many_prefill >= 6
    assert tried.fleet.decode >= 5
    assert all("load" in d.reason and "requests/s" in d.reason for d in found)
    assert len({d.at for d in found}) <= 3
    far = cluster(2, 6).run(20, replace(CODE, attainment=0.5))
    assert len({d.at for d in far}) < len(far), "several at once"


def test_it_waits_whether_a_change_of_the_load_stays() -> None:
    tried = cluster()
    for _ in range(20):
        assert not tried.run(2, CODE)
        assert not tried.run(2, CHAT)


def test_no_oscillation_under_constant_load() -> None:
    """The mix as it is estimated goes up and down by a fifth."""
    draw = random.Random(7)
    for steady in (CODE, CHAT, replace(CODE, rate=5.0, output_tokens=200)):
        tried = cluster()
        for _ in range(600):
            shaken = {
                name: getattr(steady, name) * draw.uniform(0.8, 1.2)
                for name in ("rate", "new_tokens", "output_tokens")
            }
            tried.run(1, replace(steady, **shaken))  # type: ignore[arg-type]
        flips = [d for d in tried.decisions if d.kind == "flip"]
        assert len({d.at for d in flips}) <= 3, [(d.at, d.role) for d in flips]
        assert not [d for d in flips if d.at > 400]


def test_nothing_is_changed_while_the_goal_is_met_and_the_load_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = cluster()
    monkeypatch.setattr(tried.controller._virtual, "best", lambda _: 6)
    assert not tried.run(60, replace(CODE, rate=1.0))
    assert "are good and the load fits: 4P:4D stays" in tried.controller.state
    assert tried.run(20, replace(CODE, rate=1.0, attainment=0.5))


def test_where_there_is_room_nothing_is_changed() -> None:
    tried = cluster()
    assert not tried.run(60, replace(CODE, rate=1.0))
    assert "stays" in tried.controller.state


@pytest.mark.parametrize(
    ("picture", "fleet", "scaled"),
    [
        (LoadPicture(0, 0.0), Fleet(4, 4, {}), []),
        (LoadPicture(100, 5.0), Fleet(4, 4, {"prefill": ["a"], "decode": ["b"]}), []),
        (
            replace(CHAT, output_tokens=0.0, context=0.0),
            Fleet(1, 1, {"prefill": ["a"], "decode": ["b"]}),
            [("scale_up", "prefill")],
        ),
        (CODE, Fleet(0, 4, {"decode": ["b"]}), [("scale_up", "prefill")]),
        (CODE, Fleet(0, 0, {}), []),
        (CODE, Fleet(4, 4, {}), [("scale_up", "prefill")]),
        (replace(CODE, new_tokens=float("nan"), rate=float("nan")), Fleet(4, 4, {"decode": ["b"]}), []),
        (replace(CODE, new_tokens=float("inf")), Fleet(4, 4, {"decode": ["b"]}), []),
        (replace(CODE, output_tokens=float("nan")), Fleet(4, 4, {"decode": ["b", "c"]}), []),
    ],
)
def test_missing_and_impossible_inputs_change_no_role_and_only_a_known_load_asks_for_workers(
    picture: LoadPicture, fleet: Fleet, scaled: list[tuple[str, str]]
) -> None:
    controller = PoolController(replace(OPTIONS, max_workers=16), worker())
    for now in range(60):
        controller.decide(picture, fleet, float(now))
    assert [(decision.kind, decision.role) for decision in controller.decisions] == scaled


class Ruled(SteeredCluster):
    """Has no latency model; workers come and leave as decided."""

    def __init__(self, prefill: int, decode: int, **options: Any) -> None:
        rules = replace(OPTIONS, scale_up_after_s=10.0, scale_down_after_s=30.0, **options)
        super().__init__(PoolController(rules, None), prefill, decode)

    def serve(self, picture: LoadPicture) -> LoadPicture:
        return picture

    def run(self, seconds: int, picture: LoadPicture) -> list[Decision]:
        found = super().run(seconds, picture)
        for decision in found:
            if decision.kind == "scale_up":
                self.roles.append(decision.role)
            elif decision.kind == "scale_down":
                self.roles.remove(decision.role)
        return found


LATE = replace(CODE, attainment=0.5, in_time=0.5, in_pace=1.0)


@pytest.mark.parametrize(
    ("picture", "in_use", "role", "why"),
    [
        (LATE, {"prefill": 0.9, "decode": 0.3}, "prefill", "50% of requests were good"),
        (replace(LATE, in_time=1.0, in_pace=0.5), {"prefill": 0.3, "decode": 0.9}, "decode", "50%"),
        (replace(CODE, num_waiting=60), {"prefill": 0.2, "decode": 0.9}, "decode", "60 requests waited"),
        (LATE, {"prefill": 0.9, "decode": 0.46}, "", ""),  # 0.61 without one of four
        (LATE, {}, "", ""),
        (CODE, {"prefill": 0.9, "decode": 0.1}, "", ""),  # nothing is short
    ],
)
def test_without_a_latency_model_the_role_with_room_gives_a_worker_to_the_one_that_is_short(
    picture: LoadPicture, in_use: dict[Role, float], role: str, why: str
) -> None:
    tried = Ruled(4, 4)
    tried.in_use = in_use
    found = tried.run(69, picture)  # one in the cool-down
    assert [(d.at, d.kind, d.role) for d in found] == ([(111.0, "flip", role)] if role else [])
    assert why in "".join(d.reason for d in found)


def test_without_a_latency_model_workers_come_only_where_no_role_has_room() -> None:
    tried = Ruled(2, 3, max_workers=9, scale_up_by=3)
    tried.in_use = {"prefill": 1.0, "decode": 0.3}
    assert [(d.kind, d.role) for d in tried.run(40, LATE)] == [("flip", "prefill")]
    tried.in_use = {"prefill": 1.0, "decode": 0.5}
    assert [(d.kind, d.role) for d in tried.run(60, LATE)] == [("scale_up", "prefill")] * 3
    assert [d.kind for d in tried.run(60, LATE)] == ["scale_up"], "nine are the most"


def test_without_a_latency_model_workers_leave_where_a_role_is_idle() -> None:
    tried = Ruled(2, 6, max_workers=9, min_workers=4, scale_down_by=3)
    tried.in_use = {"prefill": 0.5, "decode": 0.35}  # 0.525 without two of six, 0.7 without three
    calm = replace(CODE, rate=1.0)
    assert [(d.kind, d.worker) for d in tried.run(60, calm)] == [("scale_down", "w3"), ("scale_down", "w4")]
    tried.in_use = {"prefill": 0.01, "decode": 0.01}
    assert [d.role for d in tried.run(60, calm)] == ["decode", "decode"]
    assert not tried.run(300, calm), "four are the least"


def test_the_last_worker_of_a_role_stays() -> None:
    tried = cluster(1, 1)
    assert not tried.run(60, CODE)
    assert not tried.run(60, CHAT)


def test_nothing_is_changed_while_enough_requests_are_good_and_will_be() -> None:
    """The model thinks the worst of the ratio, in every other second; what is seen counts."""
    tried = cluster()
    for _ in range(100):
        assert not tried.run(1, CODE)
        assert not tried.run(1, replace(CODE, rate=0.5))
    assert not tried.run(1, replace(CODE, rate=0.5, attainment=0.5)), "nor is it held against it later"
    assert "4P:4D stays" in tried.controller.state


def test_a_ratio_that_is_fair_to_all_mixes_stays_where_they_alternate_fast() -> None:
    tried = cluster(5, 3)
    even = [replace(CODE, attainment=0.8, rate=6.0), replace(CHAT, attainment=0.8, rate=4.0)]
    for turn in range(40):
        tried.run(5, even[turn % 2])
    assert not tried.decisions


def test_sequences_that_run_for_long_keep_their_workers_busy_when_no_more_come() -> None:
    capacity, batch = (
        Capacity(worker(), OPTIONS, 2048, 128),
        Capacity(worker(), OPTIONS, 2048, 128).batch(CODE),
    )
    long, short = (replace(CODE, num_decoding=4 * batch, remaining_tokens=n) for n in (400.0, 20.0))
    assert capacity.pressure(long, 5, 3).decode > 1.0 > capacity.pressure(short, 5, 3).decode


def test_what_waits_counts_for_both_roles() -> None:
    capacity = Capacity(worker(), OPTIONS, 2048, 128)
    calm, crowded = capacity.pressure(CODE, 5, 3), capacity.pressure(replace(CODE, num_waiting=80), 5, 3)
    assert crowded.prefill > 1.5 * calm.prefill
    assert crowded.decode > 1.5 * calm.decode


class Advised(SteeredCluster):
    """Nobody does what is advised."""

    def run(self, seconds: int, picture: LoadPicture) -> list[Decision]:
        before = list(self.roles)
        found = super().run(seconds, picture)
        self.roles = before
        return found


def test_advice_that_nobody_takes_is_repeated_once_a_minute() -> None:
    tried = Advised(PoolController(replace(OPTIONS, mode="advise"), worker()), 4, 4)
    message: list[Decision] = []
    for second in range(140):
        message += tried.run(1, replace(CODE, attainment=0.9 - second / 200))
    assert [at - 100 for at in sorted({d.at for d in message})] == [9.0, 69.0, 129.0]
    assert {d.role for d in message} == {"prefill"}
    assert "it was proposed" in tried.controller.state


class Rigid(SteeredCluster):
    """No worker can change its role."""

    @property
    def fleet(self) -> Fleet:
        return replace(super().fleet, flexible={})


def test_where_no_worker_can_change_its_role_it_says_what_would_be_better() -> None:
    tried = Rigid(PoolController(OPTIONS, worker()), 2, 6)
    assert not tried.run(20, CODE)
    assert "start them as `splitserve worker`" in tried.controller.state
    tried = Rigid(PoolController(OPTIONS, worker()), 6, 2)
    assert not tried.run(20, CODE)
    assert "6P:2D stays" in tried.controller.state


def test_decode_workers_lend_nothing_while_they_are_loaded_too_much() -> None:
    tried = Rigid(PoolController(OPTIONS, worker()), 6, 2)
    assert tried.controller.lends_decode
    tried.run(20, CHAT)
    assert not tried.controller.lends_decode
    tried.run(60, replace(CHAT, rate=1.0))
    assert tried.controller.lends_decode


def test_beside_mixed_workers_roles_stay_and_that_is_said_once() -> None:
    controller = PoolController(replace(OPTIONS, max_workers=9, scale_up_after_s=10.0), worker())
    mixed = replace(cluster(2, 4).fleet, mixed=2)
    message = [
        d for now in range(60) for d in controller.decide(replace(CODE, num_waiting=60), mixed, float(now))
    ]
    assert [(d.kind, d.role, d.worker) for d in message] == [("hold", "mixed", ""), ("scale_up", "mixed", "")]
    assert "2 of 8 workers are mixed" in message[0].reason
    assert "not predicted" in controller.state
    assert controller.pressure is None
    assert controller.wanted == {"prefill": 2, "decode": 4, "mixed": 3}
    assert not [
        d for now in range(200) for d in controller.decide(replace(CODE, rate=0.1), mixed, 60.0 + now)
    ], "nor is one let go"


def test_mixed_workers_that_have_gone_may_come_back() -> None:
    """One that is started again is gone for a while: the roles that were right beside it are not changed for
    that."""
    controller = PoolController(OPTIONS, worker())
    without = cluster(2, 6).fleet
    for began in (0.0, 100.0):
        assert [d.kind for d in controller.decide(CODE, replace(without, mixed=2), began)] == (
            ["hold"] if not began else []
        )
        assert not [
            d for after in range(1, 60) for d in controller.decide(arriving(CODE), without, began + after)
        ]
        assert "may come back" in controller.state
    late = arriving(CODE, num_waiting=200)
    gone = [d for after in range(60, 400) for d in controller.decide(late, without, 100.0 + after)]
    assert {d.kind for d in gone} == {"flip"}
    assert gone[0].at >= 100.0 + OPTIONS.mixed_again_s


def test_where_all_are_mixed_there_is_nothing_to_flip() -> None:
    controller = PoolController(OPTIONS, worker())
    (hold,) = controller.decide(CODE, Fleet(0, 0, {}, mixed=4), 1.0)
    assert hold.reason == "all 4 workers are mixed: there are no roles to change"
