"""The dense rows of a decode batch: one sequence a row of a few arrays, so that a step's inputs are slices of them. Pure.

The rows are those of the next step. It may be built while the one before still runs, whose tokens nobody knows yet: ``fed_from`` then
says from which row of that step a sequence's input token comes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..engine.step.batch import Batch, SamplingState
from ..transport.handoff.handoff import Key
from ..transport.messages.messages import TokenLogprobs

KNOWN = -1


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """A sequence that generates. ``blocks`` hold the KV of all its tokens but the newest."""

    key: Key
    request_id: str
    state: SamplingState
    blocks: list[int]  # NO_BLOCK behind a sliding window
    last_hash: bytes  # of its newest full block, or the root
    stops: frozenset[int]
    last_index: int
    deadline: float
    joined_at: float = 0.0
    row: int = -1  # in the next step
    in_flight: int = 0  # steps under way that it is in: they read and write its blocks
    doomed: bool = False  # it is over here; its blocks are free when nothing in flight has them
    paused: bool = False  # it keeps its blocks and is in no further step
    last_logprobs: TokenLogprobs | None = None  # of its newest token, where they are asked for
    num_untold: int = 0  # tokens of foretold steps that the coordinator has not heard of, while it has no row

    @property
    def is_unforeseen(self) -> bool:
        """Its tokens matter: one may end it, must fit a grammar, or is told with its probability."""
        params = self.state.params
        return bool(self.stops or params.grammar) or params.logprobs is not None


@dataclass(frozen=True, slots=True)
class DecodeStep:
    sequences: list[DecodeSequence]
    batch: Batch
    dispatches: NDArray[np.uint32]
    indices: NDArray[np.uint32]  # output index of the token that each row will yield
    filling: list[int]  # rows whose newest block is full with it


class DecodeRows:
    """Up to ``max_num_seqs`` sequences of up to ``max_blocks`` blocks."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self.sequences: list[DecodeSequence] = []
        self._tokens = np.zeros(max_num_seqs, np.int32)
        self._fed_from = np.full(max_num_seqs, KNOWN, np.int32)
        self._positions = np.zeros(max_num_seqs, np.int32)
        self._slots = np.zeros(max_num_seqs, np.int64)  # where each row's token goes, once its block is there
        self._indices = np.zeros(max_num_seqs, np.uint32)
        self._last_indices = np.zeros(max_num_seqs, np.int64)
        self._dispatches = np.zeros(max_num_seqs, np.uint32)
        self._num_blocks = np.zeros(max_num_seqs, np.int32)
        self._full_at = np.zeros(max_num_seqs, np.int32)  # while steps are foretold: the position at which each row's block is full
        self._untold = np.zeros(max_num_seqs, np.int64)  # tokens of foretold steps that the coordinator has not heard of
        self._columns = (
            self._tokens, self._fed_from, self._positions, self._slots, self._indices, self._last_indices, self._dispatches,
            self._num_blocks, self._full_at, self._untold,
        )  # fmt: skip
        self.beginning: set[DecodeSequence] = set()  # their next token begins a block that they have not got yet
        self.num_constrained = 0  # rows that follow a grammar
        self.num_unforeseen = 0  # rows of which a token may end the sequence, or is told with more than its number
        self._is_behind = False  # tokens and slots, since foretold steps
        self._tables = np.zeros((max_num_seqs, max_blocks), np.int32)
        self._arange = np.arange(max_num_seqs + 1, dtype=np.int32)

    def enter(self, sequence: DecodeSequence) -> None:
        """It takes part in the next step. Nothing in flight has it: its newest token is known."""
        row = sequence.row = len(self.sequences)
        self.sequences.append(sequence)
        self._last_indices[row] = sequence.last_index
        self._dispatches[row] = sequence.key[1]
        self._tables[row, : len(sequence.blocks)] = np.maximum(sequence.blocks, 0)  # what stands for NO_BLOCK is never attended to
        self._num_blocks[row] = len(sequence.blocks)
        self._untold[row], sequence.num_untold = sequence.num_untold, 0
        self.num_constrained += sequence.state.matcher is not None
        self.num_unforeseen += sequence.is_unforeseen
        self._read_state(sequence)

    def leave(self, sequence: DecodeSequence) -> None:
        """Frees the row: the last row moves into it."""
        row, last = sequence.row, len(self.sequences) - 1
        sequence.num_untold = int(self._untold[row])
        if row != last:
            moved = self.sequences[last]
            self.sequences[row], moved.row = moved, row
            for column in self._columns:
                column[row] = column[last]
            self._tables[row] = self._tables[last]
        self.sequences.pop()
        self.beginning.discard(sequence)
        self.num_constrained -= sequence.state.matcher is not None
        self.num_unforeseen -= sequence.is_unforeseen
        sequence.row = -1

    def add_block(self, sequence: DecodeSequence, block: int) -> None:
        """One more at the end of its table, for its next token."""
        self._tables[sequence.row, len(sequence.blocks)] = block
        self._slots[sequence.row] = block * self._block_size
        sequence.blocks.append(block)
        self._num_blocks[sequence.row] = len(sequence.blocks)
        self.beginning.discard(sequence)

    def finished(self) -> list[DecodeSequence]:
        """Those that the step in flight gives their last token."""
        n = len(self.sequences)
        return [self.sequences[row] for row in (self._indices[:n] > self._last_indices[:n]).nonzero()[0].tolist()]

    def build(self) -> DecodeStep:
        """The step of all rows; the rows are then those of the step after it."""
        n = len(self.sequences)
        positions, slots, indices, fed_from = self._positions[:n], self._slots[:n], self._indices[:n], self._fed_from[:n]
        seq_lens = positions + 1
        width = (int(np.maximum.reduce(positions)) // self._block_size) + 1
        batch = Batch(
            token_ids=self._tokens[:n].copy(),
            positions=positions.copy(),
            query_start_loc=self._arange[: n + 1],
            seq_lens=seq_lens,
            block_tables=self._tables[:n, :width].copy(),
            slot_mapping=slots.copy(),
            sampling=[sequence.state for sequence in self.sequences],
            fed_from=fed_from.copy(),
        )
        filling: list[int] = (seq_lens % self._block_size == 0).nonzero()[0].tolist()
        step = DecodeStep(self.sequences.copy(), batch, self._dispatches[:n].copy(), indices.copy(), filling)
        fed_from[:] = self._arange[:n]
        positions[:] = seq_lens
        slots += 1
        indices += 1
        for row in filling:
            self._find_slot(self.sequences[row], int(seq_lens[row]))
        return step

    # --- foretold steps: see foretold.py ----------------------------------------------------------

    def num_context_tokens(self) -> int:
        """That the next step attends to, over all rows."""
        n = len(self.sequences)
        return int(np.add.reduce(self._positions[:n])) + n

    def steps_to_first_end(self) -> int:
        """The first sequence ends with the last of so many steps."""
        n = len(self.sequences)
        return int(np.minimum.reduce(self._last_indices[:n] - self._indices[:n])) + 1

    def look_ahead(self) -> None:
        """Steps are foretold from here on: ``pass_by`` follows."""
        n = len(self.sequences)
        self._full_at[:n] = (self._positions[:n] // self._block_size + 1) * self._block_size

    def rows_lacking_blocks(self, num_steps: int) -> list[int]:
        """The rows that need more blocks than they have in the next so many steps, once for each block."""
        lacking = self._lacking(num_steps)
        rows = (lacking > 0).nonzero()[0]  # mostly none
        result: list[int] = rows.repeat(lacking[rows]).tolist() if len(rows) else []
        return result

    def num_blocks_lacking(self, num_steps: int) -> int:
        """How many blocks all rows need in the next so many steps beside those that they have."""
        return int(np.add.reduce(np.maximum(self._lacking(num_steps), 0)))

    def _lacking(self, num_steps: int) -> NDArray[np.int32]:
        n = len(self.sequences)
        return (self._positions[:n] + (num_steps - 1)) // self._block_size + 1 - self._num_blocks[:n]

    def pass_by(self, num_steps: int) -> list[tuple[int, int, int]]:
        """So many steps have run. Returns (row, first, end) where blocks became full: [first, end) of the row's."""
        n, size = len(self.sequences), self._block_size
        positions, full_at = self._positions[:n], self._full_at[:n]
        positions += num_steps
        self._indices[:n] += np.uint32(num_steps)
        self._untold[:n] += num_steps
        self._is_behind = True
        full = []
        for row in (positions >= full_at).nonzero()[0].tolist():  # mostly none
            first, end = int(full_at[row]) // size - 1, int(positions[row]) // size
            full_at[row] = (end + 1) * size
            full.append((row, first, end))
        return full

    def take_untold(self) -> list[tuple[DecodeSequence, int, int]]:
        """(sequence, output index of the first, number) of tokens that the coordinator has not heard of; now it has."""
        n = len(self.sequences)
        rows = self._untold[:n].nonzero()[0].tolist()
        untold = [(self.sequences[row], int(self._indices[row] - self._untold[row]), int(self._untold[row])) for row in rows]
        self._untold[:n] = 0
        return untold

    def book_outputs(self, sequence: DecodeSequence, token_id: int) -> None:
        """The tokens of foretold steps, once someone asks for them."""
        output = sequence.state.output_token_ids
        output.extend([token_id] * (int(self._indices[sequence.row]) - len(output)))

    def freshen(self, token_id: int) -> None:
        """After foretold steps, which yielded this token each: everything that an ordinary step needs to know."""
        if self._is_behind:
            self._is_behind = False
            for sequence in self.sequences:
                self.book_outputs(sequence, token_id)
                self._read_state(sequence)

    def settle(self, token_ids: NDArray[np.int32]) -> None:
        """The step built last has run, and these are its tokens."""
        n = len(self.sequences)
        fed = (self._fed_from[:n] != KNOWN).nonzero()[0]
        self._tokens[fed] = token_ids[self._fed_from[fed]]
        self._fed_from[fed] = KNOWN

    def recover(self) -> None:
        """What was built last has not run: every row is as its sequence's tokens say."""
        for sequence in self.sequences:
            self._read_state(sequence)

    def _read_state(self, sequence: DecodeSequence) -> None:
        row, state = sequence.row, sequence.state
        self._tokens[row], self._fed_from[row] = state.output_token_ids[-1], KNOWN
        self._positions[row] = position = state.position - 1
        self._indices[row] = len(state.output_token_ids)
        self._find_slot(sequence, position)

    def _find_slot(self, sequence: DecodeSequence, position: int) -> None:
        """Where the token at ``position`` goes. The block may be there already: of a step that was made and has not run."""
        at_block, offset = divmod(position, self._block_size)
        if at_block < len(sequence.blocks):
            self._slots[sequence.row] = sequence.blocks[at_block] * self._block_size + offset
            self.beginning.discard(sequence)
        else:
            self.beginning.add(sequence)
