"""Which sequences take part in the next decode step, and with which blocks: continuous batching. Pure.

Sequences live in dense rows of a few arrays, so that a step's inputs are slices and a step without events touches no sequence but to note
its token. A sequence that needs a block when there is none makes the youngest sequence leave (it comes back through the coordinator with
the tokens it has).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..engine.batch import Batch, SamplingState, StepOutput
from ..engine.block_manager import BlockManager
from ..engine.stopping import finish_reason, last_output_index, stop_set
from ..transport.block_hash import chain
from ..transport.handoff import Key, Wait
from ..transport.messages import FinishReason, TokenLogprobs, u32

STEPS_AT_LIMIT = 64  # steps after which a limit that lack of memory had set is raised by one sequence


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """A sequence that generates. ``blocks`` hold the KV of all its tokens but the newest."""

    key: Key
    request_id: str
    state: SamplingState
    blocks: list[int]
    last_hash: bytes  # of its newest full block, or the root
    stops: frozenset[int]
    last_index: int
    deadline: float
    row: int = -1
    doomed: bool = False
    paused: bool = False  # it keeps its blocks and leaves the batch, with the end of a running step
    last_logprobs: TokenLogprobs | None = None  # of its newest token, where they are asked for


@dataclass(frozen=True, slots=True)
class DecodeStep:
    sequences: list[DecodeSequence]
    batch: Batch
    dispatches: NDArray[np.uint32]
    indices: NDArray[np.uint32]  # output index of the token that each row will yield


@dataclass(slots=True)
class DecodeResult:
    """One finished step: columns as StepTokens carries them, rows that ended, rows to leave out (dropped meanwhile)."""

    step: DecodeStep
    output: StepOutput
    finished: dict[int, FinishReason] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    failed: dict[DecodeSequence, str] = field(default_factory=dict)  # those of ``dropped`` whose grammar cannot go on, and why


class DecodeScheduler:
    """Owns the running sequences of one decode worker."""

    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self.blocks, self.block_size, self.max_num_seqs = blocks, block_size, max_num_seqs
        self.row_limit = max_num_seqs  # lower for a while after a step that ran out of memory
        self._steps_at_limit = 0
        self._max_model_len, self._eos = max_model_len, eos_token_ids
        self._rows: list[DecodeSequence] = []
        self._joining: list[DecodeSequence] = []
        self._beginning: set[DecodeSequence] = set()  # their next token is the first of a block
        self._by_key: dict[Key, DecodeSequence] = {}
        self._in_step = False
        self._tokens = np.zeros(max_num_seqs, np.int32)
        self._positions = np.zeros(max_num_seqs, np.int32)
        self._slots = np.zeros(max_num_seqs, np.int64)  # where each row's token goes, once its block is there
        self._indices = np.zeros(max_num_seqs, np.uint32)
        self._dispatches = np.zeros(max_num_seqs, np.uint32)
        self._tables = np.zeros((max_num_seqs, -(-max_model_len // block_size) + 1), np.int32)
        self._arange = np.arange(max_num_seqs + 1, dtype=np.int32)
        self.preempted: list[DecodeSequence] = []
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._by_key)

    @property
    def held(self) -> list[Key]:
        return list(self._by_key)

    def sequences(self) -> list[DecodeSequence]:
        return list(self._by_key.values())

    def get(self, key: Key) -> DecodeSequence | None:
        """The sequence, if it is here."""
        return self._by_key.get(key)

    def waits(self) -> Iterator[Wait]:
        """Every sequence here."""
        for sequence in self._by_key.values():
            yield Wait(sequence.key, "its end", sequence.deadline)

    def block_tables(self) -> Iterator[list[int]]:
        """The blocks that are referenced here; those of a dropped sequence too while a step uses them."""
        yield from (sequence.blocks for sequence in self._rows)
        yield from (sequence.blocks for sequence in self._by_key.values() if sequence.row < 0)

    def join(self, key: Key, request_id: str, state: SamplingState, blocks: list[int], last_hash: bytes, deadline: float) -> None:
        """A handoff is complete. ``state`` includes the first token; ``blocks`` hold every token before it."""
        assert self.num_running < self.max_num_seqs, "a grant promises a row"
        last = last_output_index(state, self._max_model_len)
        stops = stop_set(state, self._eos)
        sequence = DecodeSequence(key, request_id, state, blocks, last_hash, stops, last, deadline)
        self._by_key[key] = sequence
        self._joining.append(sequence)

    def drop(self, key: Key) -> bool:
        """Forgets a sequence and frees its blocks: at once, or when the running step that writes them ends."""
        sequence = self._by_key.pop(key, None)
        if sequence is None:
            return False
        if sequence in self._joining:
            self._joining.remove(sequence)
            self.blocks.release(sequence.blocks)
        elif sequence.row < 0:
            self.blocks.release(sequence.blocks)
        elif self._in_step:
            sequence.doomed = True
        else:
            self._remove(sequence)
        return True

    def pause(self, key: Key) -> None:
        """The sequence leaves the batch and keeps its blocks: at once, or when the running step has given it its token."""
        sequence = self._by_key[key]
        sequence.paused = True
        if sequence in self._joining:
            self._joining.remove(sequence)
        elif sequence.row >= 0 and not self._in_step:
            self._leave_row(sequence)

    def resume(self, key: Key) -> None:
        """A paused sequence takes part in the next step again."""
        sequence = self._by_key[key]
        if sequence.paused and sequence.row < 0:
            self._joining.append(sequence)
        sequence.paused = False

    def is_still(self, key: Key) -> bool:
        """Whether a paused sequence has left the batch: its tokens and blocks are final."""
        return self._by_key[key].row < 0

    def schedule(self) -> DecodeStep | None:
        """The next step over all running sequences; None where there are none. Preempted ones are left in ``preempted``."""
        assert not self._in_step, "one step at a time"
        if self._joining:
            self._admit()
        self._grow()
        n = len(self._rows)
        if n == 0:
            return None
        positions = self._positions[:n].copy()
        width = int(np.maximum.reduce(positions)) // self.block_size + 1
        batch = Batch(
            token_ids=self._tokens[:n].copy(),
            positions=positions,
            query_start_loc=self._arange[: n + 1],
            seq_lens=positions + 1,
            block_tables=self._tables[:n, :width].copy(),
            slot_mapping=self._slots[:n].copy(),
            sampling=[s.state for s in self._rows],
        )
        self._in_step = True
        return DecodeStep(self._rows.copy(), batch, self._dispatches[:n].copy(), self._indices[:n].copy())

    def complete(self, step: DecodeStep, output: StepOutput) -> DecodeResult:
        """Books a finished step: every row's token, full blocks, and the sequences that end with it."""
        self._in_step = False
        self._raise_row_limit()
        n = len(step.sequences)
        result = DecodeResult(step, output)
        tokens = output.token_ids.tolist()
        indices = step.indices.tolist()
        for row, (sequence, token, index) in enumerate(zip(step.sequences, tokens, indices, strict=True)):
            if sequence.doomed:
                result.dropped.append(row)
                continue
            if token in sequence.stops and (matcher := sequence.state.matcher) is not None and matcher.failure:
                result.failed[sequence] = matcher.failure
                result.dropped.append(row)
                sequence.doomed = True
                continue
            sequence.state.output_token_ids.append(token)
            if token in sequence.stops or index >= sequence.last_index:
                reason = finish_reason(token, index, sequence.stops, sequence.state.params.min_tokens, sequence.last_index)
                if reason is not None:
                    result.finished[row] = reason
        self._tokens[:n] = output.token_ids
        self._positions[:n] += 1
        self._slots[:n] += 1
        self._indices[:n] += 1
        for row in (self._positions[:n] % self.block_size == 0).nonzero()[0].tolist():
            if not step.sequences[row].doomed:
                self._commit_newest(step.sequences[row])
                self._beginning.add(step.sequences[row])
        for row in [*result.finished, *result.dropped]:
            sequence = step.sequences[row]
            self._by_key.pop(sequence.key, None)
            self._remove(sequence)
        for sequence in step.sequences:
            if sequence.paused and sequence.row >= 0:
                self._leave_row(sequence)
        return result

    def abort(self, step: DecodeStep) -> list[DecodeSequence]:
        """The step raised: all its sequences are over here. Returns those that had not been dropped already."""
        self._in_step = False
        alive = [s for s in step.sequences if not s.doomed]
        for sequence in step.sequences:
            self._by_key.pop(sequence.key, None)
            self._remove(sequence)
        return alive

    def shrink(self, step: DecodeStep) -> list[DecodeSequence]:
        """The step ran out of memory, and what it wrote will be written again. The younger half of its sequences leave, and no more than
        the others are admitted for a while. Returns those that leave: all, where the step had but one."""
        self._in_step = False
        staying: list[DecodeSequence] = []
        for sequence in step.sequences:
            if sequence.doomed:
                self._remove(sequence)
            elif sequence.paused:
                self._leave_row(sequence)
            else:
                staying.append(sequence)
        staying.sort(key=list(self._by_key.values()).index)
        self.row_limit, self._steps_at_limit = max(1, len(staying) // 2), 0
        leaving = staying[len(staying) // 2 :]
        for sequence in leaving:
            del self._by_key[sequence.key]
            self._remove(sequence)
        return leaving

    def _raise_row_limit(self) -> None:
        """One row more after every so many good steps."""
        if self.row_limit < self.max_num_seqs:
            self._steps_at_limit += 1
            if self._steps_at_limit == STEPS_AT_LIMIT:
                self.row_limit, self._steps_at_limit = self.row_limit + 1, 0

    def _admit(self) -> None:
        """Takes into the batch who has joined, but for those whose grammar is still being compiled."""
        for sequence in self._joining:
            if not sequence.state.lacks_matcher:
                self._enter(sequence)
        self._joining = [sequence for sequence in self._joining if sequence.row < 0]

    def _enter(self, sequence: DecodeSequence) -> None:
        row = sequence.row = len(self._rows)
        self._rows.append(sequence)
        state = sequence.state
        self._tokens[row] = state.output_token_ids[-1]
        self._positions[row] = position = state.position - 1
        self._indices[row] = len(state.output_token_ids)
        self._dispatches[row] = sequence.key[1]
        self._tables[row, : len(sequence.blocks)] = sequence.blocks
        at_block, offset = divmod(position, self.block_size)
        if at_block < len(sequence.blocks):
            self._slots[row] = sequence.blocks[at_block] * self.block_size + offset
        else:
            self._beginning.add(sequence)

    def _grow(self) -> None:
        """Gives every row that begins a new block one, in the order of the rows."""
        if not self._beginning:
            return
        beginning, self._beginning = self._beginning, set()
        for sequence in sorted(beginning, key=lambda sequence: sequence.row):
            if sequence.row < 0:
                continue  # it has ended, or paused, or was preempted just now
            block = self._allocate_for(sequence)
            if block is not None:
                self._tables[sequence.row, len(sequence.blocks)] = block
                self._slots[sequence.row] = block * self.block_size
                sequence.blocks.append(block)

    def _allocate_for(self, sequence: DecodeSequence) -> int | None:
        while (blocks := self.blocks.allocate(1)) is None:
            youngest = next(s for s in reversed(self._by_key.values()) if s.row >= 0)
            del self._by_key[youngest.key]
            self._remove(youngest)
            self.preempted.append(youngest)
            self.num_preemptions += 1
            if youngest is sequence:
                return None
        return blocks[0]

    def _commit_newest(self, sequence: DecodeSequence) -> None:
        block = int(self._positions[sequence.row]) // self.block_size - 1
        prompt, output = sequence.state.prompt_token_ids, sequence.state.output_token_ids
        start, end = block * self.block_size, (block + 1) * self.block_size
        tokens = [*prompt[start:end], *output[max(0, start - len(prompt)) : max(0, end - len(prompt))]]
        block_hash = chain(sequence.last_hash, u32(tokens), self.block_size)[0]
        self.blocks.commit(sequence.blocks[block], block_hash, sequence.last_hash)
        sequence.last_hash = block_hash

    def _remove(self, sequence: DecodeSequence) -> None:
        """Frees the row and the blocks."""
        self._leave_row(sequence)
        self.blocks.release(sequence.blocks)
        sequence.blocks = []

    def _leave_row(self, sequence: DecodeSequence) -> None:
        """Frees the row: the last row moves into it."""
        row, last = sequence.row, len(self._rows) - 1
        if row != last:
            moved = self._rows[last]
            self._rows[row], moved.row = moved, row
            for column in (self._tokens, self._positions, self._slots, self._indices, self._dispatches):
                column[row] = column[last]
            self._tables[row] = self._tables[last]
        self._rows.pop()
        sequence.row = -1
