"""A prompt whose answer must follow a grammar: offered at once, computed as far as can be, finished once the
grammar is there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from support.receivers import receiver

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import StepOutput
from splitserve.engine.step.constraint import CompileGrammar
from splitserve.prefill.core import PrefillCore
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.handoff import protocol as act
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    FirstToken,
    Meet,
    ModelIdentity,
    Peer,
    Prefill,
    RequestFailed,
    RequestSpec,
    SamplingParams,
    u32,
)

MODEL = ModelIdentity(kv_name="m", dtype="float32", block_size=4, cache_map=states(1, 64), block_bytes=64)
MEET = Meet(worker_id="p", incarnation=1, host="h", pid=1, model=MODEL, movers=("shm",))
KEY = (7, 1)


class Matcher:
    def __init__(self) -> None:
        self.reason = ""

    def failure(self, num_outputs: int) -> str:
        return self.reason

    def mask(self, output_token_ids: Sequence[int]) -> NDArray[np.int32]:
        return np.zeros(1, np.int32)


def asked() -> PrefillCore:
    scheduler = PrefillScheduler(BlockManager(16), 4, "m", 8, 4)
    core = PrefillCore(MEET, scheduler, receiver(MEET, scheduler.blocks), frozenset(), 64)
    spec = RequestSpec(
        request_id="r",
        epoch=0,
        dispatch=1,
        coordinator=7,
        token_ids=u32([1, 2, 3, 4, 5, 6]),
        num_prompt_tokens=5,
        sampling=SamplingParams(max_tokens=9, grammar=b"g"),
        deadline_s=60.0,
    )
    core.from_coordinator(Prefill(spec=spec, decode=Peer(worker_id="d", incarnation=1, address="x")), 0.0)
    return core


def reported(core: PrefillCore) -> list[object]:
    return [action.message for action in core.take(0.0) if isinstance(action, act.ToCoordinator)]


def test_it_is_offered_before_its_grammar_is_there() -> None:
    core = asked()
    assert core.schedule(0.0) is None
    actions = core.take(0.0)
    assert [action for action in actions if isinstance(action, CompileGrammar)] == [
        CompileGrammar(KEY, b"g", (6,))
    ]
    assert any(isinstance(action, act.Connect) for action in actions)  # on the way to its decode worker
    core.grammar_compiled(KEY, Matcher())
    step = core.schedule(0.0)
    assert step is not None
    core.complete(step, StepOutput(np.array([5], np.int32)), 0.1)
    (first,) = reported(core)
    assert isinstance(first, FirstToken)
    assert (first.index, first.token) == (1, 5)


def test_a_grammar_that_is_none_ends_the_request_and_no_other() -> None:
    core = asked()
    core.schedule(0.0)
    reported(core)
    core.grammar_failed(KEY, "no grammar")
    (failed,) = reported(core)
    assert isinstance(failed, RequestFailed)
    assert failed.kind == "refused"
    assert core.blocks.num_used == 0
    core.grammar_failed(KEY, "again")
    core.grammar_compiled(KEY, Matcher())
    assert reported(core) == []


def test_a_grammar_that_cannot_go_on_ends_the_request() -> None:
    core, matcher = asked(), Matcher()
    core.grammar_compiled(KEY, matcher)
    step = core.schedule(0.0)
    assert step is not None
    matcher.reason = "too complex"
    core.complete(step, StepOutput(np.array([0], np.int32)), 0.1)
    (failed,) = reported(core)
    assert isinstance(failed, RequestFailed)
    assert "too complex" in failed.message
    assert core.blocks.num_used == 0


def test_a_worker_is_busy_only_with_what_may_be_in_a_step() -> None:
    """One that is busy without a step for long is taken for dead."""
    core = asked()
    assert not core.load().busy
    core.grammar_compiled(KEY, Matcher())
    assert core.load().busy
