"""One step computes what both roles of a process want: rows that generate, then prompts, within one budget.
Each core gets its own rows back, whatever fails."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.stepped_process import BLOCK, BUDGET, SteppedProcess

from splitserve.engine.step.batch import StepOutput
from splitserve.transport.messages.messages import TokenLogprobs

REQUESTS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 20)), min_size=1, max_size=9)


@given(seed=st.integers(0, 10_000), requests=REQUESTS, launches=st.booleans())
@settings(max_examples=80, deadline=None)
def test_rows_first_prompts_in_the_rest_and_each_answer_is_its_own(
    seed: int, requests: list[tuple[int, int]], launches: bool
) -> None:
    process = SteppedProcess(seed, launches=launches)
    for dispatch, (length, num_tokens) in enumerate(requests, start=1):
        process.ask(dispatch, length, num_tokens)
        for _ in range(process.chance.randrange(6)):
            process.turn()
    process.run()
    assert not process.failed
    process.check_answers()


@given(seed=st.integers(0, 10_000), requests=REQUESTS, data=st.data())
@settings(max_examples=80, deadline=None)
def test_a_request_whose_steps_raise_fails_alone(
    seed: int, requests: list[tuple[int, int]], data: st.DataObject
) -> None:
    """A step raises while this request is in it: in its last chunk, and in every row."""
    process = SteppedProcess(seed)
    poisoned = data.draw(st.sets(st.integers(1, len(requests)), max_size=2))
    process.device.no_memory = data.draw(st.sampled_from([0.0, 0.1]))
    process.device.poison = {dispatch * 256 for dispatch in poisoned}
    for dispatch, (length, num_tokens) in enumerate(requests, start=1):
        process.ask(dispatch, length, num_tokens)
        for _ in range(process.chance.randrange(6)):
            process.turn()
        if process.chance.random() < 0.3:  # a sequence that raises only later
            process.device.poison.discard(dispatch * 256)
            process.device.poison |= {d * 256 for d in poisoned if d < dispatch}
    process.run()
    if not process.device.no_memory:
        assert process.failed.keys() <= poisoned
        assert set(process.failed.values()) <= {"internal"}
    process.check_answers()


def test_a_step_short_of_memory_has_fewer_prompt_tokens_and_all_its_rows() -> None:
    process = SteppedProcess(1)
    process.ask(1, 3, 40)
    while not process.scheduler.num_running:
        process.turn()
    process.ask(2, 50, 2)
    process.device.most_tokens, first = 8, len(process.device.submitted)
    process.run()
    assert not process.failed
    process.check_answers()
    mixed = [step for step in process.device.submitted[first:] if step.prompts is not None]
    assert all(step.sequences is not None for step in mixed)
    too_large = [step.batch.num_tokens for step in mixed].count(BUDGET)
    assert 1 <= too_large <= 2, "the one that lacked memory, and one that followed it"
    assert [step.batch.num_tokens for step in mixed[too_large:]] == [1 + (BUDGET - 1) // 2] * 10


def test_more_sequences_than_the_budget_leave_a_block_to_prompts() -> None:
    process = SteppedProcess(1, max_num_seqs=8, budget=4)
    for dispatch in range(1, 9):
        process.ask(dispatch, 2, 60)
    while process.scheduler.num_running < 8:
        process.turn()
    process.ask(9, 20, 2)
    process.run()
    process.check_answers()
    mixed = [s for s in process.device.submitted if s.prompts and s.sequences]
    assert max(s.batch.num_tokens for s in mixed) == 8 + BLOCK


def test_a_batch_of_rows_and_chunks_is_both_one_behind_the_other() -> None:
    process = SteppedProcess(3)
    process.ask(1, 5, 30)
    process.ask(2, 9, 30)
    while process.scheduler.num_running < 2:
        process.turn()
    process.ask(3, 21, 2)
    while not any(s.sequences and s.prompts for s in process.device.submitted):
        process.turn()
    step = next(s for s in process.device.submitted if s.sequences and s.prompts)
    assert step.sequences is not None
    assert step.prompts is not None
    rows, chunks, both = step.sequences.step.batch, step.prompts.step.batch, step.batch
    n = rows.num_seqs
    assert both.num_seqs == n + chunks.num_seqs
    for name in ("token_ids", "positions", "seq_lens", "slot_mapping"):
        assert getattr(both, name).tolist() == [*getattr(rows, name), *getattr(chunks, name)]
    assert both.query_start_loc.tolist() == [*range(n + 1), *(chunks.query_start_loc[1:] + n)]
    for row, one in enumerate((*rows.block_tables, *chunks.block_tables)):
        assert both.block_tables[row, : len(one)].tolist() == one.tolist()
    output = StepOutput(
        np.arange(both.num_seqs, dtype=np.int32), {0: TokenLogprobs(-1.0), n: TokenLogprobs(-2.0)}
    )
    first, second = output.split(n)
    assert (first.token_ids.tolist(), first.logprobs) == (list(range(n)), {0: TokenLogprobs(-1.0)})
    assert (second.token_ids.tolist(), second.logprobs) == (
        list(range(n, both.num_seqs)),
        {0: TokenLogprobs(-2.0)},
    )


@pytest.mark.parametrize("launches", [False, True])
def test_a_role_alone_has_steps_of_its_own_rows(launches: bool) -> None:
    process = SteppedProcess(5, launches=launches)
    process.steps.remove(process.decode)
    process.ask(1, 30, 1)
    process.run()
    process.check_answers()
    assert all(step.sequences is None for step in process.device.submitted)
    assert [step.batch.num_tokens for step in process.device.submitted] == [12, 12, 6]
