"""The pool controller asks for more workers, or fewer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
from support.steered_cluster import CHAT, CODE, OPTIONS, cluster

from splitserve.bench.studies.steer_workload import worker
from splitserve.steering.controller import PoolController
from splitserve.steering.fleet import Fleet
from splitserve.transport.latency_bounds import LatencyBound
from splitserve.transport.messages.messages import Role


def test_scaling_up_by_queue_depth_within_bounds_and_with_a_pause() -> None:
    tried = cluster(4, 4, max_workers=9, scale_up_after_s=10.0, scale_cooldown_s=60.0)
    deep = replace(CHAT, rate=1.0, num_waiting=60)
    found = [d for d in tried.run(69, deep) if d.kind == "scale_up"]
    assert sum(tried.controller.wanted.values()) == 9
    assert tried.controller.wanted[found[0].role] == tried.roles.count(found[0].role) + 1
    assert [d.at - 100 for d in found] == [11.0]
    assert "60 requests waited" in found[0].reason
    tried.roles.append(found[0].role)
    assert not [d for d in tried.run(200, deep) if d.kind == "scale_up"], "there are as many as there may be"


def test_workers_that_take_long_to_come_count_among_the_most_that_there_may_be() -> None:
    tried = cluster(4, 4, max_workers=10, scale_up_after_s=10.0, scale_cooldown_s=60.0)
    deep = replace(CHAT, rate=1.0, num_waiting=60)
    assert len([d for d in tried.run(600, deep) if d.kind == "scale_up"]) == 2
    assert sum(tried.controller.wanted.values()) == 9, "for autoscalers: one more than are here"
    tried.roles += ["prefill", "decode"]
    tried.run(1, deep)
    tried.roles.remove("prefill")  # it has died: another one is asked for
    assert len([d for d in tried.run(500, deep) if d.kind == "scale_up"]) == 1
    assert len([d for d in tried.run(500, deep) if d.kind == "scale_up"]) == 1, "that one never came"
    tried.roles.append("prefill")
    (down,) = [d for d in tried.run(150, replace(CODE, rate=0.2)) if d.kind == "scale_down"]
    tried.roles.remove(down.role)
    assert [d for d in tried.run(80, deep) if d.kind == "scale_up"], "it has come, and another one has left"


def test_scaling_down_when_one_fewer_would_do_but_not_below_the_least() -> None:
    tried = cluster(2, 2, max_workers=8, min_workers=3, scale_down_after_s=30.0)
    idle = replace(CODE, rate=0.2)
    (down,) = [d for d in tried.run(60, idle) if d.kind == "scale_down"]
    assert down.worker in tried.fleet.spare[cast("Role", down.role)], "it says which"
    tried.roles.remove(down.role)
    tried.run(1, idle)
    assert tried.controller.wanted == {"prefill": tried.fleet.prefill, "decode": tried.fleet.decode}
    assert not tried.run(300, idle)


def test_scaling_down_takes_only_workers_that_may_go() -> None:
    """No worker of the role with too many may leave: one of the other does, if the rest has room."""
    controller = PoolController(replace(OPTIONS, max_workers=8, scale_down_after_s=30.0), worker())
    idle, now = replace(CODE, rate=0.2), 0.0

    def decided(spare: dict[Role, list[str]]) -> list[tuple[str, str, str]]:
        nonlocal now
        found = []
        for now in (now + second for second in range(1, 120)):
            found += controller.decide(idle, Fleet(4, 4, {}, 0, 2048, 128, spare), now)
        return [(d.kind, d.worker, d.role) for d in found]

    assert not decided({})
    assert controller.wanted == {"prefill": 4, "decode": 4}
    assert set(decided({"prefill": ["p"]})) == {("scale_down", "p", "prefill")}
    assert set(decided({"decode": ["d"]})) == {("scale_down", "d", "decode")}


@pytest.mark.parametrize(
    ("rule", "shows", "in_use", "role", "message"),
    [
        (
            {"scale_up_ttft": LatencyBound(1.0, 0.95)},
            {"ttft_kept": 0.94},
            {},
            "prefill",
            "the TTFT of 94% of requests was at most 1 s",
        ),
        ({"scale_up_tpot": LatencyBound(0.08, None)}, {"tpot_kept": 0.89}, {}, "decode", "fewer than 90%"),
        (
            {"scale_up_utilisation": 0.8},
            {},
            {"prefill": 0.7, "decode": 0.81},
            "decode",
            "81% of the decode workers was in use",
        ),
        (
            {"scale_up_utilisation": 0.8},
            {},
            {"prefill": 0.9, "decode": 0.1},
            "prefill",
            "90% of the prefill workers was in use",
        ),
        ({"scale_up_utilisation": 0.9}, {}, {"prefill": 0.9, "decode": 0.9}, "", ""),
        ({"scale_up_ttft": LatencyBound(1.0, 0.95)}, {"ttft_kept": 0.95, "tpot_kept": 0.1}, {}, "", ""),
        ({}, {"ttft_kept": 0.0, "tpot_kept": 0.0}, {"prefill": 1.0, "decode": 1.0}, "", ""),
    ],
)
def test_scaling_up_by_what_was_measured(
    rule: dict[str, Any], shows: dict[str, Any], in_use: dict[Role, float], role: str, message: str
) -> None:
    options = replace(OPTIONS, max_workers=9, scale_up_after_s=10.0, **rule)
    controller = PoolController(options, worker())
    picture, fleet = replace(CHAT, rate=1.0, **shows), replace(cluster(4, 4).fleet, in_use=in_use)
    found = [d for now in range(15) for d in controller.decide(picture, fleet, float(now))]
    assert [(d.at, d.kind, d.role) for d in found] == ([(10.0, "scale_up", role)] if role else [])
    assert message in "".join(d.reason for d in found)
