"""Bugs for test_teeth.py, put into what is done with the states of sequences.

Mistakes about room that cost a prompt time alone are not here: one that waits for a snapshot's blocks, or a
worker that is given longer prompts than it has room for. Nor are pulls of cached blocks without their state:
they are of no use, and do no harm. (Each was tried: nothing was found in 3,000 requests.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from splitserve.decode import scheduler as decode_scheduler
from splitserve.decode.moving import Moving
from splitserve.decode.rows import DecodeRows
from splitserve.decode.sequences import SequenceBlocks, divided
from splitserve.prefill.handoff_feed import HandoffFeed
from splitserve.prefill.scheduler import PrefillScheduler
from splitserve.prefill.states import PromptStates, StateCache
from splitserve.transport.handoff.granting import Incoming

Patch = pytest.MonkeyPatch


# --- prompts ---------------------------------------------------------------------------------------


def _change_chunks(patch: Patch, change: Callable[[Any, Any, Any], Any]) -> None:
    of_chunk = StateCache.of_chunk

    def broken(self: Any, states: Any, *args: Any) -> Any:
        chunk = of_chunk(self, states, *args)
        return chunk and change(self, states, chunk)

    patch.setattr(StateCache, "of_chunk", broken)


def compute_a_prompt_in_one_copy(patch: Patch) -> None:
    """What a step that failed has written is read by the one that computes it again."""

    def change(_: Any, states: Any, chunk: Any) -> Any:
        only = states.copies[0]
        return chunk._replace(write=only, read=only if chunk.read in states.copies else chunk.read)

    _change_chunks(patch, change)
    patch.setattr(PromptStates, "newest", lambda self, num_in_flight: self.copies[0])


def read_the_copy_that_is_written(patch: Patch) -> None:
    _change_chunks(patch, lambda _, states, chunk: chunk._replace(read=chunk.write if chunk.read else []))


def begin_without_the_snapshot(patch: Patch) -> None:
    _change_chunks(
        patch, lambda _, states, chunk: chunk._replace(read=chunk.read if chunk.read in states.copies else [])
    )


def release_a_snapshot_before_it_has_been_read(patch: Patch) -> None:
    def change(cache: Any, states: Any, chunk: Any) -> Any:
        cache._blocks.release(states.cached)
        states.cached = []
        return chunk

    _change_chunks(patch, change)


def keep_the_state_of_a_token_too_few(patch: Patch) -> None:
    _change_chunks(patch, lambda _, states, chunk: chunk._replace(mark=chunk.mark - (chunk.mark > 1)))


def name_a_snapshot_by_another_prompt(patch: Patch) -> None:
    book, earlier = StateCache.book, list[list[bytes]]()

    def broken(self: Any, states: Any, chunk: Any, before: list[bytes], is_last: bool) -> None:
        if chunk.snapshot:
            earlier.append(before)
        book(self, states, chunk, earlier[-2] if chunk.snapshot and len(earlier) > 1 else before, is_last)

    patch.setattr(StateCache, "book", broken)


def leak_the_snapshot_of_a_chunk_that_was_not_computed(patch: Patch) -> None:
    book = StateCache.book

    def broken(self: Any, states: Any, chunk: Any, before: list[bytes], is_last: bool) -> None:
        book(self, states, chunk, before, is_last)
        self._blocks.release(chunk.snapshot)

    patch.setattr(StateCache, "book", broken)
    patch.setattr(StateCache, "release", lambda self, chunk: None)


def count_a_chunk_that_failed(patch: Patch) -> None:
    skip = PrefillScheduler.skip

    def broken(self: Any, step: Any) -> None:
        skip(self, step)
        for chunk in step.chunks:
            chunk.sequence.states.num_booked += 1

    patch.setattr(PrefillScheduler, "skip", broken)


# --- the handoff -----------------------------------------------------------------------------------


def hand_over_the_copy_that_the_last_chunk_reads(patch: Patch) -> None:
    patch.setattr(PromptStates, "newest", lambda self, num_in_flight: self.copies[self.num_booked % 2])


def hand_a_state_over_with_the_last_full_block(patch: Patch) -> None:
    num_final = HandoffFeed._num_final

    def broken(self: Any, sequence: Any, num_computed: int) -> int:
        num_full = sequence.num_tokens // self._block_size
        at_last = num_computed // self._block_size == num_full
        return len(sequence.handed_over) if at_last else num_final(self, sequence, num_computed)

    patch.setattr(HandoffFeed, "_num_final", broken)


def leak_the_spare_copy_of_a_lease(patch: Patch) -> None:
    patch.setattr(Incoming, "held", property(lambda self: self.blocks[self.num_behind :]))


def move_the_older_copy(patch: Patch) -> None:
    offer = Moving._offer

    def broken(self: Any, there: Any, leaving: Any, sequence: Any, now: float) -> None:
        sequence.states = sequence.states[::-1]
        offer(self, there, leaving, sequence, now)
        sequence.states = sequence.states[::-1]

    patch.setattr(Moving, "_offer", broken)


# --- sequences that generate -------------------------------------------------------------------------


def take_the_spare_copy_for_the_newest(patch: Patch) -> None:
    patch.setattr(
        decode_scheduler, "divided", lambda blocks, spare, num_tokens: divided(blocks, spare, num_tokens + 1)
    )


def choose_the_copy_by_the_tokens_that_are_booked(patch: Patch) -> None:
    """Wrong of a step that is made ahead."""
    batch_states = DecodeRows._batch_states

    def broken(self: Any, n: int) -> Any:
        if (states := batch_states(self, n)) is None:
            return None
        booked = [(sequence.state.position - 1) % 2 for sequence in self.sequences]
        return replace(states, source=np.array(booked, np.int32))

    patch.setattr(DecodeRows, "_batch_states", broken)


def leave_the_states_behind_when_a_row_moves(patch: Patch) -> None:
    leave = DecodeRows.leave

    def broken(self: Any, sequence: Any) -> None:
        states = self._states.copy()
        leave(self, sequence)
        self._states = states

    patch.setattr(DecodeRows, "leave", broken)


def free_the_copies_that_a_step_in_flight_has(patch: Patch) -> None:
    end = SequenceBlocks.end

    def broken(self: Any, sequence: Any) -> None:
        for copy in sequence.states:
            self._blocks.release(copy)
        sequence.states = [], []
        end(self, sequence)

    patch.setattr(SequenceBlocks, "end", broken)


BUGS: list[tuple[Callable[[Patch], None], str]] = [
    (compute_a_prompt_in_one_copy, "states"),
    (read_the_copy_that_is_written, "states"),
    (begin_without_the_snapshot, "states"),
    (release_a_snapshot_before_it_has_been_read, "states"),
    (keep_the_state_of_a_token_too_few, "states"),
    (name_a_snapshot_by_another_prompt, "states"),
    (leak_the_snapshot_of_a_chunk_that_was_not_computed, "states"),
    (count_a_chunk_that_failed, "states"),
    (hand_over_the_copy_that_the_last_chunk_reads, "states"),
    (hand_a_state_over_with_the_last_full_block, "states"),
    (leak_the_spare_copy_of_a_lease, "states"),
    (move_the_older_copy, "states"),
    (take_the_spare_copy_for_the_newest, "states"),
    (choose_the_copy_by_the_tokens_that_are_booked, "states"),
    (leave_the_states_behind_when_a_row_moves, "states"),
    (free_the_copies_that_a_step_in_flight_has, "states"),
]
"""Each with the scenario in which it is found quickly."""
