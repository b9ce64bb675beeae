"""The order of service when workers are scarce: classes by weight, tenants alike, no request starves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.lifecycle_bench import Bench, Sink, sent

from splitserve.coordinator.lifecycle.lifecycle import CHARGE_EVERY_S
from splitserve.coordinator.lifecycle.request import PriorityClass, Request
from splitserve.coordinator.lifecycle.request_queue import LOOK_AHEAD, WEIGHTS, RequestQueue, Tried
from splitserve.transport.messages.messages import Prefill, SamplingParams


def make(tenant: str = "", num_tokens: int = 10, arrival: float = 0.0, **more: Any) -> Request:
    fields: dict[str, Any] = {
        "sampling": SamplingParams(max_tokens=5),
        "sink": Sink(),
        "deadline": 1e9,
        **more,
    }
    return Request(f"{tenant}-{arrival}", [1] * num_tokens, tenant=tenant, arrival=arrival, **fields)


def serve(queue: RequestQueue, count: int, now: float = 0.0) -> list[Request]:
    """Return the next ``count`` requests, each dispatched once."""
    served: list[Request] = []

    def place(request: Request) -> Tried:
        if len(served) == count:
            return "waits"
        request.num_attempts = 1
        served.append(request)
        return "placed"

    queue.serve(place, now)
    return served


def tokens_by(requests: list[Request], name: str) -> Counter[str]:
    return Counter(
        {
            key: n
            for key in {getattr(f, name) for f in requests}
            for n in [sum(f.num_tokens for f in requests if getattr(f, name) == key)]
        }
    )


def test_one_greedy_tenant_gets_no_more_than_the_others() -> None:
    """It asks for ten times as much, with longer prompts, and was first."""
    queue = RequestQueue(1e9)
    for n in range(1000):
        queue.add(make("greedy", 100, n / 1000))
    for n in range(100):
        for tenant in ("a", "b"):
            queue.add(make(tenant, 20, 1.0 + n))
    got = tokens_by([f for _ in range(130) for f in serve(queue, 1)], "tenant")
    assert max(got.values()) - min(got.values()) <= 2 * 100  # the paper's bound: twice the longest request
    rest = serve(queue, 2000)
    assert len(rest) == 1200 - 130  # and all that is left over is the greedy one's


def test_what_is_generated_counts_while_it_is() -> None:
    queue = RequestQueue(1e9)
    talker = make("talker", 10)
    queue.add(talker)
    serve(queue, 1)
    for n in range(10):
        queue.add(make("talker", 10, n))
        queue.add(make("quiet", 10, n))
    talker.tokens += [1] * 30  # twice the weight of a prompt's: as much as six prompts
    queue.charge(talker)
    queue.charge(talker)
    assert [f.tenant for f in serve(queue, 6)] == ["quiet"] * 6


def test_cached_prompts_cost_nothing() -> None:
    queue = RequestQueue(1e9)
    queue.add(first := make("a", 40))
    serve(queue, 1)
    first.num_cached_tokens = 40
    for n in range(4):
        queue.add(make("b", 10, n))
        queue.add(make("a", 10, n))
    queue.charge(first)
    assert Counter(f.tenant for f in serve(queue, 4))["a"] >= 2


def test_idle_time_earns_no_credit() -> None:
    queue = RequestQueue(1e9)
    for n in range(100):
        queue.add(make("busy", 10, n))
    serve(queue, 50)
    for n in range(20):
        queue.add(make("late", 10, n))
    assert Counter(f.tenant for f in serve(queue, 20)) == {"busy": 10, "late": 10}


def test_idle_time_earns_no_credit_where_no_request_waited() -> None:
    queue = RequestQueue(1e9)
    for tenant in ["busy"] * 50 + ["late"]:
        request = make(tenant)
        request.num_attempts = 1
        queue.charge_unqueued(request)
    for n in range(20):
        queue.add(make("late", 10, n))
        queue.add(make("busy", 10, n))
    assert Counter(f.tenant for f in serve(queue, 20))["late"] == pytest.approx(10, abs=1)


@given(
    st.lists(
        st.tuples(st.sampled_from(list(WEIGHTS)), st.sampled_from("abc"), st.integers(1, 50)),
        min_size=1,
        max_size=60,
    )
)
@settings(max_examples=50)
def test_everybody_is_served_in_the_end_once(asked: list[tuple[PriorityClass, str, int]]) -> None:
    queue = RequestQueue(1e9)
    requests = [make(t, n, float(i), priority_class=c) for i, (c, t, n) in enumerate(asked)]
    for one in requests:
        queue.add(one)
    queue.remove(requests[0])
    served = [f for _ in requests for f in serve(queue, 1)]
    assert set(served) == set(requests[1:])
    assert len(served) == len(set(served))
    assert len(queue) == 0


def test_classes_share_by_weight_and_none_starves() -> None:
    queue = RequestQueue(1e9)
    for n in range(400):
        for name in WEIGHTS:
            queue.add(make("t", 10, n, priority_class=name))
    got = Counter(f.priority_class for f in serve(queue, 340))
    assert got["premium"] == pytest.approx(256, abs=2)
    assert got["standard"] == pytest.approx(64, abs=2)
    assert got["free"] == pytest.approx(16, abs=2)
    assert got["batch"] == pytest.approx(4, abs=1)


def test_what_no_class_asks_for_goes_to_batch_work() -> None:
    queue = RequestQueue(1e9)
    for n in range(40):
        queue.add(make("t", 10, n, priority_class="batch"))
    assert len(serve(queue, 30)) == 30
    queue.add(make("t", 10, priority_class="premium"))
    assert serve(queue, 1)[0].priority_class == "premium"


def test_one_tenants_requests_go_by_priority_then_arrival() -> None:
    queue = RequestQueue(1e9)
    for arrival, priority in ((3.0, 0), (1.0, 0), (2.0, -1), (4.0, 5)):
        queue.add(make("t", arrival=arrival, priority=priority))
    assert [f.arrival for f in serve(queue, 4)] == [2.0, 1.0, 3.0, 4.0]


def test_a_tenant_whose_prompts_do_not_fit_hides_nobody_elses() -> None:
    queue = RequestQueue(1e9)
    for n in range(3 * LOOK_AHEAD):
        queue.add(make("long", 100, n))
    queue.add(make("short", 10, 0.0))
    queue._classes["standard"].shares.charge("short", 1000)  # it is not its turn
    placed: list[Request] = []
    queue.serve(lambda f: "placed" if f.num_tokens < 50 and not placed.append(f) else "waits", 0.0)
    assert [f.tenant for f in placed] == ["short"]


def test_tokens_ahead_are_those_that_are_served_before() -> None:
    """Against the queue itself: what it serves until the newcomer's turn."""
    for tenant, name in (
        ("a", "standard"),
        ("b", "standard"),
        ("new", "standard"),
        ("new", "premium"),
        ("a", "batch"),
        ("new", "batch"),
        ("0 used up", "batch"),
        ("0 used up", "standard"),
    ):
        queue = RequestQueue(1e9)
        if tenant == "0 used up":  # it, and batch as a class, is going to have more than its share
            queue.add(make(tenant, 1000, priority_class=name))
        for n in range(30):
            queue.add(make("a", 10, n))
            queue.add(make("b", 5 if n else 500, n))  # which then has had more than the others
            queue.add(make("p", 10, n, priority_class="premium"))
        serve(queue, 20)
        reported = queue.tokens_ahead(name, tenant)  # type: ignore[arg-type]
        queue.add(newcomer := make(tenant, 10, 1e6, priority_class=name))
        before = []
        while newcomer not in (served := serve(queue, 1)):
            before += served
        assert reported == pytest.approx(sum(f.num_tokens for f in before), abs=25), (tenant, name)


