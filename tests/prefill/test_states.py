"""The states of prompts: which copy a chunk reads and writes, and where a later prompt begins.

Each block's content stands for a state by the tokens that it is the state of, so that a wrong copy shows.
"""

from __future__ import annotations

import random
from collections import deque

import pytest

from splitserve.engine.cache.block_manager import BlockManager
from splitserve.prefill.chunks import PrefillSequence, PrefillStep
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.prefill.states import NO_STATE
from splitserve.transport.messages.messages import Peer, RequestSpec, SamplingParams, u32

BLOCK, STATE = 4, 2
PEER = Peer(worker_id="d", incarnation=1, address="x")
COPIES = 2 * STATE


class Rig:
    """A scheduler, and a memory of states: by block, the tokens whose state it holds."""

    def __init__(self, num_blocks: int = 64, budget: int = 8, **more: object) -> None:
        self.blocks = BlockManager(num_blocks)
        self.scheduler = PrefillScheduler(
            self.blocks, BLOCK, "model", budget, max_num_seqs=4, state_blocks=STATE, **more
        )  # type: ignore[arg-type]
        self.holds: dict[int, tuple[int, ...]] = {}
        self.snapshots = 0

    def ask(self, dispatch: int, tokens: list[int], decode: Peer = PEER, **more: object) -> PrefillSequence:
        spec = RequestSpec(
            request_id=f"r{dispatch}",
            epoch=0,
            dispatch=dispatch,
            coordinator=1,
            token_ids=u32(tokens),
            num_prompt_tokens=len(tokens),
            sampling=SamplingParams(max_tokens=4),
            deadline_s=60.0,
            **more,  # type: ignore[arg-type]
        )
        return self.scheduler.add(spec, decode, 0.0)

    def begin(self) -> PrefillStep:
        """Make the next step. It need not run: one before it may fail."""
        step = self.scheduler.schedule(0.0)
        assert step is not None
        self.check_owners()
        return step

    def complete(self, step: PrefillStep) -> None:
        self.execute(step)
        self.scheduler.complete(step)
        self.check_owners()

    def execute(self, step: PrefillStep) -> None:
        """Read and write the states. Every block of a copy holds the same, and no copy but the prompt's own
        is written."""
        assert step.batch.states is not None
        tables, sources, marks = (
            of.tolist()
            for of in (step.batch.states.tables, step.batch.states.source, step.batch.states.marks)
        )
        for chunk, table, source, mark in zip(step.chunks, tables, sources, marks, strict=True):
            before = {() if source == NO_STATE else self.holds[block] for block in table[source]}
            assert before == {tuple(chunk.sequence.token_ids[: chunk.start].tolist())}
            written = table[0 if source == NO_STATE else 1 - source]
            assert written in chunk.sequence.states.copies
            self.write(written, chunk.sequence.token_ids[: chunk.end].tolist())
            if mark:
                self.snapshots += 1
                self.write(table[2], chunk.sequence.token_ids[: chunk.start + mark].tolist())

    def write(self, blocks: list[int], tokens: list[int]) -> None:
        self.holds.update(dict.fromkeys(blocks, tuple(tokens)))

    def run(self) -> list[tuple[int, int, int]]:
        """Compute everything. Return (dispatch, start, end) of each chunk."""
        chunks = []
        while (step := self.scheduler.schedule(0.0)) is not None:
            chunks += [(chunk.sequence.key[1], chunk.start, chunk.end) for chunk in step.chunks]
            self.complete(step)
        return chunks

    def check_owners(self) -> None:
        """Every reference has its owner."""
        owned = sorted(block for table in self.scheduler.block_tables() for block in table)
        references = self.blocks._references
        assert owned == [block for block, count in enumerate(references) for _ in range(count)]

    def end(self, *dispatches: int) -> None:
        for dispatch in dispatches:
            self.scheduler.unpin((1, dispatch))

    def num_snapshots(self, sequence: PrefillSequence) -> int:
        """Blocks of this prompt behind which there is a whole one."""
        hashes = self.scheduler.prompt_blocks.states.hashes
        return sum(self.blocks.match_prefix(hashes(block_hash)) == STATE for block_hash in sequence.hashes)


