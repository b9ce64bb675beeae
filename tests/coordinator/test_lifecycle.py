"""The lifecycle, message by message. (Under an adversary: tests/simulation.)"""

from __future__ import annotations

from typing import Any

import pytest
from support.lifecycle_bench import MODEL, Bench, Sink, ends, sent, tokens

from splitserve.coordinator.flight import Action, Push, PushPromptLogprobs, Send
from splitserve.coordinator.lifecycle import Lifecycle
from splitserve.coordinator.request import GenerationRequest
from splitserve.transport.messages import (
    Alive,
    Cancel,
    Fenced,
    FirstToken,
    Load,
    Prefill,
    RequestFailed,
    Sampling,
    TokenLogprobs,
    Welcome,
    from_u32,
)


def test_a_request_from_submission_to_its_end() -> None:
    bench = Bench()
    (prefill,) = sent(bench.submit(), Prefill)
    assert from_u32(prefill.spec.token_ids) == [1, 2, 3]
    assert prefill.decode.worker_id == "d"
    bench.now = 1.0
    assert tokens(bench.first(1, queue_s=0.25)) == [5]
    bench.now = 1.5
    assert tokens(bench.joined(1)) == []  # the first token, repeated
    bench.now = 2.0
    assert tokens(bench.step(1, 1, 6)) == [6]
    bench.now = 3.5
    (ended,) = ends(bench.step(1, 2, 7, "stop"))
    assert ended.finish_reason == "stop"
    assert (ended.stages.queue, ended.stages.prefill, ended.stages.handoff, ended.stages.decode) == (0.25, 0.75, 0.5, 2.0)
    assert bench.core.num_flights == 0


def test_the_join_may_overtake_the_first_token() -> None:
    bench = Bench()
    bench.submit()
    assert tokens(bench.joined(1)) == [5]
    assert tokens(bench.step(1, 1, 6)) == [6]
    assert tokens(bench.first(1)) == []


@pytest.mark.parametrize("joined_first", [False, True])
def test_cached_tokens_are_what_the_first_word_of_the_first_attempt_says(joined_first: bool) -> None:
    bench = Bench()
    bench.submit()
    for word in (bench.joined, bench.first) if joined_first else (bench.first, bench.joined):
        word(1, num_cached_tokens=2)
    bench.say("d", RequestFailed(coordinator=7, dispatch=1, kind="preempted", message="no room"))
    bench.first(2, index=1, num_cached_tokens=3)  # its own blocks of the first time
    bench.joined(2, index=1)
    (ended,) = ends(bench.step(2, 2, 7, "stop"))
    assert ended.num_cached_tokens == 2


def test_a_doubled_or_late_token_is_dropped_and_a_lost_one_starts_a_new_epoch() -> None:
    bench = Bench()
    bench.submit()
    bench.first(1)
    bench.joined(1)
    bench.step(1, 1, 6)
    assert tokens(bench.step(1, 1, 6)) == []
    actions = bench.step(1, 3, 8)  # index 2 never came
    assert tokens(actions) == []
    (again,) = sent(actions, Prefill)
    assert (again.spec.epoch, from_u32(again.spec.token_ids), again.spec.num_prompt_tokens) == (1, [1, 2, 3, 5, 6], 3)
    assert {from_u32(c.dispatches)[0] for c in sent(actions, Cancel)} == {1}
    assert tokens(bench.step(1, 2, 9)) == []  # the old epoch speaks no more
    assert tokens(bench.first(again.spec.dispatch, token=7, index=2)) == [7]


def test_a_silent_decode_worker_is_dead_and_its_request_goes_on() -> None:
    bench = Bench()
    bench.submit()
    bench.first(1)
    bench.joined(1)
    bench.hello("d2", "decode")
    bench.now = 1.0
    bench.load("p", [])
    bench.say("d2", Load.model_validate({**_idle("d2")}))
    bench.now = 2.0
    actions = bench.core.tick(bench.now)
    (again,) = sent(actions, Prefill)
    assert again.decode.worker_id == "d2"
    assert [f.reason != "" for f in sent(bench.load("d", [1]), Fenced)] == [True]  # should it come back


def _idle(name: str) -> dict[str, Any]:
    numbers = ("blocks_cached", "blocks_used", "blocks_leased", "num_running", "num_waiting", "num_waiting_tokens", "steps")
    return {"worker_id": name, "incarnation": 1, "blocks_free": 50, "busy": False, "accepting": True, **dict.fromkeys(numbers, 0)}


