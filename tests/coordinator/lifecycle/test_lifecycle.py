"""The lifecycle, message by message. (Under an adversary: tests/simulation.)"""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from support.lifecycle_bench import MODEL, Bench, Sink, ends, sent, tokens

from splitserve.coordinator.lifecycle.actions import Action, Push, PushPromptLogprobs
from splitserve.coordinator.lifecycle.lifecycle import Lifecycle
from splitserve.coordinator.lifecycle.request import Request
from splitserve.transport.messages.messages import (
    Alive,
    Cancel,
    Load,
    Prefill,
    RequestFailed,
    SamplingParams,
    TokenLogprobs,
    from_u32,
)


def test_a_request_from_submission_to_its_end() -> None:
    bench = Bench()
    (prefill,) = sent(bench.submit(), Prefill)
    assert from_u32(prefill.spec.token_ids) == [1, 2, 3]
    assert prefill.decode.worker_id == "d"
    bench.now = 1.0
    assert tokens(bench.first(1, queue_s=0.25, prefill_s=0.75)) == [5]
    bench.now = 1.5
    assert tokens(bench.joined(1, transfer_s=0.5)) == []  # the first token, repeated
    bench.now = 2.0
    assert tokens(bench.step(1, 1, 6)) == [6]
    bench.now = 3.5
    (ended,) = ends(bench.step(1, 2, 7, "stop"))
    assert ended.finish_reason == "stop"
    assert (ended.stages.queue, ended.stages.prefill, ended.stages.handoff, ended.stages.decode) == (
        0.25,
        0.75,
        0.5,
        2.0,
    )
    assert len(bench.core.requests) == 0


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
    bench.send("d", RequestFailed(coordinator=7, dispatch=1, kind="preempted", message="no room"))
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
    assert (again.spec.epoch, from_u32(again.spec.token_ids), again.spec.num_prompt_tokens) == (
        1,
        [1, 2, 3, 5, 6],
        3,
    )
    assert {from_u32(c.dispatches)[0] for c in sent(actions, Cancel)} == {1}
    assert tokens(bench.step(1, 2, 9)) == []  # the old epoch speaks no more
    assert tokens(bench.first(again.spec.dispatch, token=7, index=2)) == [7]


def test_retries_are_bounded_but_preemption_is_no_failure() -> None:
    bench = Bench(max_attempts=3)
    bench.submit()
    last: list[Action] = []
    for dispatch in range(1, 8):
        bench.joined(dispatch, index=0)
        failed = RequestFailed(coordinator=7, dispatch=dispatch, kind="preempted", message="full")
        last = bench.send("d", failed)
        assert not ends(last)
    for dispatch in range(8, 11):
        last = bench.send(
            "p", RequestFailed(coordinator=7, dispatch=dispatch, kind="internal", message="boom")
        )
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
    """With many attempts, each wait was four times the one before it, without a bound."""
    bench = Bench(max_attempts=20)
    bench.submit()
    for dispatch in range(1, 12):
        bench.send("p", RequestFailed(coordinator=7, dispatch=dispatch, kind="internal", message="boom"))
        bench.now += 4.01
        bench.load("p", [])
        bench.load("d", [])
        assert next(iter(bench.core.requests.values())).dispatch == dispatch + 1


def test_what_failed_at_one_decode_worker_is_tried_at_another() -> None:
    bench = Bench()
    bench.hello("d2", "decode")
    (prefill,) = sent(bench.submit(), Prefill)
    for dispatch in (1, 2, 3):
        worker = prefill.decode.worker_id
        actions = bench.send(
            "p",
            RequestFailed(coordinator=7, dispatch=dispatch, kind="handoff_failed", message="corrupt twice"),
        )
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
    """Even before higher priorities, and where the prefill worker has as many new prompts ahead as it is
    given."""
    bench = Bench()
    bench.submit("old", prompt_token_ids=[1] * 40, priority=9)
    bench.first(1)
    bench.joined(1)
    bench.hello("d2", "decode")
    bench.load("d", [1], blocks_free=0)
    assert len(sent(bench.submit("new", prompt_token_ids=[2] * 40), Prefill)) == 1  # to be handed to d2
    assert not sent(bench.submit("urgent", prompt_token_ids=[3] * 40, priority=1), Prefill)
    (again,) = sent(bench.core.process_ended(("d", 1), bench.now), Prefill)
    assert again.spec.request_id == "old"


