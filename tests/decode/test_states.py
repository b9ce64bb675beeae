"""Sequences of a model with states: two copies each, chosen by the number of tokens before the step.

By block is noted whose state it holds, and of how many tokens, so that a wrong copy shows.
"""

from __future__ import annotations

import random
from collections import deque

import numpy as np

from splitserve.decode.rows import DecodeStep
from splitserve.decode.scheduler import DecodeScheduler
from splitserve.decode.sequences import divided
from splitserve.engine.cache.block_manager import BlockManager
from splitserve.engine.step.batch import SamplingState, StepOutput
from splitserve.transport.messages.messages import SamplingParams

BLOCK, STATE = 4, 2


class Rig:
    def __init__(self, num_blocks: int = 64) -> None:
        self.blocks = BlockManager(num_blocks)
        self.scheduler = DecodeScheduler(self.blocks, BLOCK, 8, 64, frozenset(), state_blocks=STATE)
        self.holds: dict[int, tuple[int, int]] = {}  # by block: dispatch, tokens

    def join(self, dispatch: int, num_prompt: int, max_tokens: int = 20) -> bool:
        num_blocks = -(-num_prompt // BLOCK) + STATE
        if (given := self.blocks.allocate(num_blocks + STATE)) is None:
            return False
        state = SamplingState(SamplingParams(max_tokens=max_tokens), list(range(num_prompt)), [9])
        blocks, spare = given[:num_blocks], given[num_blocks:]
        self.holds.update(dict.fromkeys(blocks[-STATE:], (dispatch, num_prompt)))
        self.holds.update(dict.fromkeys(spare, (-1, -1)))
        self.scheduler.join((1, dispatch), f"r{dispatch}", state, blocks, b"root", 9.0, spare=spare)
        return True

    def schedule(self) -> DecodeStep:
        step = self.scheduler.schedule()
        assert step is not None
        return step

    def execute(self, step: DecodeStep) -> None:
        """Read and write the states."""
        states = step.batch.states
        assert states is not None
        assert not states.marks.any()
        rows = zip(step.sequences, step.batch.positions, states.tables.tolist(), states.source, strict=True)
        for sequence, position, table, source in rows:
            before = sequence.key[1], int(position)
            assert {self.holds[block] for block in table[source]} == {before}
            self.holds.update(dict.fromkeys(table[1 - source], (before[0], before[1] + 1)))

    def complete(self, step: DecodeStep) -> None:
        self.execute(step)
        self.scheduler.complete(step, StepOutput(np.full(step.batch.num_seqs, 5, np.int32)))
        self.check_owners()

    def check_owners(self) -> None:
        owned = sorted(block for table in self.scheduler.block_tables() for block in table)
        references = self.blocks._references
        assert owned == [block for block, count in enumerate(references) for _ in range(count)]


def test_the_copy_that_came_is_that_of_the_prompts_tokens() -> None:
    for num_tokens in (6, 7):
        blocks, states = divided([1, 2, 3, 4], [5, 6], num_tokens)
        assert (blocks, states[num_tokens % 2], states[1 - num_tokens % 2]) == ([1, 2], [3, 4], [5, 6])
    assert divided([1, 2], [], 7) == ([1, 2], ([], []))


def test_a_step_reads_what_the_one_before_has_written_also_when_made_ahead() -> None:
    rig = Rig()
    rig.join(1, 6)
    rig.join(2, 9)
    rig.complete(rig.schedule())
    for _ in range(5):
        for step in [rig.schedule(), rig.schedule()]:
            rig.complete(step)


def test_where_a_row_becomes_free_the_last_one_takes_its_states_along() -> None:
    rig = Rig()
    for dispatch, max_tokens in enumerate((3, 9, 9)):
        rig.join(dispatch, 5 + dispatch, max_tokens)
    for _ in range(4):
        rig.complete(step := rig.schedule())
    assert [sequence.key[1] for sequence in step.sequences] == [2, 1]


def test_a_step_that_fails_is_made_again_from_the_same_copy() -> None:
    rig = Rig()
    rig.join(1, 6)
    rig.join(2, 7)
    rig.complete(rig.schedule())
    step, ahead = rig.schedule(), rig.schedule()
    rig.execute(step)
    assert rig.scheduler.separate(step) == []
    rig.scheduler.skip(ahead)
    sizes = []
    for _ in range(6):
        rig.complete(step := rig.schedule())
        sizes.append(len(step.sequences))
    assert sizes == [1, 1, 2, 2, 2, 2], "each alone, then both"


def test_a_preempted_sequence_frees_both_copies() -> None:
    rig = Rig(num_blocks=2 * (2 + 2 * STATE) + 1)
    rig.join(1, 8)
    rig.join(2, 8)
    rig.complete(rig.schedule())
    assert [sequence.key[1] for sequence in rig.scheduler.preempted] == [2]
    assert rig.blocks.num_used == 3 + 2 * STATE


def test_a_paused_sequence_goes_on_from_its_newest_state() -> None:
    """It was to move to another worker, which refused it."""
    rig = Rig()
    rig.join(1, 6)
    rig.join(2, 6)
    rig.complete(rig.schedule())
    step = rig.schedule()
    rig.scheduler.pause((1, 1))
    rig.complete(step)
    sequence = rig.scheduler.running[1, 1]
    num_tokens = sequence.state.position - 1
    assert {rig.holds[block] for block in sequence.states[num_tokens % 2]} == {(1, num_tokens)}
    rig.complete(rig.schedule())
    rig.scheduler.resume((1, 1))
    for _ in range(3):
        rig.complete(step := rig.schedule())
    assert len(step.sequences) == 2


def test_copies_of_a_sequence_that_is_dropped_stay_while_a_step_has_them() -> None:
    rig = Rig()
    rig.join(1, 6)
    step = rig.schedule()
    rig.scheduler.drop((1, 1))
    assert rig.blocks.num_used == 2 + 2 * STATE
    rig.check_owners()
    rig.complete(step)
    assert rig.blocks.num_used == 0


def test_whatever_happens_each_step_reads_the_state_of_all_tokens_before_it() -> None:
    num_failed = 0
    for seed in range(60):
        draw = random.Random(seed)
        rig, in_flight = Rig(draw.choice([30, 60])), deque[DecodeStep]()
        scheduler = rig.scheduler
        for dispatch in range(40):
            if scheduler.num_running < 6:
                rig.join(dispatch, draw.randint(1, 12), draw.randint(2, 9))
            if len(in_flight) < 2 and (step := scheduler.schedule()) is not None:
                in_flight.append(step)
            if in_flight and draw.random() < 0.15:
                num_failed += 1
                rig.execute(in_flight[0])
                scheduler.separate(in_flight.popleft(), shared=draw.random() < 0.3)
                while in_flight:
                    scheduler.skip(in_flight.popleft())
            elif in_flight and draw.random() < 0.7:
                rig.complete(in_flight.popleft())
            if scheduler.running and draw.random() < 0.2:
                key = draw.choice(list(scheduler.running))
                draw.choice([scheduler.drop, scheduler.pause, scheduler.resume])(key)
            scheduler.preempted.clear()
            rig.check_owners()
        while in_flight:
            rig.complete(in_flight.popleft())
        for key in list(scheduler.running):
            scheduler.drop(key)
        assert rig.blocks.num_used == 0
    assert num_failed > 100