def test_a_busy_worker_without_progress_is_dead() -> None:
    bench = Bench(progress_timeout_s=5.0)
    bench.submit()
    for _ in range(30):
        bench.now += 0.2
        bench.load("p", [1], steps=3, busy=True)
        bench.load("d", [1])
        bench.core.tick(bench.now)
    assert [w.role for w in bench.core.pools.workers.values()] == ["decode"]
    assert bench.core.num_queued == 1  # until a prefill worker comes


def test_a_worker_that_says_nothing_is_silent_and_not_busy() -> None:
    bench = Bench(progress_timeout_s=3.0, dead_after_s=4.0)
    bench.load("p", [], steps=3, busy=True)
    bench.load("d", [])
    for _ in range(39):
        bench.now += 0.1
        bench.core.tick(bench.now)
    assert len(bench.core.pools.workers) == 2
    bench.now += 0.2
    bench.core.tick(bench.now)
    assert [reason.partition(" for ")[0] for reason in bench.core.reasons_lost.values()] == ["silent", "silent"]


def test_a_worker_whose_connection_is_gone_is_dead_sooner_unless_it_comes_back() -> None:
    bench = Bench(dead_after_s=5.0, unreachable_s=0.25)
    asked: list[Action] = []

    def later(seconds: float) -> None:
        bench.now += seconds
        asked.extend(bench.core.tick(bench.now))

    for broken in (False, True):
        bench.load("p", [])
        bench.load("d", [])
        later(0.15)
        assert not asked
        later(0.16)  # its heartbeat is overdue: it is spoken to
        assert [a.worker[0] for a in asked if isinstance(a, Send) and isinstance(a.message, Alive)] == ["p", "d"]
        bench.core.reached(("d", 1), False, bench.now)
        later(0.2)
        bench.core.reached(("d", 1), not broken, bench.now)
        later(0.1)
        assert (("d", 1) in bench.core.pools.workers) == (not broken)
        asked.clear()
    assert "its connection is gone" in bench.core.reasons_lost[("d", 1)]


def _found_dead_after(phase: float, told: bool) -> float:
    """Seconds from the end of worker d's process, on another host, until its requests go elsewhere. ``phase``: of its heartbeats, and of
    the coordinator's ticks; ``told``: ZeroMQ says that some connection has ended."""
    bench = Bench()
    killed, heartbeat, tick = 2.0, 0.25 * phase, 0.05 * ((7 * phase) % 1)
    while ("d", 1) in bench.core.pools.workers:
        assert bench.now < killed + 5
        bench.now = min(heartbeat, tick)
        if bench.now == heartbeat:
            bench.load("p", [])
            if bench.now < killed:
                bench.load("d", [])
            heartbeat += 0.25
        else:
            if told and killed <= bench.now < killed + 0.05:
                bench.core.connection_lost()
            for said in bench.core.tick(bench.now):
                if isinstance(said, Send):
                    too_early = bench.now < killed + 0.002  # ZeroMQ has not taken the connection down yet
                    bench.core.reached(said.worker, said.worker[0] == "p" or too_early, bench.now)
            tick += 0.05
    assert ("p", 1) in bench.core.pools.workers
    return bench.now - killed


def test_a_killed_worker_of_another_host_is_found_within_0_4_s() -> None:
    """In virtual time with the ordinary limits, whenever it dies. (On the coordinator's host its end is seen at once.) Without word of a
    lost connection it is 0.65 s: a heartbeat has to be late first."""
    phases = [i / 97 for i in range(97)]
    assert 0.25 < max(_found_dead_after(phase, told=True) for phase in phases) <= 0.4
    assert 0.5 < max(_found_dead_after(phase, told=False) for phase in phases) <= 0.65


def test_whose_connection_comes_back_in_time_is_not_dead() -> None:
    bench = Bench(dead_after_s=5.0)
    bench.core.connection_lost()
    for spoken in (False, False, False, True, True, True, True, True):
        bench.now += 0.05
        said = [a for a in bench.core.tick(bench.now) if isinstance(a, Send)]
        assert said or bench.now > 0.2, "until it is reached again it is spoken to"
        for send in said:
            bench.core.reached(send.worker, send.worker[0] == "p" or spoken, bench.now)
    assert len(bench.core.pools.workers) == 2