def test_nobody_takes_the_room_that_one_who_comes_back_needs() -> None:
    bench = Bench()
    bench.submit("long", prompt_token_ids=[1] * 40)
    bench.submit("other", prompt_token_ids=[2] * 4)
    bench.load("d", [2], blocks_free=8)  # too little for the long one
    bench.send("p", RequestFailed(coordinator=7, dispatch=1, kind="preempted", message="no"))
    assert len(bench.core.queue) == 1
    assert not sent(bench.submit("short", prompt_token_ids=[3] * 4), Prefill)
    (again, after) = sent(bench.load("d", [2], blocks_free=50), Prefill)
    assert (again.spec.request_id, after.spec.request_id) == ("long", "short")


def test_refusals() -> None:
    empty = Lifecycle(7, "hybrid")
    request = Request("r", [1], SamplingParams(max_tokens=1), Sink(), 0.0, 10.0)
    assert ends(empty.submit(request, 0.0))[0].error == "unavailable"
    bench = Bench(max_queue=1)
    bench.submit("a", prompt_token_ids=[1] * 40)
    bench.submit("b", prompt_token_ids=[1] * 40)
    assert ends(bench.submit("c"))[0].error == "overloaded"
    bench = Bench()
    bench.hello("short", "decode", max_model_len=100)
    assert "99" in ends(bench.submit("d", prompt_token_ids=[1] * 100))[0].message


IDLE = {
    **dict.fromkeys(
        (
            "blocks_cached",
            "blocks_used",
            "blocks_leased",
            "num_running",
            "num_waiting",
            "num_waiting_tokens",
            "steps",
        ),
        0,
    ),
    "blocks_free": 50,
    "busy": False,
    "accepting": True,
}


def test_workers_of_two_revisions_serve_together_and_it_is_logged() -> None:
    bench, newer = Bench(), replace(MODEL, revision="with another template")
    hello = replace(bench.core.pools.workers[("d", 1)].hello, worker_id="x", model=newer)
    bench.core.receive(("x", 1), hello, bench.now)
    (sentence,) = bench.core.pools.misfits()
    assert "p and x serve two revisions of one model" in sentence
    bench.core.pools.remove(bench.core.pools.workers[("d", 1)], "gone")
    (prefill,) = sent(bench.submit(), Prefill)
    assert prefill.decode.worker_id == "x"


def test_who_is_missing_or_does_not_fit_is_said() -> None:
    bench = Bench()
    bench.core.pools.remove(bench.core.pools.workers[("d", 1)], "gone")
    assert ends(bench.submit())[0].message == "no decode worker is connected"
    other = replace(MODEL, block_size=8)
    hello = replace(bench.core.pools.workers[("p", 1)].hello, worker_id="x", role="decode", model=other)
    bench.core.receive(("x", 1), hello, bench.now)
    (misfit, _) = bench.core.pools.misfits()
    assert "block size differs (4 and 8)" in misfit
    assert "block size differs (4 and 8)" in ends(bench.submit())[0].message
    (alive,) = sent(bench.send("x", Load(worker_id="x", incarnation=1, **IDLE)), Alive)
    assert "this decode worker gets no work" in alive.misfit
    assert "its block size is not that of p (8 here, 4 there)" in alive.misfit
    bench.hello("d", "decode")
    bench.core.pools.remove(bench.core.pools.workers[("x", 1)], "gone")
    (alive,) = sent(bench.load("p", []), Alive)
    assert alive.misfit == ""


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
    assert len(bench.core.requests) == len(bench.core.queue) == 0
    assert all(
        not w.dispatches and not w.pending_tokens and not w.pending_blocks
        for w in bench.core.pools.workers.values()
    )
