"""The dense rows of a decode batch: one sequence a row of a few arrays, so that a step's inputs are slices of
them. Behind them a step has a row for each drafted token. Pure.

The rows are those of the next step. It may be built while the one before still runs, whose tokens nobody
knows yet: ``fed_from`` is the row of that step from which a sequence's input token comes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from ..engine.step.batch import Batch, BatchStates, StepOutput, adapters_of
from ..transport.messages.messages import FinishReason
from .sequences import DecodeSequence

KNOWN = -1


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """Drafts of one step. ``tokens`` are its inputs, behind each sequence's newest token. ``made``: all that
    the model has drafted in the step before, whether they are inputs or not."""

    tokens: Mapping[DecodeSequence, list[int]] = field(default_factory=dict)
    by_model: frozenset[DecodeSequence] = frozenset()  # those whose ``tokens`` the model has drafted
    made: Mapping[DecodeSequence, list[int]] = field(default_factory=dict)
    asked: Mapping[DecodeSequence, int] = field(default_factory=dict)
    """How many tokens the model is to draft for the step behind this one."""


NO_DRAFTS = StepDrafts()


@dataclass(frozen=True, slots=True)
class DecodeStep:
    sequences: list[DecodeSequence]  # of each row; drafted tokens of one stand in order
    batch: Batch
    dispatches: NDArray[np.uint32]
    indices: NDArray[np.uint32]  # output index of the token that each row will yield
    filling: list[int]  # rows whose newest block is full with it
    alone: bool = False  # it may hold the one that made a step raise: nothing else is in its step
    num_draft_tokens: int = 0  # the last rows
    drafts: StepDrafts = NO_DRAFTS

    @property
    def is_awaited(self) -> bool:
        """The step behind it needs its output: how many tokens each sequence got, or what is drafted next."""
        return self.num_draft_tokens > 0 or self.batch.num_drafts is not None

    @property
    def members(self) -> list[DecodeSequence]:
        """Each sequence once."""
        return self.sequences[: len(self.sequences) - self.num_draft_tokens]


@dataclass(slots=True)
class DecodeResult:
    """One finished step: columns as StepTokens carries them, rows that ended, rows to leave out (dropped
    meanwhile, ended before, or a draft that was rejected)."""

    step: DecodeStep
    output: StepOutput
    finished: dict[int, FinishReason] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    failed: dict[DecodeSequence, str] = field(default_factory=dict)
    """Those of ``dropped`` whose grammar cannot go on, and why."""


class DecodeRows:
    """Up to ``max_num_seqs`` sequences of up to ``max_blocks`` blocks, and two copies of a state of
    ``state_blocks`` each."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, state_blocks: int = 0) -> None:
        self.block_size = block_size
        self.sequences: list[DecodeSequence] = []
        self._tokens = np.zeros(max_num_seqs, np.int32)
        self._fed_from = np.full(max_num_seqs, KNOWN, np.int32)
        self._positions = np.zeros(max_num_seqs, np.int32)
        self._slots = np.zeros(max_num_seqs, np.int64)  # where each row's token goes, once its block is there
        self._indices = np.zeros(max_num_seqs, np.uint32)
        self._last_indices = np.zeros(max_num_seqs, np.int64)
        self._dispatches = np.zeros(max_num_seqs, np.uint32)
        self._rope_shifts = np.zeros(max_num_seqs, np.int32)
        self._columns = (
            self._tokens, self._fed_from, self._positions, self._slots, self._indices, self._last_indices,
            self._dispatches, self._rope_shifts,
        )  # fmt: skip
        self.beginning: set[DecodeSequence] = set()
        """Their next token begins a block that they have not got yet."""
        self._tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._states = np.zeros((max_num_seqs, 3, state_blocks), np.int32)  # no snapshots, so far
        self._arange = np.arange(max_num_seqs + 1, dtype=np.int32)

    def enter(self, sequence: DecodeSequence) -> None:
        """It takes part in the next step. Nothing in flight has it: its newest token is known."""
        row = sequence.row = len(self.sequences)
        self.sequences.append(sequence)
        self._last_indices[row] = sequence.last_index
        self._dispatches[row] = sequence.key[1]
        self._rope_shifts[row] = sequence.state.rope_shift
        # what stands for NO_BLOCK is never attended to
        self._tables[row, : len(sequence.blocks)] = np.maximum(sequence.blocks, 0)
        self._states[row, :2] = sequence.states
        self._read_state(sequence)

    def rename(self, sequence: DecodeSequence) -> None:
        """Its key has changed."""
        if sequence.row >= 0:
            self._dispatches[sequence.row] = sequence.key[1]

    def leave(self, sequence: DecodeSequence) -> None:
        """Frees the row: the last row moves into it."""
        row, last = sequence.row, len(self.sequences) - 1
        if row != last:
            moved = self.sequences[last]
            self.sequences[row], moved.row = moved, row
            for column in self._columns:
                column[row] = column[last]
            self._tables[row], self._states[row] = self._tables[last], self._states[last]
        self.sequences.pop()
        self.beginning.discard(sequence)
        sequence.row = -1

    def add_block(self, sequence: DecodeSequence, block: int) -> None:
        """One more at the end of its table, for its next token or for drafts."""
        self._tables[sequence.row, len(sequence.blocks)] = block
        sequence.blocks.append(block)
        self._find_slot(sequence, int(self._positions[sequence.row]))

    def leave_finished(self) -> None:
        """Free the rows of those that the step in flight gives their last token."""
        n = len(self.sequences)
        last = (self._indices[:n] > self._last_indices[:n]).nonzero()[0].tolist()
        for sequence in [self.sequences[row] for row in last]:
            self.leave(sequence)

    def build(self, alone: bool = False, drafts: StepDrafts = NO_DRAFTS) -> DecodeStep:
        """The step of all rows, and of drafted tokens behind them. The rows are then those of the step after
        it; with drafts not until it has run."""
        n = len(self.sequences)
        positions, slots = self._positions[:n], self._slots[:n]
        indices, fed_from = self._indices[:n], self._fed_from[:n]
        seq_lens = positions + 1
        width = (int(np.maximum.reduce(positions)) // self.block_size) + 1
        batch = Batch(
            token_ids=self._tokens[:n].copy(),
            positions=positions.copy(),
            query_start_loc=self._arange[: n + 1],
            seq_lens=seq_lens,
            block_tables=self._tables[:n, :width].copy(),
            slot_mapping=slots.copy(),
            sampling=[sequence.state for sequence in self.sequences],
            fed_from=fed_from.copy(),
            adapters=adapters_of([sequence.state.adapter for sequence in self.sequences]),
            states=self._batch_states(n),
            rope=_shifted(positions, self._rope_shifts[:n]),
        )
        filling: list[int] = (seq_lens % self.block_size == 0).nonzero()[0].tolist()
        step = DecodeStep(
            self.sequences.copy(), batch, self._dispatches[:n].copy(), indices.copy(), filling, alone
        )
        if drafts.tokens:
            step = self._with_drafts(step, drafts.tokens)
        if drafts.made or drafts.tokens or drafts.asked:
            step = replace(step, drafts=drafts)
        if drafts.asked:
            step = self._with_num_drafts(step, drafts.asked)
        fed_from[:] = self._arange[:n]
        positions[:] = seq_lens
        slots += 1
        indices += 1
        for row in filling:
            self._find_slot(self.sequences[row], int(seq_lens[row]))
        return step

    def _batch_states(self, n: int) -> BatchStates | None:
        if not self._states.size:
            return None
        return BatchStates(self._states[:n].copy(), self._positions[:n] % 2, np.zeros(n, np.int32))

    def _with_drafts(self, step: DecodeStep, drafts: Mapping[DecodeSequence, list[int]]) -> DecodeStep:
        owners = [sequence for sequence, tokens in drafts.items() for _ in tokens]
        ahead = np.array([1 + i for tokens in drafts.values() for i in range(len(tokens))], np.int32)
        n, rows = len(self.sequences), np.array([sequence.row for sequence in owners])
        positions = self._positions[rows] + ahead
        tables = self._tables[rows, : int(positions.max()) // self.block_size + 1]
        blocks = tables[np.arange(len(rows)), positions // self.block_size].astype(np.int64)
        drafted = Batch(
            token_ids=np.concatenate([np.array(tokens, np.int32) for tokens in drafts.values()]),
            positions=positions,
            query_start_loc=np.arange(len(rows) + 1, dtype=np.int32),
            seq_lens=positions + 1,
            block_tables=tables,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            sampling=[sequence.state for sequence in owners],
            prompt_logprobs=[None] * len(rows),
            adapters=adapters_of([sequence.state.adapter for sequence in owners]),
            draft_of=np.where(ahead == 1, rows, np.arange(n - 1, n - 1 + len(rows))).astype(np.int32),
            rope=_shifted(positions, self._rope_shifts[rows]),
        )
        filling: list[int] = (drafted.seq_lens % self.block_size == 0).nonzero()[0].tolist()
        return DecodeStep(
            step.sequences + owners,
            step.batch.followed_by(drafted),
            np.concatenate([step.dispatches, self._dispatches[rows]]),
            np.concatenate([step.indices, self._indices[rows] + ahead.astype(np.uint32)]),
            step.filling + [n + row for row in filling],
            num_draft_tokens=len(rows),
        )

    def _with_num_drafts(self, step: DecodeStep, asked: Mapping[DecodeSequence, int]) -> DecodeStep:
        """Bound by the answer's end, and by the block of each row's token: the model writes keys and values
        of the tokens that it drafts, and a draft is not worth a block more."""
        counts = np.array([asked.get(sequence, 0) for sequence in step.sequences], np.int32)
        last_indices = self._last_indices[[sequence.row for sequence in step.sequences]]
        left = last_indices - step.indices.astype(np.int64) - 1
        room = self.block_size - step.batch.positions % self.block_size
        counts = np.clip(np.minimum(left, room), 0, counts).astype(np.int32)
        return replace(step, batch=replace(step.batch, num_drafts=counts)) if counts.any() else step

    def settle(self, step: DecodeStep, token_ids: NDArray[np.int32]) -> None:
        """The step built last has run, and these are its tokens. Its sequences have them."""
        if step.num_draft_tokens:
            self.recover()  # each is as far as its drafts were accepted
            return
        n = len(self.sequences)
        fed = (self._fed_from[:n] != KNOWN).nonzero()[0]
        self._tokens[fed] = token_ids[self._fed_from[fed]]
        self._fed_from[fed] = KNOWN

    def recover(self) -> None:
        """Set every row from its sequence's tokens: the step built last has not run, or had drafts."""
        for sequence in self.sequences:
            self._read_state(sequence)

    def _read_state(self, sequence: DecodeSequence) -> None:
        row, state = sequence.row, sequence.state
        self._tokens[row], self._fed_from[row] = state.output_token_ids[-1], KNOWN
        self._positions[row] = position = state.position - 1
        self._indices[row] = len(state.output_token_ids)
        self._find_slot(sequence, position)

    def _find_slot(self, sequence: DecodeSequence, position: int) -> None:
        """Set the slot of the token at ``position``. The block may be there already, from a step that
        was made and has not run."""
        at_block, offset = divmod(position, self.block_size)
        if at_block < len(sequence.blocks):
            self._slots[sequence.row] = sequence.blocks[at_block] * self.block_size + offset
            self.beginning.discard(sequence)
        else:
            self.beginning.add(sequence)


def _shifted(positions: NDArray[np.int32], shifts: NDArray[np.int32]) -> NDArray[np.int32] | None:
    return positions + shifts if shifts.any() else None
