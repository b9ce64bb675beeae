"""Cached blocks of another worker: a prompt waits for them no longer than it would compute them."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.prefix_rig import BLOCK, CACHED, HASHES, ORDER, PROMPT, SPEC, Rig

from splitserve.engine.step.batch import StepOutput
from splitserve.prefill.prefix_waits import MAX_LATE, PAUSE_S, UNSEEN_S
from splitserve.transport.handoff import protocol as act
from splitserve.transport.messages.messages import Cancel, Offer, Placed, Prefill, Release, u32


def test_a_prompt_waits_for_its_prefix_and_computes_the_rest() -> None:
    rig = Rig()
    rig.prefill.from_coordinator(PROMPT, 0.0)
    rig.source.from_coordinator(ORDER, 0.0)
    assert rig.num_computed() == 0, "it waits"
    rig.tick(0.0)
    assert rig.num_put == CACHED
    assert rig.num_computed() == 30 - CACHED * BLOCK
    assert rig.prefill.load().counters["pulled_tokens"] == CACHED * BLOCK
    assert rig.holds_nothing()


def test_a_prefix_that_comes_before_its_prompt_is_used() -> None:
    rig = Rig()
    rig.source.from_coordinator(ORDER, 0.0)
    rig.tick(0.0)
    rig.prefill.from_coordinator(PROMPT, 0.0)
    assert rig.num_computed() == 30 - CACHED * BLOCK


def test_only_what_is_still_cached_comes() -> None:
    rig = Rig(num_cached=2)
    rig.prefill.from_coordinator(PROMPT, 0.0)
    rig.source.from_coordinator(ORDER, 0.0)
    rig.tick(0.0)
    assert (rig.num_put, rig.num_computed()) == (2, 30 - 2 * BLOCK)


def test_what_is_cached_here_does_not_travel() -> None:
    rig = Rig()
    blocks = rig.prefill.blocks.allocate(3) or []
    rig.prefill.blocks.commit_all(blocks, HASHES[:3], None)
    rig.prefill.blocks.release(blocks)
    rig.prefill.from_coordinator(PROMPT, 0.0)
    rig.source.from_coordinator(ORDER, 0.0)
    rig.tick(0.0)
    assert (rig.num_put, rig.num_computed()) == (CACHED - 3, 30 - CACHED * BLOCK)


@pytest.mark.parametrize("met", [False, True])
def test_a_source_that_has_nothing_says_so(met: bool) -> None:
    rig = Rig()
    if met:
        rig.source.from_coordinator(ORDER, 0.0)
        rig.tick(0.0)
    rig.source.blocks.allocate(20)  # evicts all
    another = replace(PROMPT, spec=replace(SPEC, dispatch=2, request_id="s", salt=b"other"))
    rig.prefill.from_coordinator(another, 0.0)
    assert rig.prefill.scheduler.get((7, 2)).prefix_by > 0.0  # type: ignore[union-attr]
    rig.source.from_coordinator(replace(ORDER, dispatch=2), 0.0)
    rig.tick(0.0)
    assert rig.prefill.scheduler.get((7, 2)).prefix_by == 0.0  # type: ignore[union-attr]


@pytest.mark.parametrize("lost", [Offer, Placed, Release], ids=lambda kind: str(kind.__name__))
def test_a_prefix_that_does_not_come_is_computed(lost: type) -> None:
    rig = Rig(num_cached=0 if lost is Release else CACHED)
    rig.loses = (lost,) if lost is not Placed else (act.Handoff,)
    rig.prefill.from_coordinator(PROMPT, 0.0)
    rig.source.from_coordinator(ORDER, 0.0)
    rig.tick(0.0)
    assert rig.num_computed() == 0
    rig.now = UNSEEN_S
    assert rig.num_computed() == 30
    rig.settle()
    assert rig.holds_nothing() or lost is Offer
    assert rig.prefill.blocks.num_used == 8, "the prompt's own blocks"
    rig.tick(30.0)
    assert rig.holds_nothing()


def test_corrupt_blocks_are_computed() -> None:
    rig = Rig()
    rig.corrupt = True
    rig.prefill.from_coordinator(PROMPT, 0.0)
    rig.source.from_coordinator(ORDER, 0.0)
    rig.tick(0.0)
    assert rig.num_put == 2 * CACHED, "each is sent again, once"
    assert rig.num_computed() == 30
    assert rig.prefill.load().counters["corrupt_blocks"] == 2 * CACHED


def test_the_wait_is_as_long_as_full_steps_would_take() -> None:
    rig = Rig()
    rig.prefill.from_coordinator(
        Prefill(
            spec=replace(SPEC, token_ids=u32(range(100, 164)), num_prompt_tokens=64), decode=PROMPT.decode
        ),
        0.0,
    )
    step = rig.prefill.schedule(0.0)
    assert step is not None
    assert step.is_full
    rig.prefill.complete(step, StepOutput(np.full(1, 5, np.int32)), 6.4)  # a tenth of a second a token
    rig.prefill.from_coordinator(replace(PROMPT, spec=replace(SPEC, dispatch=2, request_id="s")), 10.0)
    waits_until = rig.prefill.scheduler.get((7, 2)).prefix_by  # type: ignore[union-attr]
    assert waits_until == 10.0 + 0.1 * CACHED * BLOCK
    blocks = rig.prefill.blocks.allocate(3) or []
    rig.prefill.blocks.commit_all(blocks, HASHES[:3], None)
    rig.prefill.from_coordinator(replace(PROMPT, spec=replace(SPEC, dispatch=3, request_id="t")), 10.0)
    waits_until = rig.prefill.scheduler.get((7, 3)).prefix_by  # type: ignore[union-attr]
    assert waits_until == 10.0 + 0.1 * (CACHED - 3) * BLOCK, "as long as what is missing here"


def test_a_slow_way_is_waited_for_no_longer() -> None:
    rig = Rig()
    rig.loses = (act.Handoff,)
    waits = []
    for dispatch in range(1, MAX_LATE + 2):
        spec = replace(SPEC, dispatch=dispatch, request_id=f"r{dispatch}", salt=bytes([dispatch]))
        rig.prefill.from_coordinator(replace(PROMPT, spec=spec), rig.now)
        rig.source.from_coordinator(replace(ORDER, dispatch=dispatch), rig.now)
        rig.tick(0.0)
        waits.append(not rig.num_computed())
        rig.now += 10.0
        rig.num_computed()
        rig.prefill.from_coordinator(Cancel(coordinator=7, dispatches=u32([dispatch])), rig.now)
        rig.settle()
    assert waits == [True] * MAX_LATE + [False]
    assert rig.prefill.load().counters["late_pulls"] == MAX_LATE
    rig.now += PAUSE_S
    again = replace(SPEC, dispatch=99, request_id="again", salt=b"x")
    rig.prefill.from_coordinator(replace(PROMPT, spec=again), rig.now)
    assert rig.num_computed() == 0, "one tries again"


@pytest.mark.parametrize("comes", [False, True])
def test_only_a_prefix_that_comes_ends_a_row_of_late_ones(comes: bool) -> None:
    rig = Rig(num_cached=CACHED if comes else 0)
    for _ in range(MAX_LATE - 1):
        rig.prefill._prefix_waits.late(0.0)
    rig.prefill.from_coordinator(PROMPT, 0.0)
    rig.source.from_coordinator(ORDER, 0.0)
    rig.tick(0.0)
    assert rig.num_computed() == 30 - (CACHED * BLOCK if comes else 0), "it waits no more"
    rig.prefill._prefix_waits.late(0.0)
    rig.prefill.from_coordinator(
        replace(PROMPT, spec=replace(SPEC, dispatch=2, request_id="s", salt=b"other")), 0.0
    )
    assert bool(rig.prefill.scheduler.get((7, 2)).prefix_by) == comes  # type: ignore[union-attr]


@pytest.mark.parametrize("first_leaves", [False, True])
def test_a_prefix_of_several_prompts_comes_once(first_leaves: bool) -> None:
    rig = Rig()
    rig.loses = (act.Handoff,) if first_leaves else ()
    for dispatch in (1, 2, 3):
        spec = replace(SPEC, dispatch=dispatch, request_id=f"r{dispatch}")
        rig.prefill.from_coordinator(replace(PROMPT, spec=spec), 0.0)
        rig.source.from_coordinator(replace(ORDER, dispatch=dispatch), 0.0)
    rig.tick(0.0)
    assert rig.num_put == CACHED
    assert rig.prefill.blocks.num_used == (CACHED if first_leaves else 0)
    if first_leaves:
        rig.prefill.from_coordinator(Cancel(coordinator=7, dispatches=u32([1])), 0.0)
        rig.tick(0.0)
    assert not any(s.prefix_by for s in rig.prefill.scheduler.waiting.values())
    assert rig.num_computed() == 30 - (0 if first_leaves else CACHED * BLOCK)
    assert rig.holds_nothing()


def test_what_a_prompt_has_not_waited_for_ends_when_it_begins() -> None:
    rig = Rig()
    rig.loses = (act.Handoff,)
    rig.source.from_coordinator(ORDER, 0.0)
    rig.tick(0.0)
    assert rig.prefill.blocks.num_used == CACHED, "blocks are on their way"
    assert rig.prefill.load().blocks_leased == CACHED
    for _ in range(MAX_LATE):
        rig.prefill._prefix_waits.late(0.0)
    rig.prefill.from_coordinator(PROMPT, 0.0)
    assert rig.num_computed() == 30
    rig.settle()
    assert rig.prefill.blocks.num_used == 8, "the prompt's own blocks"
    assert rig.holds_nothing()


def test_a_prompt_that_has_begun_takes_no_blocks() -> None:
    rig = Rig()
    rig.prefill.from_coordinator(replace(PROMPT, num_prefix_blocks=0), 0.0)
    assert rig.num_computed() == 30
    rig.source.from_coordinator(ORDER, 0.0)
    rig.tick(0.0)
    assert rig.num_put == 0
    assert rig.holds_nothing()


def test_a_cancelled_prompt_frees_both_ends() -> None:
    rig = Rig()
    rig.loses = (act.Handoff,)
    rig.prefill.from_coordinator(PROMPT, 0.0)
    rig.source.from_coordinator(ORDER, 0.0)
    rig.tick(0.0)
    assert not rig.holds_nothing()
    rig.prefill.from_coordinator(Cancel(coordinator=7, dispatches=u32([1])), 0.0)
    rig.settle()
    assert rig.holds_nothing()
    assert rig.prefill.blocks.num_used == 0


def test_an_order_is_carried_out_once() -> None:
    rig = Rig()
    for _ in range(2):
        rig.source.from_coordinator(ORDER, 0.0)
        rig.tick(0.0)
    assert rig.num_put == CACHED


def test_a_worker_that_drains_gets_no_prefix() -> None:
    rig = Rig()
    rig.prefill.drain(0.0)
    rig.source.from_coordinator(ORDER, 0.0)
    rig.tick(0.0)
    assert rig.num_put == 0
    rig.tick(3.0)
    assert rig.holds_nothing()