def test_a_coordinator_that_stands_still_just_as_a_connection_ends_finds_out_whose() -> None:
    """What it said before seemed to reach everybody, and nothing else makes it speak: no heartbeat is due for hours."""
    bench = Bench(heartbeat_s=9000.0, dead_after_s=9000.0)
    bench.core.connection_lost()
    for seconds in (0.0, 3.0, *[0.05] * 10):
        bench.now += seconds
        for said in bench.core.tick(bench.now):
            if isinstance(said, Send):
                bench.core.reached(said.worker, said.worker[0] == "p" or bench.now == 0.0, bench.now)
    assert set(bench.core.pools.workers) == {("p", 1)}


def test_the_coordinators_own_stall_is_nobodys_silence() -> None:
    bench = Bench()
    bench.core.tick(bench.now)
    bench.now = 10.0
    bench.core.tick(bench.now)
    assert len(bench.core.pools.workers) == 2


def test_retries_are_bounded_but_preemption_is_no_failure() -> None:
    bench = Bench(max_attempts=3)
    bench.submit()
    last: list[Action] = []
    for dispatch in range(1, 8):
        bench.joined(dispatch, index=0)
        failed = RequestFailed(coordinator=7, dispatch=dispatch, kind="preempted", message="full")
        last = bench.say("d", failed)
        assert not ends(last)
    for dispatch in range(8, 11):
        last = bench.say("p", RequestFailed(coordinator=7, dispatch=dispatch, kind="internal", message="boom"))
        if dispatch == 9:  # the second failure in a row: the next attempt waits a little
            assert not sent(last, Prefill)
            bench.now += 0.24
            assert not sent(bench.load("d", []), Prefill)
            bench.now += 0.02
            assert len(sent(bench.load("d", []), Prefill)) == 1
    (ended,) = ends(last)
    assert ended.error == "failed"
    assert "boom" in ended.message


def test_a_retry_waits_four_seconds_at_most() -> None:
    """Where many attempts are allowed, each wait was four times the one before it, without end."""
    bench = Bench(max_attempts=20)
    bench.submit()
    for dispatch in range(1, 12):
        bench.say("p", RequestFailed(coordinator=7, dispatch=dispatch, kind="internal", message="boom"))
        bench.now += 4.01
        bench.load("p", [])
        bench.load("d", [])
        assert bench.core.flights[0].dispatch == dispatch + 1


def test_what_failed_at_one_decode_worker_is_tried_at_another() -> None:
    bench = Bench()
    bench.hello("d2", "decode")
    (prefill,) = sent(bench.submit(), Prefill)
    for dispatch in (1, 2, 3):
        worker = prefill.decode.worker_id
        actions = bench.say("p", RequestFailed(coordinator=7, dispatch=dispatch, kind="handoff_failed", message="corrupt twice"))
        bench.now += 1.1
        for name in ("p", "d", "d2"):
            actions += bench.load(name, [])
        (prefill,) = sent(actions, Prefill)
        assert prefill.decode.worker_id != worker


def test_notes_are_compared_with_every_heartbeat() -> None:
    bench = Bench()
    bench.submit()
    (orphans,) = sent(bench.load("d", [1, 55]), Cancel)
    assert from_u32(orphans.dispatches) == [55]
    bench.now = 1.2
    bench.load("p", [])  # it does not know of dispatch 1
    bench.load("d", [])
    (again,) = sent(bench.core.tick(bench.now), Prefill)
    assert again.spec.epoch == 1


@pytest.mark.parametrize("silent", ["p", "d"])
def test_a_silent_worker_has_lost_nothing_until_it_is_dead(silent: str) -> None:
    """A worker that got no processor for some seconds, and was allowed to, used to be four "lost" attempts in a row: status 500."""
    bench = Bench(dead_after_s=60.0)
    bench.submit()
    bench.load("p", [])
    bench.load("d", [])
    if silent == "d":
        bench.first(1)
    actions: list[Action] = []
    while bench.now < 20:
        bench.now += 0.2
        actions += bench.load("d" if silent == "p" else "p", [])
        actions += bench.core.tick(bench.now)
    assert not ends(actions)
    assert not sent(actions, Prefill)
    assert not sent(actions, Cancel)
    actions = bench.load("p", []) + bench.load("d", [])  # now it speaks, and does not know of it
    (again,) = sent(actions + bench.core.tick(bench.now), Prefill)
    assert again.spec.epoch == 1