def test_each_chunk_reads_the_copy_that_the_one_before_has_written() -> None:
    rig = Rig()
    sequence, read, written = rig.ask(1, list(range(21))), [], []
    for _ in range(3):
        (chunk,) = (step := rig.begin()).chunks
        assert chunk.states is not None
        read.append(chunk.states.read)
        written.append(chunk.states.write)
        rig.complete(step)
    first, second = sequence.states.copies
    assert (read, written) == ([[], first, second], [first, second, first])
    assert rig.holds[first[0]] == tuple(range(21))
    assert sequence.handed_over == sequence.blocks + first, "the newest goes with the blocks"


def test_steps_made_ahead_go_on_from_the_copy_that_is_being_written() -> None:
    rig = Rig()
    rig.ask(1, list(range(30)))
    for step in [rig.begin(), rig.begin()]:
        rig.complete(step)
    assert rig.run() == [(1, 16, 24), (1, 24, 30)]


def test_a_prompt_begins_behind_the_longest_prefix_that_has_a_snapshot() -> None:
    rig = Rig()
    rig.ask(1, list(range(21)))
    rig.run()
    rig.end(1)
    again = rig.ask(2, [*range(18), 99, 98, 97])
    assert rig.run() == [(2, 16, 21)]
    assert again.num_cached_tokens == 16
    rig.end(2)
    assert rig.blocks.num_used == 0


def test_a_shared_beginning_gets_a_snapshot_where_the_prompts_part() -> None:
    rig = Rig(budget=64)
    rig.ask(1, list(range(21)))
    rig.run()
    parts = [[*range(12), *[90 + i] * 6] for i in range(2)]
    rig.ask(2, parts[0])
    assert rig.run() == [(2, 0, 12), (2, 12, 18)], "no snapshot but that behind 20 tokens; one behind 12 now"
    rig.ask(3, parts[1])
    assert rig.run() == [(3, 12, 18)]


def test_one_snapshot_of_a_prefix_is_enough() -> None:
    """(A prompt whose own logprobs are asked for is computed from its first token on.)"""
    rig = Rig()
    rig.ask(1, list(range(21)))
    rig.run()
    rig.ask(2, list(range(21)), prompt_logprobs=0)
    assert len(rig.run()) == 3
    assert rig.snapshots == 3


def test_a_decode_worker_that_takes_nothing_in_slows_only_its_own_requests() -> None:
    """Copies that wait to be taken in count: half of the pool is full of them."""
    rig = Rig(num_blocks=40)
    for dispatch in range(4):
        rig.ask(dispatch, [dispatch])
    rig.run()
    rig.ask(4, [4])
    rig.ask(5, [5], Peer(worker_id="e", incarnation=2, address="y"))
    (chunk,) = rig.begin().chunks
    assert chunk.sequence.key == (1, 5)


def test_a_step_that_fails_leaves_the_state_before_it() -> None:
    rig = Rig()
    rig.ask(1, list(range(21)))
    rig.complete(rig.begin())
    for fail in (rig.scheduler.skip, rig.scheduler.shrink):
        step, ahead = rig.begin(), rig.begin()
        assert step.chunks[0].start == 8
        rig.execute(step)
        fail(step)
        rig.scheduler.skip(ahead)
        rig.check_owners()
    assert rig.run()[0][:2] == (1, 8)


def test_a_prompt_cancelled_in_its_steps_frees_all_with_the_last() -> None:
    for fails in (False, True):
        rig = Rig()
        rig.ask(1, list(range(21)))
        steps = [rig.begin(), rig.begin()]
        rig.scheduler.drop((1, 1))
        for step in steps:
            assert rig.blocks.num_used >= COPIES
            if fails:
                rig.scheduler.skip(step)
            else:
                rig.complete(step)
            rig.check_owners()
        assert rig.blocks.num_used == 0


