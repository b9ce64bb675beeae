"""Chunks under a budget, in a fair order, over a prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from numpy.typing import NDArray

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.prefill.chunks import PrefillStep
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.transport.messages.messages import Peer, RequestSpec, SamplingParams, u32

BLOCK = 4
PEER = Peer(worker_id="d", incarnation=1, address="x")


def spec(
    dispatch: int, tokens: list[int], prompt_logprobs: int | None = None, grammar: bytes = b""
) -> RequestSpec:
    return RequestSpec(
        request_id=f"r{dispatch}",
        epoch=0,
        dispatch=dispatch,
        coordinator=1,
        token_ids=u32(tokens),
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(max_tokens=4, grammar=grammar),
        prompt_logprobs=prompt_logprobs,
        deadline_s=60.0,
    )


def make(num_blocks: int = 64, budget: int = 16, **more: float) -> PrefillScheduler:
    return PrefillScheduler(BlockManager(num_blocks), BLOCK, "model", budget, max_num_seqs=8, **more)


def run(scheduler: PrefillScheduler, now: float) -> list[int] | None:
    """One step; the dispatches it served, in order."""
    step = scheduler.schedule(now)
    if step is None:
        return None
    check(step)
    scheduler.complete(step)
    return [chunk.sequence.key[1] for chunk in step.chunks]


def check(step: PrefillStep) -> None:
    """The batch's arrays hold the chunks' values."""
    batch = step.batch
    assert [a.dtype for a in (batch.token_ids, batch.block_tables, batch.slot_mapping)] == [
        np.int32,
        np.int32,
        np.int64,
    ]
    assert batch.num_tokens == sum(c.count for c in step.chunks)
    for row, chunk in enumerate(step.chunks):
        start, end = batch.query_start_loc[row], batch.query_start_loc[row + 1]
        assert batch.positions[start:end].tolist() == list(range(chunk.start, chunk.start + chunk.count))
        for position, slot in zip(batch.positions[start:end], batch.slot_mapping[start:end], strict=True):
            assert slot == chunk.sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK
        assert batch.seq_lens[row] == chunk.start + chunk.count


def test_a_long_prompt_does_not_hold_up_a_short_one() -> None:
    scheduler = make()
    scheduler.add(spec(1, list(range(100))), PEER, 0.0)
    assert run(scheduler, 0.0) == [1]
    scheduler.add(spec(2, [7] * 5), PEER, 0.1)
    assert run(scheduler, 0.1) == [2, 1]


def test_a_prompt_that_is_cached_goes_before_a_shorter_one_that_is_not() -> None:
    scheduler = make(budget=100)
    scheduler.add(spec(1, list(range(100))), PEER, 0.0)
    assert run(scheduler, 0.0) == [1]
    scheduler.add(spec(2, [7] * 120), PEER, 0.1)
    scheduler.add(spec(3, [*range(100), *[8] * 30]), PEER, 0.1)
    assert run(scheduler, 0.1) == [3, 2]


def test_to_rank_a_prompt_looks_few_of_its_blocks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = (scheduler := make(num_blocks=4000)).blocks
    sequence, looked_up = scheduler.add(spec(1, list(range(4000))), PEER, 0.0), []
    real = cache.match_prefix
    for num_cached in (0, 1, 500, 999, 1000):
        cache.commit_all(cache.allocate(num_cached) or [], sequence.hashes[:num_cached], None)
        with monkeypatch.context() as patch:
            patch.setattr(cache, "match_prefix", lambda hashes: (looked_up.extend(hashes), real(hashes))[1])
            left = sequence.left(BLOCK, scheduler.prompt_blocks.num_cached)
        assert left == 4000 - BLOCK * min(num_cached, 999)
    assert len(looked_up) <= 5 * 10


def test_a_decode_worker_that_takes_nothing_in_slows_only_its_own_requests() -> None:
    scheduler, other = make(num_blocks=16, budget=64), Peer(worker_id="e", incarnation=2, address="y")
    for i in range(4):
        scheduler.add(spec(i, [i] * 16), PEER, 0.0)  # four blocks each, and none is ever taken in
    assert run(scheduler, 0.0) == [0, 1, 2, 3]
    scheduler.unpin((1, 0))
    scheduler.unpin((1, 1))
    scheduler.add(spec(4, [4] * 16), PEER, 1.0)
    scheduler.add(spec(5, [5] * 16), other, 2.0)
    assert run(scheduler, 9.0) == [5]  # however long the older one has waited
    scheduler.unpin((1, 2))
    assert run(scheduler, 10.0) == [4]


def test_a_lone_decode_worker_may_fill_the_pool() -> None:
    scheduler = make(num_blocks=16, budget=64)
    for i in range(5):
        scheduler.add(spec(i, [i] * 16), PEER, 0.0)
    assert run(scheduler, 0.0) == [0, 1, 2, 3]
    scheduler.unpin((1, 0))
    assert run(scheduler, 1.0) == [4]


def test_short_prompts_do_not_starve_a_long_one() -> None:
    scheduler = make(num_blocks=400)
    scheduler.add(spec(0, list(range(200))), PEER, 0.0)
    served = []
    for i in range(1, 60):
        scheduler.add(spec(i, [i] * 16), PEER, float(i))
        served += run(scheduler, float(i)) or []
    assert 0 in served[10:]
    assert 0 not in scheduler.waiting
    assert 0 not in scheduler.running


def test_who_comes_back_goes_before_shorter_and_older_prompts() -> None:
    scheduler = make(budget=8)
    scheduler.add(spec(1, [1] * 6), PEER, 0.0)
    scheduler.add(replace(spec(2, [2] * 20), epoch=1), PEER, 1.0)
    scheduler.add(spec(3, [3] * 2), PEER, 1.0)
    assert [run(scheduler, 1.0) for _ in range(3)] == [[2], [2], [2, 1]]


def test_a_starving_prompt_keeps_blocks_from_younger_ones() -> None:
    scheduler = make(num_blocks=10)
    scheduler.add(spec(1, list(range(24))), PEER, 0.0)
    assert run(scheduler, 0.0) == [1]  # holds 6 of 10 blocks until its handoff is over
    scheduler.add(spec(2, list(range(100, 132))), PEER, 0.0)  # needs 8
    for i in (3, 4):
        scheduler.add(spec(i, [i] * 4), PEER, 5.0)
    assert run(scheduler, 5.0) == [1]
    assert set(scheduler.waiting) == {(1, 2), (1, 3), (1, 4)}
    scheduler.unpin((1, 1))
    assert (1, 2) not in scheduler.waiting or run(scheduler, 5.1) is not None
    assert (1, 2) in scheduler.running or (1, 2) in scheduler.pinned


def test_a_prompt_whose_prefix_is_being_computed_waits_for_it() -> None:
    scheduler = make()
    tokens = list(range(33))
    scheduler.add(spec(1, tokens), PEER, 0.0)
    scheduler.add(spec(2, tokens), PEER, 0.0)
    assert run(scheduler, 0.0) == [1]
    while (1, 1) not in scheduler.pinned:
        run(scheduler, 0.1)
    run(scheduler, 0.2)
    sequence = scheduler.pinned[(1, 2)]
    assert sequence.num_cached_tokens == 32


def test_prompt_logprobs_need_the_whole_prompt_computed() -> None:
    scheduler = make()
    for dispatch, wanted in ((1, None), (2, 0)):
        scheduler.add(spec(dispatch, list(range(16)), wanted), PEER, 0.0)
        run(scheduler, 0.0)
    assert scheduler.pinned[(1, 2)].num_cached_tokens == 0


@settings(max_examples=80, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=40), min_size=1, max_size=12),
    budget=st.integers(1, 32),
    num_blocks=st.integers(10, 40),
    drops=st.sets(st.integers(0, 11)),
)
def test_every_prompt_is_computed_once_or_dropped_and_no_block_stays(
    prompts: list[list[int]], budget: int, num_blocks: int, drops: set[int]
) -> None:
    scheduler = make(num_blocks, budget)
    for i, tokens in enumerate(prompts):
        scheduler.add(spec(i, tokens), PEER, 0.0)
    done: set[int] = set()
    for turn in range(2000):
        step = scheduler.schedule(turn * 0.1)
        if step is None:
            break
        check(step)
        assert step.batch.num_tokens <= budget
        if turn in drops:
            scheduler.drop((1, turn % len(prompts)))  # in the middle of a step
        for _, chunk in scheduler.complete(step):
            if chunk.is_last:
                done.add(chunk.sequence.key[1])
                scheduler.unpin(chunk.sequence.key)
    assert not scheduler.held
    assert scheduler.blocks.num_used == 0
    assert len(done) >= len(prompts) - len(drops)


def test_a_step_out_of_memory_is_done_again_in_halves_until_it_is_one_block() -> None:
    scheduler = make(budget=16)
    scheduler.add(spec(1, list(range(40))), PEER, 0.0)
    counts = []
    for _ in range(3):
        step = scheduler.schedule(0.0)
        assert step is not None
        counts.append(step.batch.num_tokens)
        given_up = scheduler.shrink(step)
    assert counts == [16, 8, 4]
    assert len(given_up) == 1  # a block cannot be halved: for the core to give back
    while run(scheduler, 0.0) is not None:
        pass
    assert [s.num_computed for s in scheduler.pinned.values()] == [40]


def make_shrunk() -> PrefillScheduler:
    """Its first step, of 16 tokens, has run out of memory."""
    scheduler = make(num_blocks=300, budget=16)
    scheduler.add(spec(1, list(range(1000))), PEER, 0.0)
    step = scheduler.schedule(0.0)
    assert step is not None
    assert not scheduler.shrink(step)
    return scheduler


def test_the_budget_grows_back_after_good_steps() -> None:
    scheduler = make_shrunk()
    sizes = []
    while (step := scheduler.schedule(0.0)) is not None:
        check(step)
        sizes.append(step.batch.num_tokens)
        scheduler.complete(step)
    assert sizes[0] == 8
    assert sizes[-2] == 16


def test_the_budget_does_not_grow_back_while_nothing_is_computed() -> None:
    scheduler = make_shrunk()
    scheduler.drop((1, 1))
    for _ in range(100):
        assert scheduler.schedule(0.0) is None  # a loop that finds nothing to do
    scheduler.add(spec(2, list(range(1000))), PEER, 0.0)
    step = scheduler.schedule(0.0)
    assert step is not None
    assert step.batch.num_tokens == 8


def test_a_prompt_cancelled_during_a_step_out_of_memory_is_gone() -> None:
    scheduler = make()
    scheduler.add(spec(1, list(range(40))), PEER, 0.0)
    step = scheduler.schedule(0.0)
    assert step is not None
    scheduler.drop((1, 1))
    assert not scheduler.shrink(step)
    assert scheduler.schedule(0.0) is None
    assert scheduler.blocks.num_used == 0


def test_the_last_chunk_waits_for_the_grammar() -> None:
    scheduler = make(budget=16)
    sequence = scheduler.add(spec(1, list(range(20)), grammar=b"g"), PEER, 0.0)
    assert run(scheduler, 0.0) == [1]  # what is not the end may be computed
    assert run(scheduler, 0.0) is None
    scheduler.add(spec(2, [1, 2, 3]), PEER, 0.0)
    assert run(scheduler, 0.0) == [2]  # nobody else waits
    sequence.state.matcher = Matcher()
    assert run(scheduler, 0.0) == [1]


class Matcher:
    def failure(self, num_outputs: int) -> str:
        return ""

    def mask(self, output_token_ids: Sequence[int]) -> NDArray[np.int32]:
        return np.zeros(1, np.int32)


def test_a_prompt_gives_back_what_its_sliding_window_has_left_behind() -> None:
    scheduler = make(num_blocks=16, budget=8, window=6)
    scheduler.add(spec(1, list(range(40))), PEER, 0.0)
    used = []
    while run(scheduler, 0.0):
        used.append(scheduler.blocks.num_used)
    assert used == [10, 8, 6, 4, 2][: len(used)]
    assert scheduler.blocks.num_cached == 8  # the next prompt that begins so finds all of it
    scheduler.add(spec(2, [*range(36), 99]), PEER, 1.0)
    run(scheduler, 1.0)
    assert scheduler.pinned[(1, 2)].num_cached_tokens == 36
    for dispatch in (1, 2):
        scheduler.unpin((1, dispatch))
    assert scheduler.blocks.num_used == 0
