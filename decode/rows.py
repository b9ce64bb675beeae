"""The dense rows of a decode batch: one sequence a row of a few arrays, so that a step's inputs are slices of
them; and which sequences those are. Behind them a step has a row for each drafted token. Pure.

The rows are those of the next step. It may be built while the one before still runs, whose tokens nobody
knows yet: ``fed_from`` is the row of that step from which a sequence's input token comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..engine.step.batch import Batch, BatchStates, StepOutput, adapters_of
from ..transport.messages.messages import FinishReason
from .sequences import DecodeSequence

KNOWN = -1


@dataclass(frozen=True, slots=True)
class DecodeStep:
    sequences: list[DecodeSequence]  # of each row; drafted tokens of one stand in order
    batch: Batch
    dispatches: NDArray[np.uint32]
    indices: NDArray[np.uint32]  # output index of the token that each row will yield
    filling: list[int]  # rows whose newest block is full with it
    alone: bool = False  # it may hold the one that made a step raise: nothing else is in its step
    num_draft_tokens: int = 0  # the last rows

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
        self._columns = (
            self._tokens, self._fed_from, self._positions, self._slots, self._indices, self._last_indices,
            self._dispatches,
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

    def build(
        self, alone: bool = False, drafts: Mapping[DecodeSequence, list[int]] | None = None
    ) -> DecodeStep:
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
        )
        filling: list[int] = (seq_lens % self.block_size == 0).nonzero()[0].tolist()
        step = DecodeStep(
            self.sequences.copy(), batch, self._dispatches[:n].copy(), indices.copy(), filling, alone
        )
        if drafts:
            step = self._with_drafts(step, drafts)
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


class BatchMembers:
    """Which sequences the rows of the next step hold, and which come into the batch later."""

    def __init__(self, rows: DecodeRows) -> None:
        self._rows = rows
        self._joining: list[DecodeSequence] = []
        self._apart: list[list[DecodeSequence]] = []
        """Groups of a step that raised: the next step has the last one alone."""

    @property
    def are_tried_apart(self) -> bool:
        """Whether some are known to be in a group that made a step raise."""
        return bool(self._apart)

    def add(self, sequence: DecodeSequence) -> None:
        """It takes part as soon as it can."""
        self._joining.append(sequence)

    def remove(self, sequence: DecodeSequence) -> None:
        """It takes part no more."""
        if sequence.row >= 0:
            self._rows.leave(sequence)
        elif sequence in self._joining:
            self._joining.remove(sequence)

    def add_left(self, sequences: Iterable[DecodeSequence]) -> None:
        """A step has not run: add those that were to have their last token by it."""
        for sequence in sequences:
            if sequence.row < 0 and not sequence.paused and sequence not in self._joining:
                self._joining.append(sequence)

    def try_apart(self, *groups: list[DecodeSequence]) -> None:
        """Have each group, the last one first, take part in a step alone."""
        self._apart += groups

    def admit(self) -> None:
        """Take joined sequences into the batch, except those whose grammar is still being compiled, and those
        still in a step: their newest token is not known."""
        for sequence in self._joining:
            if not sequence.state.lacks_matcher and not sequence.in_flight:
                self._rows.enter(sequence)
        self._joining = [sequence for sequence in self._joining if sequence.row < 0]

    def admit_apart(self) -> bool:
        """Only the next group of a step that raised is in the batch; the others stay with the joining ones.
        Return False if all groups have ended meanwhile."""
        group: list[DecodeSequence] = []
        while self._apart and not group:
            group = [s for s in self._apart.pop() if not (s.ended or s.paused)]
        if not group:
            self.admit()
            return False
        for sequence in [s for s in self._rows.sequences if s not in group]:
            self._rows.leave(sequence)
            self._joining.append(sequence)
        for sequence in group:
            if sequence.row < 0:
                self._joining.remove(sequence)
                self._rows.enter(sequence)
        return True
