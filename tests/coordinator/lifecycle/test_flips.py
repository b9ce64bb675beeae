"""Which workers may change their role, the order they get, and the record of it afterwards."""

from __future__ import annotations

from typing import Any

import pytest
from support.lifecycle_bench import Bench, sent, tokens

from splitserve.coordinator.lifecycle.flips import FlipRecord
from splitserve.transport.messages.messages import FirstToken, Flip, Goodbye, Move, Prefill


def flexible() -> Bench:
    """Two decode workers and a prefill worker that can change their roles; those that cannot have left."""
    bench = Bench(dead_after_s=99.0)
    for name, role in (("w0", "prefill"), ("w1", "decode"), ("w2", "decode")):
        bench.hello(f"{name}:{role}", role, process=name)
    for name in ("p", "d"):
        bench.send(name, Goodbye(worker_id=name, incarnation=1))
    return bench


def order(bench: Bench, name: str, role: str) -> FlipRecord | str | None:
    ordered, _ = bench.core.flip(name, role, None, bench.now)  # type: ignore[arg-type]
    return ordered


@pytest.mark.parametrize(
    ("name", "role", "reason"),
    [
        ("w0", "decode", "the last prefill worker"),
        ("w1", "decode", "a decode worker already"),
        ("p", "decode", "only what was started as"),
    ],
)
def test_who_may_not(name: str, role: str, reason: str) -> None:
    bench = flexible()
    bench.hello("p", "prefill", incarnation=2)
    if name == "w0":
        bench.send("p", Goodbye(worker_id="p", incarnation=2), incarnation=2)
    answer = order(bench, name, role)
    assert isinstance(answer, str)
    assert reason in answer
    assert order(bench, "nobody", role) is None


def test_a_mixed_worker_has_both_roles_already() -> None:
    bench = flexible()
    for role in ("prefill", "decode"):
        bench.hello(f"m:{role}", role, process="m", mixed=True)
    assert (
        order(bench, "m", "prefill")
        == order(bench, "m:decode", "prefill")
        == "m is a mixed worker: it is of both roles already"
    )


def test_beside_mixed_workers_a_worker_computes_prompts_for_those_that_cannot() -> None:
    """They generate for anybody, and compute for themselves alone."""
    bench = flexible()
    for role in ("prefill", "decode"):
        bench.hello(f"m:{role}", role, process="m", mixed=True)
    refused = order(bench, "w0", "decode")
    assert isinstance(refused, str)
    assert "the last prefill worker: mixed ones compute for themselves alone" in refused
    assert all(isinstance(order(bench, name, "prefill"), FlipRecord) for name in ("w1", "w2")), (
        "the last that only decodes, too"
    )


def test_a_change_from_the_order_to_its_end() -> None:
    bench = flexible()
    record, actions = bench.core.flip("w1", "prefill", 3.0, bench.now)
    assert isinstance(record, FlipRecord)
    (reported,) = sent(actions, Flip)
    assert (reported.role, reported.timeout_s) == ("prefill", 3.0)
    assert sent(bench.load("w1:decode", []), Flip) == [reported], "it is said until it is heeded"
    assert sent(bench.load("w1:decode", [], draining=True), Flip) == []
    again = order(bench, "w1", "prefill")
    assert again == "w1 drains and ends; once it is back it can change its role"
    bench.now = 0.1
    bench.hello("w1:prefill", "prefill", process="w1")
    assert order(bench, "w1", "decode") == "w1 is changing its role already"
    bench.now = 0.4
    actions: list[Any] = [action for i in range(4) for action in bench.submit(f"r{i}")]
    sent_to = [action.worker[0] for action in actions if isinstance(action.message, Prefill)]
    assert "w1:prefill" in sent_to
    dispatch = sent_to.index("w1:prefill") + 1
    bench.send("w1:prefill", _first(dispatch))
    bench.now = 1.0
    bench.send("w1:decode", Goodbye(worker_id="w1:decode", incarnation=1))
    assert (record.began_s, record.worked_s, record.ended_s) == (0.1, 0.4, 1.0)
    assert record.as_json(bench.now)["ordered_s"] == 1.0
    assert isinstance(order(bench, "w1", "decode"), FlipRecord), "and back"
    assert bench.core.counters()["flips"] == 2


def test_what_runs_moves_and_streams_on() -> None:
    bench = flexible()
    (prefill,) = sent(bench.submit(), Prefill)
    here = prefill.decode.worker_id
    process = here.partition(":")[0]
    bench.send("w0:prefill", _first(1))
    bench.joined(1, worker=here)
    order(bench, process, "prefill")
    (move,) = sent(bench.load(here, [1], draining=True), Move)
    assert move.decode.worker_id != here
    assert tokens(bench.step(1, 1, 6, worker=here)) == [6]


def test_a_process_that_dies_in_mid_change_may_come_back() -> None:
    bench = flexible()
    order(bench, "w1", "prefill")
    bench.core.process_ended(("w1:decode", 1), bench.now)
    bench.hello("w1:decode", "decode", incarnation=2, process="w1")
    assert isinstance(order(bench, "w1", "prefill"), FlipRecord)


def test_one_whose_old_role_has_not_ended_stays_as_it_is() -> None:
    """Another coordinator ordered that change, or this one before it was started again."""
    bench = flexible()
    bench.load("w1:decode", [], draining=True)
    bench.hello("w1:prefill", "prefill", process="w1")
    assert order(bench, "w1", "decode") == "w1 is changing its role already"
    bench.send("w1:decode", Goodbye(worker_id="w1:decode", incarnation=1))
    assert isinstance(order(bench, "w1", "decode"), FlipRecord)


def _first(dispatch: int) -> FirstToken:
    return FirstToken(coordinator=7, dispatch=dispatch, index=0, token=5)
