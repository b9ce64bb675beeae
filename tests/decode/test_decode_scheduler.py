"""Continuous batching: rows, growth, preemption, and the columns that are reported."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from splitserve.decode.rows import DecodeStep
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import SamplingState, StepOutput
from splitserve.transport.messages.blocks import NO_BLOCK
from splitserve.transport.messages.messages import SamplingParams

BLOCK = 4
EOS = 0


def make(num_blocks: int = 64, max_num_seqs: int = 8) -> DecodeScheduler:
    return DecodeScheduler(BlockManager(num_blocks), BLOCK, max_num_seqs, 64, frozenset([EOS]))


def join(
    scheduler: DecodeScheduler, dispatch: int, num_prompt: int, max_tokens: int = 20, **more: object
) -> bool:
    blocks = scheduler.blocks.allocate(-(-num_prompt // BLOCK))
    if blocks is None:
        return False
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **more)  # type: ignore[arg-type]
    state = SamplingState(params, list(range(1, num_prompt + 1)), [9])
    scheduler.join((1, dispatch), f"r{dispatch}", state, blocks, b"root", 100.0)
    return True


def output(step: DecodeStep, token: int = 5) -> StepOutput:
    return StepOutput(np.full(step.batch.num_seqs, token, np.int32))


def check(step: DecodeStep) -> None:
    """Each row is its sequence's newest token at its own place."""
    batch = step.batch
    for row, sequence in enumerate(step.sequences):
        assert step.dispatches[row] == sequence.key[1]
        assert batch.token_ids[row] == sequence.state.output_token_ids[-1]
        assert batch.positions[row] == sequence.state.position - 1
        assert batch.seq_lens[row] == sequence.state.position
        position = int(batch.positions[row])
        assert batch.slot_mapping[row] == sequence.blocks[position // BLOCK] * BLOCK + position % BLOCK
        assert step.indices[row] == len(sequence.state.output_token_ids)
    slots = batch.slot_mapping.tolist()
    assert len(set(slots)) == len(slots)


def test_a_sequence_ends_at_max_tokens_and_frees_its_blocks() -> None:
    scheduler = make()
    join(scheduler, 1, 6, max_tokens=4)
    reasons = []
    while (step := scheduler.schedule()) is not None:
        check(step)
        reasons += scheduler.complete(step, output(step)).finished.values()
    assert reasons == ["length"]
    assert scheduler.blocks.num_used == 0


def test_eos_stops_but_not_before_min_tokens_nor_when_ignored() -> None:
    scheduler = make()
    join(scheduler, 1, 4)
    join(scheduler, 2, 4, min_tokens=3)
    join(scheduler, 3, 4, ignore_eos=True)
    ended = []
    for _ in range(3):
        step = scheduler.schedule()
        assert step is not None
        result = scheduler.complete(step, output(step, EOS))
        ended.append([step.sequences[row].key[1] for row in result.finished])
    assert ended == [[1], [], [2]]


def test_the_youngest_makes_room() -> None:
    scheduler = make(num_blocks=4)
    join(scheduler, 1, 8)
    join(scheduler, 2, 8)
    step = scheduler.schedule()
    assert step is not None
    assert [s.key[1] for s in step.sequences] == [1]
    assert [s.key[1] for s in scheduler.preempted] == [2]


def test_full_blocks_of_answers_can_be_found_again() -> None:
    scheduler = make()
    join(scheduler, 1, 4, max_tokens=9)
    while (step := scheduler.schedule()) is not None:
        scheduler.complete(step, output(step))
    assert scheduler.blocks.num_cached == 2  # answer tokens 0-3 and 4-7; the last one's KV was never computed


@settings(max_examples=100, deadline=None)
@given(
    arrivals=st.lists(st.tuples(st.integers(1, 20), st.integers(2, 20)), min_size=1, max_size=20),
    num_blocks=st.integers(7, 30),
    drops=st.dictionaries(st.integers(0, 60), st.integers(0, 19), max_size=6),
)
def test_any_mix_of_joins_drops_and_preemptions(
    arrivals: list[tuple[int, int]], num_blocks: int, drops: dict[int, int]
) -> None:
    scheduler = make(num_blocks, max_num_seqs=5)
    queue = list(enumerate(arrivals))
    gone: list[int] = []
    for turn in range(400):
        if queue and scheduler.num_running < 5 and join(scheduler, queue[0][0], *queue[0][1]):
            queue.pop(0)
        step = scheduler.schedule()
        gone += [s.key[1] for s in scheduler.preempted]
        scheduler.preempted.clear()
        if step is None:
            continue
        check(step)
        if (1, drops.get(turn, -1)) in scheduler.running:
            scheduler.drop((1, drops[turn]))
            gone.append(drops[turn])
        result = scheduler.complete(step, output(step))
        gone += [step.sequences[row].key[1] for row in result.finished]
    assert sorted(gone) == list(range(len(arrivals)))  # each left exactly once
    assert scheduler.num_running == 0
    assert scheduler.blocks.num_used == 0


def test_a_step_out_of_memory_sends_the_younger_half_away_and_the_rest_go_on() -> None:
    scheduler = make()
    for dispatch in range(6):
        join(scheduler, dispatch, 6, max_tokens=9)
    step = scheduler.schedule()
    assert step is not None
    scheduler.drop((1, 0))  # meanwhile cancelled
    assert [s.key[1] for s in scheduler.shrink(step)] == [3, 4, 5]
    assert scheduler.row_limit.now == 2
    again = scheduler.schedule()
    assert again is not None
    check(again)
    assert sorted(s.key[1] for s in again.sequences) == [1, 2]
    assert scheduler.complete(again, output(again)).dropped == []
    while (step := scheduler.schedule()) is not None:
        check(step)
        scheduler.complete(step, output(step))
    assert scheduler.blocks.num_used == 0


def test_the_batch_grows_back_after_good_steps() -> None:
    scheduler = make(max_num_seqs=3)
    join(scheduler, 1, 2, max_tokens=50)
    join(scheduler, 2, 2, max_tokens=50)
    step = scheduler.schedule()
    assert step is not None
    scheduler.shrink(step)
    assert scheduler.row_limit.now == 1
    for dispatch in range(3, 9):
        while (step := scheduler.schedule()) is not None:
            scheduler.complete(step, output(step))
        join(scheduler, dispatch, 2, max_tokens=50)
    assert scheduler.row_limit.now == 3


def test_alone_and_out_of_memory_it_leaves_too() -> None:
    scheduler = make()
    join(scheduler, 1, 6)
    step = scheduler.schedule()
    assert step is not None
    assert [s.key[1] for s in scheduler.shrink(step)] == [1]
    assert scheduler.schedule() is None
    assert scheduler.blocks.num_used == 0


class Matcher:
    """Fails once the output has this length."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at

    def failure(self, num_outputs: int) -> str:
        return "too complex" if num_outputs >= self.fails_at else ""

    def mask(self, output_token_ids: Sequence[int]) -> NDArray[np.int32]:
        return np.zeros(1, np.int32)


def test_a_sequence_waits_for_its_grammar_and_leaves_when_that_fails() -> None:
    scheduler = make()
    join(scheduler, 1, 6)
    join(scheduler, 2, 6, grammar=b"g")
    step = scheduler.schedule()
    assert step is not None
    assert [s.key[1] for s in step.sequences] == [1]
    scheduler.complete(step, output(step))
    sequence = scheduler.get((1, 2))
    assert sequence is not None
    sequence.state.matcher = Matcher(fails_at=2)
    for tokens, failed in (([5, 5], []), ([5, EOS], ["too complex"])):
        step = scheduler.schedule()
        assert step is not None
        check(step)
        result = scheduler.complete(step, StepOutput(np.array(tokens, np.int32)))
        assert list(result.failed.values()) == failed
    assert scheduler.held == [(1, 1)]
    scheduler.drop((1, 1))
    assert scheduler.blocks.num_used == 0


def test_a_step_with_a_grammar_is_made_ahead() -> None:
    """Its mask is found when the token before it is there; the other rows' steps do not wait for that."""
    scheduler = make()
    join(scheduler, 1, 6)
    join(scheduler, 2, 6, grammar=b"g")
    for sequence in scheduler.running.values():
        sequence.state.matcher = Matcher(fails_at=9) if sequence.state.params.grammar else None
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert [s.key[1] for s in second.sequences] == [1, 2]
    for step in (first, second):
        scheduler.complete(step, output(step))


@settings(max_examples=60, deadline=None)
@given(num=st.integers(1, 16), poison=st.integers(0, 15), late=st.integers(0, 6))
def test_a_sequence_whose_step_raises_takes_no_other_along(num: int, poison: int, late: int) -> None:
    """The others in its steps; ``late`` more join when it has raised for the first time."""
    scheduler, ended, failed = make(200, 24), dict[int, int](), list[int]()
    for dispatch in range(num):
        join(scheduler, dispatch, 5, max_tokens=6 + dispatch)
    num_raised = num_steps = 0
    while (step := scheduler.schedule()) is not None:
        check(step)
        num_steps += 1
        if any(sequence.key[1] == poison for sequence in step.sequences):
            failed += [sequence.key[1] for sequence in scheduler.separate(step)]
            num_raised += 1
            while num_raised == 1 and late:
                join(scheduler, 100 + late, 3, max_tokens=4)
                late -= 1
        else:
            result = scheduler.complete(step, output(step))
            ended |= {
                step.sequences[row].key[1]: len(step.sequences[row].state.output_token_ids)
                for row in result.finished
            }
    assert failed == [poison] * (poison < num)
    assert num_raised <= 1 + (num - 1).bit_length(), "in halves"
    assert {d: n for d, n in ended.items() if d < 100} == {d: 6 + d for d in range(num) if d != poison}
    assert scheduler.num_running == scheduler.blocks.num_used == 0
    assert num_steps <= 6 + num + 4 + 2 * num_raised + 4


def test_blocks_behind_a_sliding_window_are_released_while_a_step_is_in_flight() -> None:
    """The step made ahead reads none of them; what it reads stays."""
    window = 6
    scheduler = DecodeScheduler(BlockManager(16), BLOCK, 8, 64, frozenset([EOS]), window=window)
    join(scheduler, 1, 5, max_tokens=40)
    steps = [scheduler.schedule()]
    for _ in range(38):
        if (ahead := scheduler.schedule()) is not None:
            steps.append(ahead)
        step = steps.pop(0)
        assert step is not None
        scheduler.complete(step, output(step))
        (sequence,) = scheduler.running.values()
        for left in steps:
            assert left is not None
            position = int(left.batch.positions[0])
            read = sequence.blocks[max(0, position - window + 1) // BLOCK : position // BLOCK + 1]
            assert NO_BLOCK not in read
        assert scheduler.blocks.num_used == sum(map(len, scheduler.block_tables())) <= window // BLOCK + 3
    scheduler.drop((1, 1))