def a_short_one_behind_a_starving_one_of_the_tenant_whose_turn_it_is() -> Bench:
    """The prefill worker has room for short prompts alone; a sequence of the first tenant runs."""
    bench = Bench(max_num_seqs=8)
    bench.submit("running", tenant="first")
    bench.first(1)
    bench.joined(1)
    bench.submit("long", tenant="first", prompt_token_ids=[2] * 40)
    assert not sent(bench.submit("longer", tenant="first", prompt_token_ids=[3] * 60), Prefill)
    bench.now = 3.0
    for name in ("p", "d"):
        bench.load(name, [1, 2])
    bench.core.tick(bench.now)  # what the first tenant has been given is booked
    assert not sent(bench.submit("short", tenant="second", prompt_token_ids=[4] * 8), Prefill)
    return bench


def test_who_comes_first_by_now_is_tried_though_the_same_wait_for_the_same_workers() -> None:
    bench = a_short_one_behind_a_starving_one_of_the_tenant_whose_turn_it_is()
    assert not sent(bench.core.tick(bench.now), Prefill)
    bench.step(1, 1, 6)  # the first tenant has been given more than the second
    bench.now += CHARGE_EVERY_S
    assert [prefill.spec.request_id for prefill in sent(bench.core.tick(bench.now), Prefill)] == ["short"]


def test_the_line_is_not_gone_through_again_where_nothing_can_come_of_it() -> None:
    """Messages in between change no turn: only booked shares do."""
    bench = a_short_one_behind_a_starving_one_of_the_tenant_whose_turn_it_is()
    passes: list[float] = []
    serve = RequestQueue.serve
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RequestQueue, "serve", lambda queue, place, now: passes.append(now) or serve(queue, place, now)
        )
        for _ in range(20):
            bench.now += 0.05
            bench.core.tick(bench.now)
            for name in ("p", "d"):
                bench.load(name, [1, 2])
    assert len(passes) <= 1 + 1.0 / CHARGE_EVERY_S
