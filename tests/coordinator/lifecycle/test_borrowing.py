"""Workers that take work of the other role: when, which, how much, and that they go back."""

from __future__ import annotations

from typing import Any

import pytest
from support.lifecycle_bench import Bench, sent

from splitserve.coordinator.lifecycle.actions import Action, Send
from splitserve.coordinator.lifecycle.flips import FlipRecord
from splitserve.coordinator.lifecycle.snapshot import snapshot_of
from splitserve.transport.messages.messages import (
    FirstToken,
    Goodbye,
    Joined,
    Move,
    Prefill,
    SamplingParams,
    Welcome,
)

BUDGET = 16
"""Prompt tokens of a step; a prefill worker gets two steps ahead."""
PROMPT = list(range(BUDGET))


def borrowing(num_prefill: int = 1, num_decode: int = 1, **limits: Any) -> Bench:
    """Prefill workers P0 ..., decode workers D0 ...; each may borrow."""
    bench = Bench(dead_after_s=99.0, **limits)
    for home, count in (("prefill", num_prefill), ("decode", num_decode)):
        for number in range(count):
            process = f"{home[0].upper()}{number}"
            for role in ("decode", "prefill"):
                more = {
                    "process": process,
                    "mixed": True,
                    "home": home,
                    "pid": 100 * (home == "prefill") + number,
                }
                bench.hello(f"{process}:{role}", role, **more)
    for name in ("p", "d"):
        bench.send(name, Goodbye(worker_id=name, incarnation=1))
    return bench


def route(actions: list[Action]) -> tuple[str, str]:
    """Return where the one prompt among the actions is computed, and generated for; empty: nowhere yet."""
    found = [a for a in actions if isinstance(a, Send) and isinstance(a.message, Prefill)]
    if not found:
        return "", ""
    (action,) = found
    assert isinstance(action.message, Prefill)
    return action.worker[0], action.message.decode.worker_id


def submit(bench: Bench, name: str, num_tokens: int = BUDGET, max_tokens: int = 5) -> tuple[str, str]:
    sampling = SamplingParams(max_tokens=max_tokens)
    return route(bench.submit(name, prompt_token_ids=[1] * num_tokens, sampling=sampling))


def counts(bench: Bench) -> tuple[float, float]:
    counters = bench.core.counters()
    return counters["borrowed_prompts"], counters["borrowed_sequences"]


def test_nothing_is_borrowed_while_the_pools_have_room() -> None:
    bench = borrowing()
    assert {submit(bench, f"r{i}") for i in range(2)} == {("P0:prefill", "D0:decode")}
    assert counts(bench) == (0, 0)


def test_a_decode_worker_computes_a_prompt_for_which_no_prefill_worker_has_room() -> None:
    bench = borrowing()
    for i in range(2):
        submit(bench, f"r{i}")
    assert submit(bench, "pressed") == ("D0:prefill", "D0:decode")
    assert submit(bench, "waits") == ("", ""), "one batch of borrowed prompts at a time"
    assert counts(bench) == (1, 0)
    bench.send("P0:prefill", FirstToken(coordinator=7, dispatch=1, index=0, token=5))
    assert bench.core.queue.num_tokens == 0, "room at home again: the one that waited is there"
    assert counts(bench) == (1, 0)


def test_decode_workers_borrow_nothing_while_they_may_not() -> None:
    bench = borrowing()
    bench.core.pools.lends_decode = False
    for i in range(2):
        submit(bench, f"r{i}")
    assert submit(bench, "waits") == ("", "")
    bench.core.pools.lends_decode = True
    assert route(bench.core.tick(bench.now)) == ("D0:prefill", "D0:decode")


