"""A worker that drains gets no new work, its running sequences move, and its leaving is nobody's failure."""

from __future__ import annotations

import pytest
from support.lifecycle_bench import Bench, ends, sent, tokens

from splitserve.coordinator.lifecycle.actions import Action, Send
from splitserve.transport.messages.messages import (
    Cancel,
    Drain,
    Fenced,
    Goodbye,
    Move,
    Prefill,
    RequestFailed,
    from_u32,
)


def running() -> Bench:
    """One sequence runs on d (its tokens 5, 6); d2 is idle."""
    bench = Bench(dead_after_s=99.0)
    bench.submit()
    bench.first(1)
    bench.joined(1)
    bench.step(1, 1, 6)
    bench.hello("d2", "decode")
    return bench


def leaving(bench: Bench) -> list[Action]:
    return bench.load("d", [1], draining=True)


def goodbye(bench: Bench, name: str) -> list[Action]:
    return bench.send(name, Goodbye(worker_id=name, incarnation=1))


def test_a_running_sequence_moves_with_its_tokens_and_streams_on() -> None:
    bench = running()
    (move,) = sent(leaving(bench), Move)
    assert (move.dispatch, move.spec.dispatch, move.spec.epoch, move.decode.worker_id) == (1, 2, 1, "d2")
    assert from_u32(move.spec.token_ids) == [1, 2, 3, 5, 6]
    assert tokens(bench.step(1, 2, 7)) == [7]  # the step that ran meanwhile
    actions = bench.joined(2, token=7, index=2, worker="d2")
    assert (tokens(actions), sent(actions, Cancel)) == ([], [])
    assert tokens(bench.step(2, 3, 8, worker="d2")) == [8]
    assert ends(goodbye(bench, "d")) == []
    (ended,) = ends(bench.step(2, 4, 9, "length", worker="d2"))
    assert (ended.finish_reason, ended.num_output_tokens, ended.num_dispatches) == ("length", 5, 1)
    assert bench.core.counters()["sequences_moved"] == 1
    assert bench.core.counters()["redispatches"] == 0
    assert all(not w.dispatches and not w.pending_blocks for w in bench.core.pools.workers.values())


def test_a_moved_sequence_goes_on_elsewhere_when_its_new_worker_dies() -> None:
    bench = running()
    leaving(bench)
    bench.joined(2, token=6, index=1, worker="d2")
    bench.hello("d3", "decode")
    (again,) = sent(bench.core.process_ended(("d2", 1), bench.now), Prefill)
    assert (from_u32(again.spec.token_ids), again.decode.worker_id) == ([1, 2, 3, 5, 6], "d3")


def test_a_sequence_whose_new_worker_dies_before_it_joins_there_goes_on_when_the_old_one_has_left() -> None:
    bench = running()
    leaving(bench)
    goodbye(bench, "d")
    bench.hello("d3", "decode")
    (again,) = sent(bench.core.process_ended(("d2", 1), bench.now), Prefill)
    assert again.decode.worker_id == "d3"


def test_no_new_work_goes_to_who_leaves_and_prompts_on_their_way_there_are_sent_elsewhere() -> None:
    bench = Bench(dead_after_s=99.0)
    bench.submit("a")
    bench.hello("d2", "decode")
    (again,) = sent(leaving(bench), Prefill)
    assert again.decode.worker_id == "d2"
    for i in range(3):
        bench.first(2 + i, finished="stop")
        (prefill,) = sent(bench.submit(f"b{i}"), Prefill)
        assert prefill.decode.worker_id == "d2"


@pytest.mark.parametrize("who", ["d", "d2"])
def test_a_move_that_fails_is_tried_again_and_the_stream_goes_on_meanwhile(who: str) -> None:
    bench = running()
    leaving(bench)
    actions = bench.send(
        who, RequestFailed(coordinator=7, dispatch=2, kind="handoff_failed", message="no room")
    )
    assert [from_u32(c.dispatches) for c in sent(actions, Cancel)] == [[2], [2]]
    assert tokens(bench.step(1, 2, 7)) == [7]
    assert not sent(bench.core.tick(bench.now), Move)
    bench.now += 0.6
    (move,) = sent(leaving(bench), Move)
    assert (move.spec.dispatch, move.spec.epoch) == (3, 2)
    assert tokens(bench.joined(2, token=7, index=2, worker="d2")) == []  # the first move: nobody waits for it


def test_the_goodbye_may_overtake_the_join() -> None:
    bench = running()
    leaving(bench)
    assert [type(action.message) for action in goodbye(bench, "d") if isinstance(action, Send)] == [Fenced]
    assert tokens(bench.joined(2, token=7, index=2, worker="d2")) == [7]  # its last step was lost on the way
    (ended,) = ends(bench.step(2, 3, 8, "length", worker="d2"))
    assert (ended.num_dispatches, bench.core.counters()["redispatches"]) == (1, 0)


