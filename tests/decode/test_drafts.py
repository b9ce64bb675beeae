"""Drafts change no token: whatever is accepted or rejected, and whatever happens meanwhile, an answer is what
one token at a time gives, and no block that a prefix cache holds has a rejected token in it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drafting import BLOCK, EOS, Bench, answer, happen, next_token

from splitserve.decode.rows import DecodeResult, DecodeStep
from splitserve.decode.sequences import DecodeSequence
from splitserve.engine.step.batch import StepOutput
from splitserve.transport.messages.blocks import NO_BLOCK

CIRCLE = [1, 4, 6, 5, 2, 0, 1, 4, 6, 5]


@pytest.mark.timeout(120)
@settings(max_examples=150, deadline=None)
@given(data=st.data(), num_blocks=st.integers(12, 40), num_tokens=st.integers(1, 6))
def test_any_order_of_events_gives_the_same_answers(
    data: st.DataObject, num_blocks: int, num_tokens: int
) -> None:
    bench = Bench(num_blocks, num_tokens)
    happen(data, bench)


def test_drafts_are_accepted_and_rejected_and_save_steps() -> None:
    steps = {}
    for num_tokens in (0, 4):
        bench, steps[num_tokens] = Bench(num_tokens=num_tokens), 0
        bench.join(1, CIRCLE, 60, ignore_eos=True)
        while bench.schedule() is not None:
            bench.run()
            steps[num_tokens] += 1
        assert bench.ended == {1: "length"}
        state = bench.states[1][0]
        text = [*CIRCLE]
        while len(text) < len(CIRCLE) + 60:
            text.append(next_token(text))
        assert state.output_token_ids == text[len(CIRCLE) :]
    assert steps[0] == 59
    assert steps[4] < 40
    assert bench.drafted > bench.accepted > 0
    assert bench.accepted == 59 - steps[4]


def drafting(bench: Bench, **more: object) -> tuple[DecodeSequence, DecodeStep]:
    """A sequence whose next step has drafts of three tokens or more."""
    sequence = bench.join(1, [*CIRCLE, *CIRCLE[4:6]], 40, **more)
    assert sequence is not None
    while (step := bench.schedule()) is not None and step.num_draft_tokens < 3:
        bench.run()
    assert step is not None
    return sequence, step


def complete(bench: Bench, step: DecodeStep, tokens: list[int]) -> DecodeResult:
    bench.queue.clear()
    return bench.scheduler.complete(step, StepOutput(np.array(tokens, np.int32)))


@pytest.mark.parametrize("accepted", [0, 1, 3])
def test_the_first_token_that_differs_is_the_last_of_its_step(accepted: int) -> None:
    bench = Bench()
    sequence, step = drafting(bench)
    before, k = len(sequence.state.output_token_ids), step.num_draft_tokens
    sampled = [*step.batch.token_ids[1:].tolist(), 8]
    if accepted < k:
        sampled[accepted:] = [8] * (k + 1 - accepted)
    result = complete(bench, step, sampled)
    assert sequence.state.output_token_ids[before:] == sampled[: accepted + 1]
    assert result.dropped == list(range(accepted + 1, k + 1))
    assert len(sequence.blocks) == -(-(sequence.state.position - 1) // BLOCK), (
        "no block for what was rejected"
    )
    step_after = bench.schedule()
    assert step_after is not None
    assert step_after.batch.positions[0] == sequence.state.position - 1
    assert step_after.batch.token_ids[0] == sampled[accepted]


def test_nothing_counts_behind_a_rejected_token_though_it_is_drafted_later() -> None:
    bench = Bench()
    sequence, step = drafting(bench)
    before = len(sequence.state.output_token_ids)
    later = int(step.batch.token_ids[2])
    result = complete(bench, step, [later] * len(step.sequences))
    assert sequence.state.output_token_ids[before:] == [later]
    assert result.dropped == list(range(1, len(step.sequences)))


def test_a_block_that_only_rejected_tokens_needed_is_given_back() -> None:
    bench = Bench()
    sequence, step = drafting(bench)
    while (int(step.batch.positions[0]) + 1) % BLOCK or not step.num_draft_tokens:
        bench.run()
        again = bench.schedule()
        assert again is not None
        step = again
    num_blocks = len(sequence.blocks)
    complete(bench, step, [8] * len(step.sequences))
    assert len(sequence.blocks) == num_blocks - 1


def test_steps_are_made_ahead_but_for_those_with_drafts() -> None:
    bench = Bench()
    bench.join(1, CIRCLE, 60, ignore_eos=True)
    num_steps = num_ahead = 0
    while bench.schedule() is not None or bench.queue:
        num_ahead += bench.schedule() is not None
        bench.run()
        num_steps += 1
    assert num_steps < 50
    assert bench.accepted == 59 - num_steps
    assert num_ahead > 3


def test_no_step_waits_until_several_prompts_are_sorted() -> None:
    bench = Bench()
    joined = [bench.join(dispatch, CIRCLE, 30, ignore_eos=True) for dispatch in range(3)]
    for num_known in (1, 2, 3, 3):
        assert bench.schedule() is not None
        assert sum(sequence.match is not None for sequence in joined if sequence) == num_known
        bench.run()


def test_a_step_with_drafts_that_is_out_of_memory_is_run_without_them() -> None:
    bench = Bench()
    sequence, _ = drafting(bench)
    bench.fail("shrink")
    assert not sequence.ended
    again = bench.schedule()
    assert again is not None
    assert again.sequences == [sequence]


def test_one_sequence_with_drafts_is_alone_in_a_step_that_raises() -> None:
    bench = Bench()
    drafting(bench)
    bench.fail("separate")
    assert bench.ended == {1: "separate"}
    assert bench.scheduler.blocks.num_used == 0


def test_an_end_token_ends_the_sequence_in_the_middle_of_its_drafts() -> None:
    bench = Bench()
    sequence, step = drafting(bench)
    sampled = [int(step.batch.token_ids[1]), EOS, *step.batch.token_ids[3:].tolist(), 8]
    result = complete(bench, step, sampled)
    assert result.finished == {1: "stop"}
    assert sequence.state.output_token_ids[-1] == EOS
    assert bench.scheduler.blocks.num_used == 0


def test_no_draft_goes_beyond_max_tokens() -> None:
    bench = Bench()
    sequence, step = drafting(bench)
    while not sequence.ended:
        assert int(step.indices.max()) <= sequence.last_index
        bench.run()
        step = bench.schedule() or step
    assert len(sequence.state.output_token_ids) in (40, len(answer([*CIRCLE, *CIRCLE[4:6]], 40)))


def test_without_a_free_block_drafts_stay_in_the_blocks_that_are_there() -> None:
    bench = Bench(num_blocks=12)
    bench.join(1, CIRCLE, 30)
    taken = bench.scheduler.blocks.allocate(bench.scheduler.blocks.num_available - 1)
    assert taken
    for _ in range(12):
        if (step := bench.schedule()) is None:
            break
        for sequence in step.members:
            position = int(step.batch.positions[0])
            assert len(sequence.blocks) == position // BLOCK + 1
        if bench.scheduler.blocks.num_available == 0:
            bench.scheduler.blocks.release(taken[-1:])
            taken.pop()
        bench.run()
        bench.check()
    assert not bench.scheduler.preempted
    assert "preempted" not in bench.ended.values()
    assert bench.drafted


def test_a_sequence_that_is_cancelled_in_flight_leaves_nothing() -> None:
    bench = Bench()
    sequence, step = drafting(bench)
    bench.scheduler.drop(sequence.key)
    assert bench.scheduler.blocks.num_used > 0, "the step writes its blocks"
    _, result = bench.run()
    assert result.dropped == list(range(len(step.sequences)))
    assert bench.scheduler.blocks.num_used == 0


def test_a_sequence_is_renamed_in_all_rows_of_a_step() -> None:
    bench = Bench()
    sequence, step = drafting(bench)
    bench.scheduler.rename(sequence, (2, 77), "other", 100.0)
    assert step.dispatches.tolist() == [77] * len(step.sequences)


@pytest.mark.parametrize("more", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"grammar": b"g"}])
def test_where_a_token_depends_on_more_than_its_text_none_is_drafted(more: dict[str, object]) -> None:
    bench = Bench()
    bench.join(1, CIRCLE, 30, **more)
    while bench.schedule() is not None:
        bench.run()
    assert bench.drafted == 0


@pytest.mark.parametrize("accepts", [True, False])
def test_blocks_leave_the_window_when_they_are_behind_what_was_accepted(accepts: bool) -> None:
    window = 6
    bench = Bench(window=window)
    sequence, step = drafting(bench)
    at_first, num_drafts = (sequence.state.position - window) // BLOCK, 0
    while True:
        num_drafts += step.num_draft_tokens
        tokens = [*step.batch.token_ids[1:].tolist(), 8]
        if not accepts:
            tokens = [(sequence.state.output_token_ids[-1] * 3 + 1) % 7, *[8] * (len(tokens) - 1)]
        complete(bench, step, tokens)
        if sequence.ended:
            break
        first = max(0, sequence.state.position - window) // BLOCK
        assert NO_BLOCK not in sequence.blocks[first:]
        assert set(sequence.blocks[at_first : first - 1]) <= {NO_BLOCK}
        again = bench.schedule()
        assert again is not None
        step = again
    assert num_drafts


def test_text_that_never_repeats_is_made_ahead() -> None:
    bench = Bench()
    sequence = bench.join(1, [1], 60)
    assert sequence is not None
    for token in range(11, 40):
        step = bench.schedule()
        assert step is not None
        assert not step.num_draft_tokens
        assert bench.scheduler.schedule() is not None, "two are in flight"
        for made in list(bench.scheduler._in_flight):
            tokens = np.array([1000 + 2 * token + (made is not step)], np.int32)
            bench.scheduler.complete(made, StepOutput(tokens))
        bench.queue.clear()
