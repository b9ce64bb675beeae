"""A model's own drafts change no token either. They follow the newest token or are dropped, and are asked for
where they were right often enough."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.drafting import BLOCK, EOS, Bench, Guess, answer, happen, next_token

from splitserve.decode.drafts import Drafts
from splitserve.decode.model_drafts import FIRST_RATE, ModelDrafts
from splitserve.decode.rows import DecodeStep
from splitserve.decode.sequences import DecodeSequence
from splitserve.decode.text_match import TextMatch
from splitserve.engine.step.batch import SamplingState
from splitserve.transport.messages.messages import SamplingParams

NEW = [1, 2, 3, 5]
"""A prompt without a repetition."""


def right(text: list[int], count: int) -> list[int]:
    guessed = [*text]
    for _ in range(count):
        guessed.append(next_token(guessed))
    return guessed[len(text) :]


def wrong(text: list[int], count: int) -> list[int]:
    return [(token + 1) % 7 for token in right(text, count)]


def sometimes(seed: int, chance: float) -> Guess:
    """Right tokens up to one that may be wrong; now and then fewer than asked for."""
    draw = Random(seed)

    def guess(text: list[int], count: int) -> list[int]:
        tokens = [token if draw.random() < chance else draw.randrange(11) for token in right(text, count)]
        return tokens[: draw.choice((0, 1, count, count, count))]

    return guess


def joined(
    bench: Bench, dispatch: int = 1, prompt: list[int] = NEW, max_tokens: int = 60, **more: object
) -> DecodeSequence:
    """A sequence whose text never repeats, for all that is known."""
    sequence = bench.join(dispatch, prompt, max_tokens, **{"ignore_eos": True} | more)
    assert sequence is not None
    sequence.match = TextMatch(SamplingState(SamplingParams(max_tokens=1), [0], []))
    return sequence


def scheduled(bench: Bench) -> DecodeStep:
    step = bench.schedule()
    assert step is not None
    return step


@pytest.mark.timeout(120)
@settings(max_examples=150, deadline=None)
@given(
    data=st.data(),
    num_blocks=st.integers(12, 40),
    num_tokens=st.integers(1, 6),
    chance=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_any_order_of_events_gives_the_same_answers(
    data: st.DataObject, num_blocks: int, num_tokens: int, chance: float
) -> None:
    bench = Bench(num_blocks, num_tokens, guess=sometimes(num_blocks, chance))
    happen(data, bench)


def test_right_drafts_save_steps_and_are_inputs_of_the_step_behind() -> None:
    bench, num_steps = Bench(num_tokens=3, guess=right), 0
    sequence = joined(bench)
    drafted: list[int] = []
    while (step := bench.schedule()) is not None:
        assert bench.schedule() is None, "it is awaited"
        assert step.batch.token_ids[1:].tolist() == drafted
        assert step.drafts.by_model == ({sequence} if drafted else set())
        _, result = bench.run()
        drafted = result.output.drafts.get(len(step.sequences) - 1, [])
        num_steps += 1
    assert bench.accepted == bench.drafted == 59 - num_steps
    assert num_steps < 22
    assert bench.ended == {1: "length"}


def test_each_row_has_the_row_that_its_input_drafts_and_how_much_to_draft() -> None:
    bench = Bench(num_tokens=3, guess=right)
    for dispatch in (1, 2):
        joined(bench, dispatch, NEW[:dispatch])
    scheduled(bench)
    bench.run()
    batch = scheduled(bench).batch
    assert batch.draft_of is not None
    assert batch.draft_of.tolist() == [-1, -1, 0, 2, 3, 1, 5], "the second had room for two in its block"
    assert batch.num_drafts is not None
    assert batch.num_drafts.dtype == batch.draft_of.dtype == np.int32
    positions = batch.positions.tolist()
    assert batch.num_drafts.tolist() == [min(3, BLOCK - position % BLOCK) for position in positions]


def test_no_token_is_asked_for_beyond_an_answers_end() -> None:
    bench = Bench(num_tokens=4, guess=right)
    sequence = joined(bench)
    while (step := bench.schedule()) is not None:
        if step.batch.num_drafts is not None:
            last = step.indices.astype(np.int64) + step.batch.num_drafts
            assert last.max() < sequence.last_index, "it would be no row's input"
        bench.run()
    assert bench.ended == {1: "length"}


def test_no_draft_goes_beyond_an_end_token() -> None:
    bench = Bench(num_tokens=4, guess=lambda _, count: [6, EOS, 6, 6][:count])
    joined(bench, ignore_eos=False)
    scheduled(bench)
    bench.run()
    assert scheduled(bench).batch.token_ids[1:].tolist() == [6]


def test_drafts_of_rows_that_were_rejected_are_not_kept() -> None:
    """There are some of each row: those behind the newest token are kept, if there are any."""
    for accepted, from_rows, kept in ((0, (0, 1, 2, 3), [20]), (2, (0, 1, 2, 3), [22]), (2, (0, 1, 3), [])):
        guess: Guess = lambda text, count, n=accepted: [*right(text, n), 50, 50, 50][:count]  # noqa: E731
        bench = Bench(num_tokens=3, guess=guess)
        sequence = joined(bench, prompt=[1, 2, 3, 4])
        scheduled(bench)
        bench.run()
        assert len(scheduled(bench).sequences) == 4
        before = len(sequence.state.output_token_ids)
        bench.run({row: [20 + row] for row in from_rows})
        assert len(sequence.state.output_token_ids) == before + accepted + 1
        assert sequence.model_drafts is not None
        assert sequence.model_drafts.tokens == kept


@pytest.mark.parametrize("how", ["separate", "shrink"])
def test_a_step_that_fails_drops_them(how: str) -> None:
    bench = Bench(num_tokens=3, guess=right)
    sequence, other = joined(bench, 1), joined(bench, 2, [4])
    scheduled(bench)
    bench.run()
    assert scheduled(bench).drafts.made.keys() == {sequence, other}
    bench.fail(how)
    again = scheduled(bench)
    assert not again.num_draft_tokens
    assert not again.drafts.made
    for each in (sequence, other):
        assert each.model_drafts is not None
        assert not each.model_drafts.tokens


def test_a_step_that_asks_for_some_and_is_out_of_memory_is_run_without() -> None:
    bench = Bench(num_tokens=3, guess=right)
    sequences = [joined(bench, 1), joined(bench, 2, [4])]
    first = scheduled(bench)
    assert not first.num_draft_tokens
    assert first.batch.num_drafts is not None
    bench.fail("shrink")
    again = scheduled(bench)
    assert again.sequences == sequences
    assert again.batch.num_drafts is None


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_sequence_that_is_to_move_has_none(in_flight: bool) -> None:
    bench = Bench(num_tokens=3, guess=right)
    sequence = joined(bench)
    scheduled(bench)
    if in_flight:
        bench.scheduler.pause(sequence.key)
    bench.run()
    assert sequence.model_drafts is not None
    assert bool(sequence.model_drafts.tokens) != in_flight
    bench.scheduler.pause(sequence.key)
    assert not sequence.model_drafts.tokens
    bench.scheduler.resume(sequence.key)
    assert not scheduled(bench).num_draft_tokens


def test_a_sequence_that_is_renamed_keeps_them() -> None:
    bench = Bench(num_tokens=3, guess=right)
    sequence = joined(bench)
    scheduled(bench)
    bench.run()
    bench.scheduler.rename(sequence, (1, 7), "other", 100.0)
    assert scheduled(bench).drafts.by_model == {sequence}


def test_wrong_drafts_are_given_up_and_tried_again_at_times() -> None:
    bench = Bench(num_blocks=600, num_tokens=3, guess=wrong, max_len=2000)
    joined(bench, max_tokens=1900)
    asked, num_ahead = [], 0
    while bench.schedule() is not None or bench.queue:
        bench.schedule()
        num_ahead += len(bench.queue) == 2
        step, _ = bench.run()
        asked.append(step.batch.num_drafts is not None)
    assert 4 < sum(asked[:20]) < 20
    assert not any(asked[20:40])
    assert 20 < sum(asked[500:]) < 100
    assert num_ahead > 1500


@pytest.mark.parametrize("more", [{"frequency_penalty": 0.5}, {"repetition_penalty": 1.1}, {"grammar": b"g"}])
def test_where_a_token_depends_on_more_than_its_text_nothing_is_asked(more: dict[str, object]) -> None:
    bench = Bench(guess=right)
    joined(bench, **more)
    while (step := bench.schedule()) is not None:
        assert step.batch.num_drafts is None
        bench.run()
    assert bench.drafted == 0


def test_where_drafting_does_not_pay_steps_are_made_ahead() -> None:
    bench = Bench(guess=right)
    sequences = [joined(bench, dispatch, [dispatch]) for dispatch in range(4)]
    assert Drafts(3, 16, 0.1).pay(sequences, 8)
    assert not Drafts(3, 3, 0.1).pay(sequences, 8), "more sequences than cheap rows"
    assert not Drafts(3, 16, 0.1).pay(sequences, 4), "no row is left for a draft"
    assert not Drafts(0, 16, 0.1).pay(sequences, 8)
    assert not Drafts(3, 16).pay(sequences, 8), "the model does not draft, and no text repeats"
    assert not Drafts(3, 16, 1.0).pay(sequences, 8), "a draft takes as long as a step"


def test_a_text_that_is_surely_followed_is_asked_for_nothing() -> None:
    bench = Bench(num_tokens=3, guess=sometimes(1, 0.6))
    circle = [1, 4, 6, 5, 2, 0]
    sequence = bench.join(1, circle * 6, 60, ignore_eos=True)
    assert sequence is not None
    by_text = by_model = 0
    while (step := bench.schedule()) is not None:
        by_model += bool(step.drafts.by_model)
        by_text += bool(step.drafts.tokens) and not step.drafts.by_model
        if step.drafts.tokens and not step.drafts.by_model and sequence.match is not None:
            assert step.drafts.tokens.keys() == {sequence}
        bench.run()
    assert by_text > 3
    assert by_model > 3
    assert sequence.state.output_token_ids[:-1] == answer(circle * 6, 60)[:59]


def test_the_rate_of_hits_is_that_of_the_tokens_that_came() -> None:
    drafts, outputs = ModelDrafts(1), [1]
    for _ in range(200):
        drafts.keep([5, 6, 7], len(outputs))
        tokens = drafts.take()
        outputs += [5, 6, 8]
        drafts.measure(tokens, outputs)
    assert drafts.rate(len(outputs)) == pytest.approx(2 / 3, abs=0.1)
    for _ in range(100):
        drafts.keep([5], len(outputs))
        drafts.take()
        outputs.append(6)
        drafts.measure([5], outputs)
    assert drafts.rate(len(outputs)) < 0.2
    assert drafts.rate(len(outputs) + 4000) == pytest.approx(FIRST_RATE, abs=0.01)
