"""The sentence on top of the dashboard, by load."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from splitserve.coordinator.dashboard.diagnosis import diagnose
from splitserve.coordinator.dashboard.findings import MIN_REQUESTS, Finding
from splitserve.coordinator.metrics.load_window import PoolLook, Window
from splitserve.coordinator.metrics.objectives import Objectives

HEALTHY = {"parse": 0.01, "queue": 0.02, "prefill": 0.2, "handoff": 0.02, "decode": 1.74, "stream": 0.01}
QUEUEING = {"parse": 0.01, "queue": 2.6, "prefill": 0.39, "handoff": 0.05, "decode": 1.0, "stream": 0.01}


def window(
    stages: dict[str, float] = HEALTHY,
    prefill: dict[str, float] | None = None,
    decode: dict[str, float] | None = None,
    **more: Any,
) -> Window:
    """A minute of 600 requests."""
    ttft_s = sum(stages.get(name, 0.0) for name in ("parse", "queue", "prefill"))
    pools = {
        "prefill": PoolLook(**{"num_workers": 2.0, "busy": 0.4, "kv": 0.2, **(prefill or {})}),
        "decode": PoolLook(
            **{"num_workers": 2.0, "busy": 0.9, "kv": 0.4, "rows": 0.3, "running": 8.0, **(decode or {})}
        ),
    }
    base = Window(num_ended=600, num_measured=600, stages=stages, ttft_s=ttft_s, pools=pools)
    return replace(base, **more)


def first(window: Window) -> Finding:
    return diagnose(window)[0]


def test_when_nothing_is_wrong_it_says_so() -> None:
    (found,) = diagnose(window())
    assert (found.kind, found.level, found.remedy) == ("good", "good", "")
    assert found.what == "Nothing is in the way. 87% of requests' time is decode, 1% queueing."
    kept = first(window(objectives=Objectives(1.0, 0.1), kept=0.985))
    assert kept.what.endswith("; 98% of requests keep the objectives.")


def test_idle() -> None:
    assert diagnose(Window()) == [Finding("idle", "idle", "Idle: no request in the last minute.")]


def test_too_few_requests_promise_nothing() -> None:
    found = diagnose(window(QUEUEING, num_ended=7, num_measured=7, now_waiting=3, now_running=1))
    assert [f.kind for f in found] == ["too_few"]
    assert found[0].what == (
        f"Too few requests to tell: 7 answered in the last minute, {MIN_REQUESTS} are needed. 3 "
        "requests waiting, 1 running."
    )
    assert found[0].remedy == ""


def test_prefill_bound_by_clients_that_wait_for_their_answers() -> None:
    found = first(window(QUEUEING, prefill={"busy": 0.98}))
    assert (found.kind, found.level) == ("prefill", "warn")
    assert (
        found.what == "64% of requests' time is queueing for prefill, whose workers are busy 98% of the time."
    )
    assert (
        found.remedy == "A third prefill worker would halve the time to first token, from 3 s to about 1.6 s."
    )
    assert "mean value analysis" in found.basis


def test_prefill_bound_below_saturation() -> None:
    found = first(window(QUEUEING, prefill={"busy": 0.85}))
    assert (
        found.remedy
        == "A third prefill worker would cut the time to first token by 78%, from 3 s to about 670 ms."
    )
    assert "Sakasegawa" in found.basis


def test_a_queue_that_grows_names_how_many_workers_are_missing() -> None:
    found = first(window(QUEUEING, prefill={"busy": 1.0}, growth=900.0))
    assert found.remedy.startswith(
        "25.0 requests a second come and 10.0 are served: the queue grows until 4 more prefill workers"
    )


def test_a_queue_that_rises_is_told_before_those_in_it_are_answered() -> None:
    rising = window(now_waiting=60, growth=58.0)
    found = first(rising)
    assert (found.kind, found.level) == ("rising", "warn")
    assert found.what == (
        "Queueing rises: 60 requests waiting, at this pace for 6 s; those of the last minute waited 20 ms on "
        "average."
    )
    assert first(window(now_waiting=8, growth=8.0)).kind == "good", "less than a second"
    assert first(window(now_waiting=60)).kind == "good", "as many as a minute ago"


def test_without_a_known_busy_share_prefill_is_named_all_the_same() -> None:
    assert first(window(QUEUEING, prefill={"busy": None})).kind == "prefill"  # type: ignore[dict-item]


def test_a_queue_before_idle_workers_is_a_burst() -> None:
    found = first(window(QUEUEING, prefill={"busy": 0.3}))
    assert found.kind == "bursts"
    assert "busy only 30% of the time" in found.what


def test_kv_memory_bound() -> None:
    found = first(window(QUEUEING, prefill={"busy": 0.9}, decode={"kv": 0.97}, grown={"preemptions": 12.0}))
    assert found.kind == "kv_memory"
    assert "the decode workers' KV cache is full (97% in use, and 12 sequences were preempted)" in found.what
    assert found.remedy.startswith("A third decode worker would ")
    assert "--kv-cache-gib" in found.remedy


def test_a_single_preemption_is_no_cause_of_a_queue() -> None:
    assert first(window(QUEUEING, prefill={"busy": 0.9}, grown={"preemptions": 1.0})).kind == "prefill"
    assert first(window(QUEUEING, prefill={"busy": 0.9}, grown={"preemptions": 30.0})).kind == "kv_memory"


def test_kv_memory_bound_is_seen_in_the_handoff_too() -> None:
    stages = {**HEALTHY, "handoff": 1.5}
    assert first(window(stages, decode={"kv": 0.95})).kind == "kv_memory"


def test_decode_bound_by_rows() -> None:
    found = first(window(QUEUEING, decode={"rows": 1.0}))
    assert found.kind == "decode"
    assert "--max-num-seqs" in found.remedy


def test_decode_bound_by_the_time_per_token() -> None:
    slow = window(objectives=Objectives(None, 0.05), kept=0.4, tpot_missed=0.6)
    found = first(slow)
    assert found.what == (
        "60% of requests get their tokens more slowly than 50 ms each: 8 sequences share a decode "
        "worker's steps."
    )
    assert found.remedy == "A third decode worker would cut the time per token by at most 33%."
    alone = first(replace(slow, pools={**slow.pools, "decode": PoolLook(2.0, 0.9, 0.1, 0.1, 1.0)}))
    assert alone.remedy.startswith("More workers would not help")


def test_handoff_bound() -> None:
    found = first(window({**HEALTHY, "handoff": 1.0}, grown={"mover_fallbacks": 2.0}))
    assert found.kind == "handoff"
    assert "slower mover for 2 peers" in found.what
    assert found.remedy.endswith("by at most 34%.")


def test_a_late_coordinator_whatever_its_stages_are_called() -> None:
    found = first(window({**HEALTHY, "parse": 0.2, "late": 0.6}))
    assert found.kind == "coordinator"
    assert "--processes" in found.remedy


def test_slow_clients_are_no_fault_of_the_cluster() -> None:
    found = first(window({**HEALTHY, "stream": 2.0}))
    assert found.kind == "client"
    assert "proxy" in found.remedy


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_role_without_workers(role: str) -> None:
    no_worker: dict[str, Any] = {role: {"num_workers": 0.0}}
    found = first(window(num_ended=0, num_measured=0, now_waiting=1, **no_worker))
    assert (found.kind, found.level) == ("no_workers", "bad")
    assert found.what == f"No {role} worker is connected. 1 request waits."
    assert found.remedy == f"Start one: `splitserve {role}`."


def test_no_workers_at_all_is_one_finding() -> None:
    found = diagnose(
        window(num_ended=0, num_measured=0, prefill={"num_workers": 0.0}, decode={"num_workers": 0.0})
    )
    assert [f.what for f in found] == ["No workers are connected."]


def test_a_lost_worker_comes_before_the_queue_that_it_left() -> None:
    lost = window(
        QUEUEING,
        prefill={"num_workers": 1.0, "busy": 1.0},
        most_workers={"prefill": 2.0, "decode": 2.0},
        lost=["prefill-1 (silent)"],
    )
    found = diagnose(lost)
    assert [f.kind for f in found] == ["lost", "prefill"]
    assert (
        found[0].what
        == "Lost in the last minute: prefill-1 (silent). 1 prefill worker left; its requests go on there."
    )
    back = replace(lost, pools={**lost.pools, "prefill": PoolLook(2.0, 1.0)})
    assert [f.kind for f in diagnose(back)] == ["prefill"]  # it has come back: nothing is to be done


def test_objectives_that_are_missed_without_a_queue() -> None:
    stages = {**HEALTHY, "prefill": 1.9}
    found = first(window(stages, objectives=Objectives(1.0, None), kept=0.5, ttft_missed=0.5))
    assert found.kind == "slow_prefill"
    assert (
        found.what
        == "50% of requests miss the objectives; 10% may. There is no queue: computing a prompt takes 1.9 s."
    )
    assert found.remedy.startswith("More workers would not help")


def test_a_short_queue_matters_where_it_breaks_the_objective() -> None:
    stages = {**HEALTHY, "queue": 0.3, "decode": 20.0}
    assert first(window(stages)).kind == "good"
    found = first(
        window(stages, prefill={"busy": 0.9}, objectives=Objectives(0.2, None), kept=0.1, ttft_missed=0.9)
    )
    assert (
        found.what
        == "59% of the time to first token is queueing for prefill, whose workers are busy 90% of the time."
    )


def test_failed_and_refused_requests_come_first() -> None:
    found = diagnose(window(QUEUEING, prefill={"busy": 0.9}, num_failed=10, num_refused=40))
    assert [f.kind for f in found] == ["failed", "refused", "prefill"]
    assert found[0].what == "10 requests of 650 failed with 5xx in the last minute."
    assert [f.kind for f in diagnose(window(num_refused=3))] == ["good"]  # one of two hundred


def test_the_larger_share_comes_first() -> None:
    stages = {**HEALTHY, "queue": 2.0, "stream": 3.0}
    assert [f.kind for f in diagnose(window(stages, prefill={"busy": 0.9}))] == ["client", "prefill"]
