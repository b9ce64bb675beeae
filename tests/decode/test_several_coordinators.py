"""Two coordinators share one decode worker: equal dispatch numbers are different requests, and each gets
its own."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np
from support.lifecycle_bench import Bench

from splitserve.decode.core import DecodeCore
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import SamplingState, StepOutput
from splitserve.transport.handoff.protocol import ToCoordinator
from splitserve.transport.handoff.receiver import HandoffReceiver
from splitserve.transport.messages.cache_map import states
from splitserve.transport.messages.messages import (
    Cancel,
    Meet,
    ModelIdentity,
    SamplingParams,
    StepTokens,
    TokenLogprobs,
    from_u32,
    u32,
)
from splitserve.transport.movers.interface import MoverEndpoints

MODEL = ModelIdentity(kv_name="m", dtype="float32", block_size=4, cache_map=states(1, 64), block_bytes=64)
MEET = Meet(worker_id="d", incarnation=1, host="h", pid=1, model=MODEL, movers=("tcp",))


def make() -> DecodeCore:
    blocks = BlockManager(64)
    scheduler = DecodeScheduler(blocks, 4, 8, 64, frozenset([0]))
    endpoints = MoverEndpoints(("tcp",), "h", "", "")
    receiver = HandoffReceiver(("d", 1), MODEL, blocks, endpoints, lambda: core.room(), lambda: b"s" * 16)
    core = DecodeCore(MEET, scheduler, receiver)
    return core


def join(core: DecodeCore, coordinator: int, dispatch: int, max_tokens: int = 5) -> None:
    blocks = core.blocks.allocate(1)
    assert blocks is not None
    state = SamplingState(SamplingParams(max_tokens=max_tokens, temperature=0.0), [1, 2, 3], [9])
    core.scheduler.join((coordinator, dispatch), f"{coordinator}-{dispatch}", state, blocks, b"root", 100.0)


def step(
    core: DecodeCore, tokens: list[int], logprobs: dict[int, TokenLogprobs] | None = None
) -> dict[int, StepTokens]:
    """Run one decode step; return each coordinator's messages."""
    made = core.schedule(0.0)
    assert made is not None
    core.complete(made, StepOutput(np.array(tokens, np.int32), logprobs or {}), 0.0)
    text = [
        a.message
        for a in core.take(0.0)
        if isinstance(a, ToCoordinator) and isinstance(a.message, StepTokens)
    ]
    assert len({message.coordinator for message in text}) == len(text)
    return {message.coordinator: message for message in text}


def test_each_is_told_of_its_own_rows() -> None:
    core = make()
    for coordinator, dispatch, max_tokens in ((100, 1, 5), (200, 1, 2), (100, 2, 5), (200, 2, 5)):
        join(core, coordinator, dispatch, max_tokens)
    reported = step(core, [5, 6, 7, 8], {3: TokenLogprobs(-0.5, (), ())})
    assert {c: (from_u32(m.dispatches), from_u32(m.tokens), m.finished) for c, m in reported.items()} == {
        100: ([1, 2], [5, 7], {}),
        200: ([1, 2], [6, 8], {0: "length"}),
    }
    assert [list(reported[c].logprobs) for c in (100, 200)] == [[], [1]]


def test_a_cancellation_is_its_coordinators_alone() -> None:
    core = make()
    join(core, 100, 1)
    join(core, 200, 1)
    core.from_coordinator(Cancel(coordinator=200, dispatches=u32([1])), 0.0)
    assert list(step(core, [5])) == [100]


def test_who_goes_takes_its_work_along_and_no_more() -> None:
    core = make()
    for coordinator in (100, 200, 300):
        join(core, coordinator, 1)
    core.drop_others(100, 300)
    assert core.scheduler.held == [(100, 1), (300, 1)]


def test_the_load_tells_each_what_the_others_hold() -> None:
    core = make()
    for coordinator, dispatch in ((100, 1), (100, 2), (200, 1)):
        join(core, coordinator, dispatch)
    to_one, to_two = core.load(100), core.load(200)
    assert (from_u32(to_one.dispatches), to_one.num_others) == ([1, 2], 1)
    assert (from_u32(to_two.dispatches), to_two.num_others) == ([1], 2)
    assert to_one.blocks_used == to_two.blocks_used == 3


def test_a_coordinator_gives_no_row_that_another_one_has() -> None:
    bench = Bench()  # four rows
    bench.load("d", [], num_others=3)
    bench.submit("a")
    bench.submit("b")
    assert len(bench.core.queue) == 1
    bench.load("d", [1], num_others=2)
    assert len(bench.core.queue) == 0


def test_prompts_of_others_count_as_work_that_waits() -> None:
    bench = Bench(queued_batches=1)  # sixteen tokens
    bench.load("p", [], num_others_tokens=14)
    bench.submit("a", prompt_token_ids=[1] * 3)  # shorter than the waiting one: it may pass
    bench.submit("b", prompt_token_ids=[1] * 14)
    assert len(bench.core.queue) == 1
    bench.load("p", [1], num_others_tokens=0)
    assert len(bench.core.queue) == 1


def test_a_worker_is_busy_only_with_what_may_be_in_a_step() -> None:
    """One that is busy without a step for long is taken for dead."""
    core = make()
    join(core, 100, 1)
    state = core.scheduler.running[100, 1].state
    state.params = SamplingParams(max_tokens=5, grammar=b"g")
    assert not core.load().busy
    core.grammar_compiled((100, 1), Mock())
    assert core.load().busy