def test_requests_wait_here_while_the_workers_are_full_and_priorities_matter() -> None:
    bench = Bench()
    assert len(sent(bench.submit("a", prompt_token_ids=[1] * 40), Prefill)) == 1
    assert not sent(bench.submit("slow", prompt_token_ids=[1] * 40, priority=5), Prefill)
    assert not sent(bench.submit("fast", prompt_token_ids=[2] * 40, priority=1), Prefill)
    (next_one,) = sent(bench.first(1), Prefill)
    assert next_one.spec.request_id == "fast"


def test_a_short_prompt_overtakes_a_long_one_that_has_no_room_but_not_for_ever() -> None:
    bench = Bench()
    bench.submit("a", prompt_token_ids=[1] * 40)
    assert not sent(bench.submit("long", prompt_token_ids=[2] * 60), Prefill)
    assert len(sent(bench.submit("short", prompt_token_ids=[3] * 8), Prefill)) == 1
    bench.now = 3.0
    for name in ("p", "d"):
        bench.load(name, [1, 2])
    assert not sent(bench.submit("late", prompt_token_ids=[4] * 8), Prefill)  # long is starving


def test_who_comes_back_from_a_lost_worker_is_dispatched_before_all_that_wait() -> None:
    """Even before higher priorities, and where the prefill worker has as many new prompts ahead as it is given."""
    bench = Bench()
    bench.submit("old", prompt_token_ids=[1] * 40, priority=9)
    bench.first(1)
    bench.joined(1)
    bench.hello("d2", "decode")
    bench.load("d", [1], blocks_free=0)
    assert len(sent(bench.submit("new", prompt_token_ids=[2] * 40), Prefill)) == 1  # to be handed to d2
    assert not sent(bench.submit("urgent", prompt_token_ids=[3] * 40, priority=1), Prefill)
    (again,) = sent(bench.core.worker_ended(("d", 1), bench.now), Prefill)
    assert again.spec.request_id == "old"


def test_nobody_takes_the_room_that_one_who_comes_back_needs() -> None:
    bench = Bench()
    bench.submit("long", prompt_token_ids=[1] * 40)
    bench.submit("other", prompt_token_ids=[2] * 4)
    bench.load("d", [2], blocks_free=8)  # too little for the long one
    bench.say("p", RequestFailed(coordinator=7, dispatch=1, kind="preempted", message="no"))
    assert bench.core.num_queued == 1
    assert not sent(bench.submit("short", prompt_token_ids=[3] * 4), Prefill)
    (again, after) = sent(bench.load("d", [2], blocks_free=50), Prefill)
    assert (again.spec.request_id, after.spec.request_id) == ("long", "short")


def test_refusals() -> None:
    empty = Lifecycle(7, "hybrid")
    request = GenerationRequest("r", [1], Sampling(max_tokens=1), Sink(), 0.0, 10.0)
    assert ends(empty.submit(request, 0.0))[0].error == "unavailable"
    bench = Bench(max_queue=1)
    bench.submit("a", prompt_token_ids=[1] * 40)
    bench.submit("b", prompt_token_ids=[1] * 40)
    assert ends(bench.submit("c"))[0].error == "overloaded"
    assert "99" in ends(Bench().submit("d", prompt_token_ids=[1] * 100))[0].message


def test_who_is_missing_or_does_not_fit_is_said() -> None:
    bench = Bench()
    bench.core.pools.remove(bench.core.pools.workers[("d", 1)])
    assert ends(bench.submit())[0].message == "no decode worker is connected"
    other = MODEL.model_copy(update={"block_size": 8})
    hello = bench.core.pools.workers[("p", 1)].hello.model_copy(update={"worker_id": "x", "role": "decode", "model": other})
    bench.core.receive(("x", 1), hello, bench.now)
    (misfit, _) = bench.core.pools.misfits()
    assert "block size differs (4 and 8)" in misfit
    assert "block size differs (4 and 8)" in ends(bench.submit())[0].message


def test_the_deadline_ends_it_everywhere() -> None:
    bench = Bench()
    bench.submit(deadline=1.0)
    bench.now = 1.0
    actions = bench.core.tick(bench.now)
    assert [e.error for e in ends(actions)] == ["deadline"]
    assert len(sent(actions, Cancel)) == 2