def test_the_end_of_its_process_may_overtake_its_goodbye() -> None:
    bench = running()
    leaving(bench)
    assert bench.core.process_ended(("d", 1), bench.now) == []
    assert tokens(bench.joined(2, token=7, index=2, worker="d2")) == [7]
    assert sent(goodbye(bench, "d"), Prefill) == []
    assert (bench.core.counters()["workers_left"], bench.core.counters()["redispatches"]) == (1, 0)


def test_a_move_that_nobody_holds_is_lost() -> None:
    bench = running()
    leaving(bench)
    bench.now += 1.1
    bench.load("d2", [])
    assert [from_u32(c.dispatches) for c in sent(leaving(bench), Cancel)] == [[2], [2]]


def test_a_move_that_the_target_may_hold_is_not_lost_while_the_target_is_silent() -> None:
    bench = running()
    leaving(bench)
    bench.now += 1.1
    assert not sent(bench.load("d", [], draining=True), Cancel)  # it has handed the sequence over
    assert not sent(bench.core.tick(bench.now), Cancel)
    bench.joined(2, token=7, index=2, worker="d2")  # which had to wait for a core
    assert (bench.core.counters()["sequences_moved"], bench.core.counters()["redispatches"]) == (1, 0)


@pytest.mark.parametrize("dies", ["d", "d2"])
def test_either_end_dies_in_mid_move(dies: str) -> None:
    bench = running()
    leaving(bench)
    actions = bench.hello(dies, "decode", incarnation=2)
    if dies == "d":
        (again,) = sent(actions, Prefill)
        assert from_u32(again.spec.token_ids) == [1, 2, 3, 5, 6]
    else:
        assert not sent(actions, Prefill)
        assert tokens(bench.step(1, 2, 7)) == [7]


@pytest.mark.parametrize("end", ["cancel", "finish"])
def test_the_end_in_mid_move_frees_it_on_both_sides(end: str) -> None:
    bench = running()
    leaving(bench)
    actions = bench.core.cancel("r", bench.now) if end == "cancel" else bench.step(1, 2, 7, "length")
    assert {from_u32(c.dispatches)[0] for c in sent(actions, Cancel)} >= {2}
    assert len(ends(actions)) == 1
    assert all(not w.dispatches and not w.pending_blocks for w in bench.core.pools.workers.values())


def test_without_another_worker_it_runs_on_and_what_is_given_back_waits_for_the_next_one() -> None:
    bench = Bench(dead_after_s=99.0)
    bench.submit()
    bench.first(1)
    bench.joined(1)
    assert not sent(leaving(bench), Move)
    assert tokens(bench.step(1, 1, 6)) == [6]
    bench.send("d", RequestFailed(coordinator=7, dispatch=1, kind="preempted", message="it leaves"))
    assert not ends(goodbye(bench, "d"))
    assert bench.core.pools.gap != ""
    assert not ends(bench.submit("later"))  # a worker that left in good order is expected back
    prefills = sent(bench.hello("d", "decode", incarnation=2), Prefill)
    assert [p.spec.request_id for p in prefills] == ["r", "later"]
    assert bench.core.counters()["workers_left"] == 1


def test_an_admin_call_is_repeated_until_the_worker_has_heard() -> None:
    bench = running()
    (worker,), actions = bench.core.drain("d", 4.0)
    assert worker.id == ("d", 1)
    assert [d.timeout_s for d in sent(actions, Drain)] == [4.0]
    assert len(sent(bench.load("d", [1]), Drain)) == 1
    assert not sent(leaving(bench), Drain)
    assert bench.core.drain("nobody", None) == ([], [])
    assert bench.core.drain("", None) == ([], []), "most workers' processes have no name"


def test_a_mixed_process_drains_by_its_own_name() -> None:
    bench = Bench()
    for role in ("prefill", "decode"):
        bench.hello(f"m:{role}", role, process="m", mixed=True)
    leaving, actions = bench.core.drain("m", None)
    assert [w.id for w in leaving] == [("m:prefill", 1), ("m:decode", 1)]
    assert [a.worker[0] for a in actions if isinstance(a, Send)] == ["m:prefill", "m:decode"]
    assert [w.id for w in bench.core.pools.workers.values() if not w.draining] == [("p", 1), ("d", 1)]


def test_at_most_a_few_stand_still_at_once() -> None:
    bench = Bench(dead_after_s=99.0, max_num_seqs=20)
    for i in range(1, 10):
        bench.submit(f"r{i}")
        bench.first(i)
        bench.joined(i)
    bench.hello("d2", "decode")
    everything = list(range(1, 10))
    assert len(sent(bench.load("d", everything, draining=True), Move)) == 4
    assert len(sent(bench.load("d", everything, draining=True), Move)) == 0
    assert len(sent(bench.joined(10, index=0, worker="d2"), Move)) == 1