def test_a_busy_decode_worker_borrows_later_than_an_idle_one() -> None:
    """The delay of its sequences counts: it borrows when more waits."""
    bench = borrowing(max_num_seqs=200)
    for i in range(16):
        submit(bench, f"running {i}", num_tokens=1)
        bench.send("P0:prefill", FirstToken(coordinator=7, dispatch=i + 1, index=0, token=5))
        bench.send("D0:decode", Joined(coordinator=7, dispatch=i + 1, index=0, token=5))
    for i in range(2):
        submit(bench, f"r{i}")
    routes = [submit(bench, f"more {i}") for i in range(4)]
    assert routes[0] == ("", "")
    assert counts(bench) == (1, 0), routes


def test_of_several_the_one_borrows_that_delays_least() -> None:
    bench = borrowing(num_decode=2)
    submit(bench, "a", num_tokens=1)
    busy = next(w for w in ("D0", "D1") if bench.core.pools.workers[(f"{w}:decode", 1)].dispatches)
    idle = "D1" if busy == "D0" else "D0"
    submit(bench, "b")
    bench.core.pools.workers[(f"{busy}:decode", 1)].dispatches.update({900, 901})
    bench.core.pools.workers[(f"{idle}:decode", 1)].dispatches.clear()
    assert submit(bench, "pressed") == (f"{idle}:prefill", f"{idle}:decode")


def test_a_prefill_worker_keeps_a_sequence_for_which_no_decode_worker_has_room() -> None:
    bench = borrowing()
    for i in range(4):
        submit(bench, f"r{i}", num_tokens=1)
    assert submit(bench, "kept", num_tokens=1) == ("P0:prefill", "P0:decode")
    assert submit(bench, "kept too", num_tokens=1) == ("P0:prefill", "P0:decode")
    assert submit(bench, "waits", num_tokens=1) == ("", ""), "half of its rows"
    assert counts(bench) == (0, 2)


@pytest.mark.parametrize("turn", range(4))
def test_prompts_go_where_they_delay_no_borrowed_sequence(turn: int) -> None:
    bench = borrowing(num_prefill=2, max_num_seqs=2)
    for i in range(turn):  # ties fall otherwise
        submit(bench, f"before {i}", num_tokens=1)
        bench.core.cancel(f"before {i}", bench.now)
    for i in range(2):
        submit(bench, f"r{i}", num_tokens=1)
    keeper, _ = submit(bench, "kept", num_tokens=1)
    other = {"P0:prefill": "P1:prefill", "P1:prefill": "P0:prefill"}[keeper]
    bench.send(keeper, FirstToken(coordinator=7, dispatch=turn + 3, index=0, token=5))
    for name in ("r0", "r1"):
        bench.core.cancel(name, bench.now)
    assert submit(bench, "next", num_tokens=1)[0] == other
    for name in ("kept", "next"):
        bench.core.cancel(name, bench.now)
    assert {submit(bench, f"last {i}", num_tokens=1)[0] for i in range(2)} == {keeper, other}


def test_half_of_a_prefill_workers_blocks_stay_for_prompts() -> None:
    bench = borrowing()
    for i in range(4):
        submit(bench, f"r{i}", num_tokens=1)
        bench.send("P0:prefill", FirstToken(coordinator=7, dispatch=i + 1, index=0, token=5))
    assert submit(bench, "long", num_tokens=104) == ("", ""), "26 of 50 blocks"
    bench.core.cancel("long", bench.now)
    assert submit(bench, "half", num_tokens=100) == ("P0:prefill", "P0:decode")


@pytest.mark.parametrize(("gone", "left"), [("P0", "D0"), ("D0", "P0")])
def test_the_other_pool_goes_on_alone(gone: str, left: str) -> None:
    bench = borrowing()
    for role in ("prefill", "decode"):
        bench.send(f"{gone}:{role}", Goodbye(worker_id=f"{gone}:{role}", incarnation=1))
    assert bench.core.pools.gap == ""
    assert submit(bench, "r") == (f"{left}:prefill", f"{left}:decode")


def test_a_process_that_drains_borrows_nothing() -> None:
    bench = borrowing()
    for i in range(2):
        submit(bench, f"r{i}")
    bench.core.drain("D0:decode", None)
    assert submit(bench, "pressed") == ("", "")


