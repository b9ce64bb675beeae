"""Answers that outlive their coordinator, for clients that have an idempotency key."""

from __future__ import annotations

import numpy as np
import pytest
from decode.test_several_coordinators import MEET, make
from msgspec.structs import replace

from splitserve.decode import answers
from splitserve.decode.core import DecodeCore
from splitserve.engine.step.batch import SamplingState, StepOutput
from splitserve.engine.step.constraint import CompileGrammar
from splitserve.transport.handoff.protocol import ToCoordinator
from splitserve.transport.messages.messages import (
    BlockEvents,
    Joined,
    Message,
    RequestFailed,
    Resume,
    SamplingParams,
    StepTokens,
    from_hashes,
    from_u32,
)

OLD, NEW = 100, 200
A, B = b"a" * 16, b"b" * 16


def join(
    core: DecodeCore, dispatch: int, answer_id: bytes, max_tokens: int = 9, grammar: bytes = b""
) -> None:
    blocks = core.blocks.allocate(1)
    assert blocks is not None
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, grammar=grammar)
    state = SamplingState(sampling, [1, 2, 3], [9])
    core.scheduler.join((OLD, dispatch), f"r{dispatch}", state, blocks, b"root", 500.0, 0.0, answer_id)


def step(core: DecodeCore, tokens: list[int], now: float = 0.0) -> list[Message]:
    made = core.schedule(now)
    assert made is not None
    core.complete(made, StepOutput(np.array(tokens, np.int32), {}), now)
    return taken(core, now)


def taken(core: DecodeCore, now: float) -> list[Message]:
    return [action.message for action in core.take(now) if isinstance(action, ToCoordinator)]


def resume(answer_id: bytes) -> Resume:
    return Resume(coordinator=NEW, dispatch=7, request_id="new", answer_id=answer_id, deadline_s=60.0)


def ask(core: DecodeCore, answer_id: bytes, now: float) -> list[Message]:
    core.from_coordinator(resume(answer_id), now)
    return taken(core, now)


def reported(core: DecodeCore, everything: bool = False) -> tuple[set[bytes], set[bytes]]:
    """Return the answers that are kept now, and those that no longer are."""
    events = core.block_events(everything) or BlockEvents(worker_id="d", incarnation=1)
    return set(from_hashes(events.answers_kept)), set(from_hashes(events.answers_dropped))


def test_a_sequence_goes_on_without_its_coordinator_and_is_resumed_by_the_next() -> None:
    core = make()
    join(core, 1, A)
    join(core, 2, b"")
    step(core, [5, 6])
    assert reported(core) == ({A}, set())
    core.drop_others(NEW)
    assert core.scheduler.held == [(OLD, 1)]
    core.tick(1.0)
    step(core, [4], 1.0)
    in_flight = core.schedule(1.0)
    assert in_flight is not None
    preempted, tokens, joined = ask(core, A, 2.0)
    assert isinstance(preempted, RequestFailed)
    assert (preempted.coordinator, preempted.kind) == (OLD, "preempted")
    assert isinstance(tokens, StepTokens)
    assert (from_u32(tokens.indices), from_u32(tokens.tokens)) == ([0, 1, 2], [9, 5, 4])
    assert isinstance(joined, Joined)
    assert (joined.coordinator, joined.dispatch, joined.index) == (NEW, 7, 2)
    core.complete(in_flight, StepOutput(np.array([3], np.int32), {}), 2.0)
    (later,) = [*taken(core, 2.0)]
    assert isinstance(later, StepTokens)
    assert (later.coordinator, from_u32(later.dispatches), from_u32(later.indices)) == (NEW, [7], [3])
    core.tick(40.0)
    assert core.scheduler.held == [(NEW, 7)], "its coordinator's deadline counts now"
    assert ask(core, A, 40.0) == [], "it was asked twice"


def test_its_grammar_is_compiled_for_whoever_resumes_it() -> None:
    """What was being compiled for its dispatch before came for one that was no more: it never went on."""
    core = make()
    join(core, 1, A, grammar=b"g")
    core.drop_others(NEW)
    core.from_coordinator(resume(A), 1.0)
    assert CompileGrammar((NEW, 7), b"g", (9,)) in core.take(1.0)
    core.grammar_failed((OLD, 1), "the earlier order's answer")
    assert core.scheduler.held == [(NEW, 7)]


def test_without_anybody_who_asks_it_ends_and_frees_its_blocks() -> None:
    core = make()
    join(core, 1, A)
    core.drop_others(NEW)
    core.tick(1.0)
    core.drop_others(NEW)
    core.tick(30.0)
    assert core.scheduler.held == [(OLD, 1)]
    core.tick(31.0)
    assert (core.scheduler.held, core.blocks.num_used) == ([], 0)
    (failed,) = [m for m in ask(core, A, 31.0) if isinstance(m, RequestFailed) and m.coordinator == NEW]
    assert (failed.kind, failed.message) == ("preempted", "the answer is not kept any more")


def test_a_coordinator_that_comes_back_has_its_own_deadline_again() -> None:
    """Its client got an error about a deadline that was far away."""
    core = make()
    join(core, 1, A)
    core.drop_others(NEW)
    core.tick(1.0)
    core.drop_others(NEW, OLD)
    core.tick(499.0)
    assert (core.scheduler.held, taken(core, 499.0)) == ([(OLD, 1)], [])


def test_a_complete_answer_is_kept_for_a_while() -> None:
    core = make()
    join(core, 1, A, max_tokens=2)
    step(core, [5], 1.0)
    assert core.blocks.num_used == 0
    assert reported(core, everything=True) == ({A}, set())
    for _ in range(2):
        (tokens,) = ask(core, A, 2.0)
        assert isinstance(tokens, StepTokens)
        assert (from_u32(tokens.tokens), tokens.finished) == ([9, 5], {1: "length"})
    core.tick(31.0)
    assert reported(core) == (set(), {A})


def test_complete_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "MAX_KEPT_TOKENS", 3)
    core = make()
    for dispatch, answer_id in ((1, A), (2, B)):
        join(core, dispatch, answer_id, max_tokens=2)
        step(core, [5])
    assert reported(core) == ({B}, set())


def test_a_new_incarnation_keeps_it() -> None:
    core = make()
    join(core, 1, A)
    join(core, 2, b"")
    core.drop_others(-1)
    core.rename(replace(MEET, incarnation=2))
    assert core.scheduler.held == [(OLD, 1)]
    assert [type(message) for message in ask(core, A, 1.0)] == [RequestFailed, StepTokens, Joined]