def test_prompt_logprobs_come_before_any_token() -> None:
    bench = Bench()
    bench.submit(prompt_logprobs=0)
    assert tokens(bench.joined(1)) == []
    assert tokens(bench.step(1, 1, 6)) == []
    actions = bench.first(1, prompt_logprobs=(TokenLogprobs(logprob=-1.0), TokenLogprobs(logprob=-2.0)))
    assert [type(a) for a in actions[:3]] == [PushPromptLogprobs, Push, Push]
    assert tokens(actions) == [5, 6]


def test_a_restarted_worker_replaces_itself() -> None:
    bench = Bench()
    bench.submit()
    actions = bench.hello("p", "prefill", incarnation=2)
    assert len(sent(actions, Welcome)) == 1
    assert len(sent(actions, Prefill)) == 1
    assert bench.say("p", FirstToken(coordinator=7, dispatch=1, index=0, token=5)) != []  # the old incarnation: fenced
    assert bench.core.num_flights == 1


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_cancel_at_any_stage_leaves_nothing(stage: str) -> None:
    bench = Bench()
    if stage == "queue":
        bench.submit("other", prompt_token_ids=[1] * 40)
        bench.submit("r", prompt_token_ids=[1] * 40)
    else:
        bench.submit()
    if stage == "decode":
        bench.joined(1)
    actions = bench.core.cancel("r", bench.now)
    assert ends(actions) != []
    assert ends(actions)[0].finish_reason is None
    assert ends(actions)[0].error is None
    bench.core.cancel("other", bench.now)
    assert bench.core.num_flights == bench.core.num_queued == 0
    assert all(not w.dispatches and not w.pending_tokens and not w.pending_blocks for w in bench.core.pools.workers.values())


def test_how_long_a_lost_workers_stream_stood_still_is_booked_by_stage() -> None:
    bench = Bench()
    bench.submit()
    bench.first(1)
    bench.joined(1)
    bench.step(1, 1, 6)
    bench.hello("d2", "decode")
    bench.now = 2.0
    bench.core.worker_ended(("d", 1), bench.now)
    assert not bench.core.last_recoveries, "it has not gone on yet"
    bench.now = 2.5
    assert tokens(bench.first(2, 7, index=2, queue_s=0.1, prefill_s=0.3)) == [7]
    (recovery,) = bench.core.last_recoveries
    assert recovery.reason == "decode worker d was lost (its process has ended)"
    assert (recovery.noticed, recovery.dispatched, recovery.token) == (2.0, 2.0, 2.5)
    assert (recovery.queue_s, recovery.prefill_s, recovery.num_tokens, recovery.num_attempts) == (0.1, 0.3, 5, 1)
    assert recovery.absent_s == 0.0
    assert tokens(bench.joined(2, 7, index=2, worker="d2")) == []
    bench.step(2, 3, 8, worker="d2")
    counters = bench.core.counters()
    assert (counters["recoveries"], counters["recovery_seconds"]) == (1, 0.5)


def test_a_lost_attempt_whose_successor_fails_too_is_one_recovery() -> None:
    bench = Bench()
    bench.submit()
    bench.now = 1.0
    bench.say("p", RequestFailed(coordinator=7, dispatch=1, kind="internal", message="no"))
    bench.now = 2.0
    bench.say("p", RequestFailed(coordinator=7, dispatch=2, kind="preempted", message="again"))
    bench.now = 3.0
    bench.joined(3)
    (recovery,) = bench.core.last_recoveries
    assert (recovery.reason, recovery.noticed, recovery.dispatched, recovery.token, recovery.num_attempts) == ("no", 1.0, 2.0, 3.0, 2)


def test_a_recovery_tells_how_long_there_was_no_worker_at_all() -> None:
    bench = Bench()
    bench.submit()
    bench.first(1)
    bench.joined(1)
    bench.core.worker_ended(("d", 1), 1.0)
    bench.now = 3.0
    bench.hello("d", "decode", incarnation=2)
    bench.now = 3.5
    bench.first(2, 7, index=1)
    (recovery,) = bench.core.last_recoveries
    assert (recovery.noticed, recovery.absent_s, recovery.dispatched, recovery.token) == (1.0, 2.0, 3.0, 3.5)


def test_a_silent_worker_is_dead_after_a_while_also_with_heartbeats_quicker_than_ticks() -> None:
    bench = Bench(heartbeat_s=0.01, dead_after_s=0.5)
    for _ in range(9):
        bench.now += 0.06
        bench.load("d", [])
        bench.core.tick(bench.now)
    assert list(bench.core.reasons_lost) == [("p", 1)]