def test_a_worker_that_was_started_again_is_no_half_of_the_old_one() -> None:
    bench = borrowing()
    for i in range(2):
        submit(bench, f"r{i}")
    more = {"process": "D0", "mixed": True, "home": "decode", "pid": 7, "incarnation": 2}
    bench.send("D0:prefill", Goodbye(worker_id="D0:prefill", incarnation=1))
    bench.hello("D0:prefill", "prefill", **more)
    assert submit(bench, "pressed") == ("", "")
    assert sent(bench.hello("D0:decode", "decode", **more), Welcome)
    assert counts(bench)[0] >= 1, "both halves are here again"


def test_it_is_flipped_at_once_and_counts_in_the_pool_that_it_prefers() -> None:
    bench = borrowing(num_decode=2, max_num_seqs=9)
    for name in ("before", "too"):
        submit(bench, name, num_tokens=1)
    flipped, actions = bench.core.flip("D0", "prefill", None, 0.0)
    assert isinstance(flipped, FlipRecord)
    assert not actions, "its process has both roles already"
    assert (flipped.began_s, flipped.ended_s, snapshot_of(bench.core).changing) == (0.0, 0.0, {})
    workers = snapshot_of(bench.core).workers
    assert [(w.worker_id, w.process, w.is_mixed) for w in workers if w.is_open] == [
        ("P0:prefill", "P0", False),
        ("D0:prefill", "D0", False),
        ("D1:decode", "D1", False),
    ]
    assert bench.core.pools.workers["D0:prefill", 1].num_borrowed == 1, "its sequence is still there"
    assert {submit(bench, f"r{i}") for i in range(3)} == {
        ("P0:prefill", "D1:decode"),
        ("D0:prefill", "D1:decode"),
    }
    assert counts(bench) == (0, 0)
    assert submit(bench, "pressed") == ("D1:prefill", "D1:decode"), "the others compute what is theirs"


def test_its_sequences_move_to_a_worker_that_prefers_them_while_that_has_room_to_spare() -> None:
    bench = borrowing(num_decode=2, max_num_seqs=9)
    for dispatch in range(1, 9):
        _, decode = submit(bench, f"r{dispatch}", num_tokens=1)
        bench.send(decode, Joined(coordinator=7, dispatch=dispatch, index=0, token=5))
    assert not sent(bench.core.tick(bench.now), Move)
    bench.core.flip("D0", "prefill", None, 0.0)
    moves = sent(bench.core.tick(bench.now), Move)
    assert {move.decode.worker_id for move in moves} == {"D1:decode"}
    assert len(moves) == 2, "a third of its nine rows stays free"


def test_a_half_that_comes_again_is_of_the_role_that_its_process_prefers_by_now() -> None:
    bench = borrowing(num_decode=2)
    bench.core.flip("D0", "prefill", None, 0.0)
    bench.hello("D0:decode", "decode", 2, process="D0", mixed=True, home="decode", pid=0)
    assert bench.core.pools.workers["D0:decode", 2].is_reserve
    again, _ = bench.core.flip("D0", "decode", None, 0.0)
    assert isinstance(again, FlipRecord)
    assert [w.hello.worker_id for w in bench.core.pools.open_of_role("decode")] == ["D1:decode", "D0:decode"]


@pytest.mark.parametrize(("name", "role"), [("D0", "prefill"), ("P0", "decode")])
def test_it_is_not_flipped_if_it_is_the_last_or_only_half_here(name: str, role: Any) -> None:
    bench = borrowing()
    reason, _ = bench.core.flip(name, role, None, 0.0)
    assert isinstance(reason, str)
    assert "is the last" in reason
    bench.send(f"{name}:{role}", Goodbye(worker_id=f"{name}:{role}", incarnation=1))
    assert bench.core.flip(name, role, None, 0.0)[0] == f"{name} starts or drains; try again once it is back"