@pytest.mark.parametrize("part", range(STATE))
def test_where_a_part_of_a_snapshot_is_evicted_the_prompt_begins_further_ahead(part: int) -> None:
    rig = Rig()
    sequence = rig.ask(1, list(range(21)))
    rig.run()
    rig.end(1)
    name = rig.scheduler.prompt_blocks.states.hashes(sequence.hashes[3])[part]
    (block,) = rig.blocks.find([name])
    rig.blocks._forget(block)  # as eviction does
    del rig.blocks._idle[block]
    rig.blocks._free.append(block)
    rig.ask(2, list(range(18)))
    assert rig.run() == [(2, 8, 16), (2, 16, 18)], "and it puts that part back"
    assert rig.num_snapshots(sequence) == 3


def test_without_room_for_a_snapshot_a_prompt_is_computed_without_it() -> None:
    rig = Rig(num_blocks=6 + COPIES)
    sequence = rig.ask(1, list(range(21)))
    assert len(rig.run()) == 3
    assert (rig.snapshots, rig.num_snapshots(sequence)) == (0, 0)
    rig.end(1)
    assert rig.blocks.num_used == 0


def test_a_prompt_that_fits_only_without_a_snapshot_is_computed_from_its_first_token() -> None:
    """It waited for ever for what its own snapshot took."""
    rig = Rig(num_blocks=6 + COPIES)
    rig.ask(1, list(range(9)))
    rig.run()
    rig.end(1)
    assert rig.snapshots
    rig.ask(2, list(range(21)))
    assert rig.run()[-1] == (2, 16, 21)


def test_beside_a_decode_worker_snapshots_leave_it_room() -> None:
    """Each prompt's last block and both copies are to be there once more."""
    for spare, expected in ((STATE - 1, 0), (STATE, 1)):
        rig = Rig(num_blocks=3 + COPIES + 1 + COPIES + 5 + spare, budget=64, for_decode=lambda: 5)
        rig.ask(1, list(range(10)))
        rig.run()
        assert rig.snapshots == expected
        assert rig.blocks.num_available >= 5 + 1 + COPIES


def test_a_prompt_starts_beside_a_decode_worker_only_if_that_has_room_for_its_states() -> None:
    for missing in (0, 1):
        rig = Rig(num_blocks=3 + COPIES + 1 + COPIES - missing, for_decode=lambda: 0)
        rig.ask(1, list(range(10)))
        assert bool(rig.run()) == (not missing)


def test_whatever_happens_to_steps_each_chunk_reads_the_state_of_all_tokens_before_it() -> None:
    snapshots_read = 0
    for seed in range(60):
        draw = random.Random(seed)
        rig = Rig(num_blocks=draw.choice([20, 30, 60]), budget=draw.choice([3, 8, 20]))
        shared, in_flight, sequences = list(range(16)), deque[PrefillStep](), []
        for dispatch in range(30):
            tokens = shared[: draw.choice([0, 6, 12, 16])] + [100 + dispatch] * draw.randint(1, 9)
            sequences.append(rig.ask(dispatch, tokens))
            for _ in range(draw.randint(0, 3)):
                if len(in_flight) < 2 and (step := rig.scheduler.schedule(0.0)) is not None:
                    in_flight.append(step)
                if in_flight and draw.random() < 0.3:
                    rig.execute(in_flight[0])
                    while in_flight:
                        rig.scheduler.skip(in_flight.popleft())
                elif in_flight and draw.random() < 0.6:
                    rig.complete(in_flight.popleft())
                if draw.random() < 0.2:
                    rig.scheduler.drop((1, draw.randint(0, dispatch)))
                rig.end(*(key[1] for key in list(rig.scheduler.pinned) if draw.random() < 0.7))
                rig.check_owners()
        while in_flight:
            rig.complete(in_flight.popleft())
        for key in rig.scheduler.held:
            rig.scheduler.drop(key)
        assert rig.blocks.num_used == 0
        snapshots_read += sum(sequence.num_cached_tokens > 0 for sequence in sequences)
    assert snapshots_read > 20
