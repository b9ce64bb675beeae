"""Which sequences take part in the next decode step, and with which blocks: continuous batching. Pure.

The next step may be made while the one before runs (``MAX_IN_FLIGHT``): its input tokens are then fed on by
the runner of the steps, and a sequence that turns out to have ended has one row too many, whose token is
dropped. What needs to know more waits for the running step: preemption, and a sequence that comes back into
the batch. A grammar's mask follows from the newest token: the runner asks for it when that token has come.

A sequence that needs a block when there is none makes the youngest sequence leave (it comes back through the
coordinator with the tokens it has). Blocks are freed when no step in flight reads or writes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..engine.cache.block_manager import BlockManager
from ..engine.step.batch import SamplingState, StepOutput, finish_reason, last_output_index, stop_set
from ..transport.handoff.protocol import Key, Wait
from ..transport.messages.blocks import NO_BLOCK, chain, held, num_behind
from ..transport.messages.messages import FinishReason, u32
from .rows import DecodeRows, DecodeSequence, DecodeStep

MAX_IN_FLIGHT = 2
STEPS_AT_LIMIT = 64  # steps after which a limit that lack of memory had set is raised by one sequence


@dataclass(slots=True)
class DecodeResult:
    """One finished step: columns as StepTokens carries them, rows that ended, rows to leave out (dropped
    meanwhile, or ended before)."""

    step: DecodeStep
    output: StepOutput
    finished: dict[int, FinishReason] = field(default_factory=dict)
    dropped: list[int] = field(default_factory=list)
    failed: dict[DecodeSequence, str] = field(
        default_factory=dict
    )  # those of ``dropped`` whose grammar cannot go on, and why


class DecodeScheduler:
    """Owns the running sequences of one decode worker."""

    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        prefix_cache: bool = True,
        window: int = 0,
    ) -> None:
        """``prefix_cache``: whether blocks may be found again by their hashes; ``window``: the model's
        widest, in tokens; 0: none."""
        self.blocks, self.block_size, self.max_num_seqs = blocks, block_size, max_num_seqs
        self.prefix_cache, self._window = prefix_cache, window
        self.row_limit = max_num_seqs  # lower for a while after a step that ran out of memory
        self._steps_at_limit = 0
        self._max_model_len, self._eos = max_model_len, eos_token_ids
        self._rows = DecodeRows(max_num_seqs, -(-max_model_len // block_size) + 1, block_size)
        self._joining: list[DecodeSequence] = []
        self._by_key: dict[Key, DecodeSequence] = {}
        self._by_request: dict[str, DecodeSequence] = {}
        self._ended: dict[DecodeSequence, None] = {}
        self._in_flight: deque[DecodeStep] = deque()  # oldest first
        self._failed = False  # a step did not run; what is in flight behind it will not either
        self._apart: list[
            list[DecodeSequence]
        ] = []  # of a step that raised: the last group is in the next step, and nobody else
        self.preempted: list[DecodeSequence] = []
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self._by_key)

    @property
    def in_step(self) -> bool:
        """Whether a step with sequences of it is in flight."""
        return bool(self._in_flight)

    @property
    def held(self) -> list[Key]:
        return list(self._by_key)

    def sequences(self) -> list[DecodeSequence]:
        return list(self._by_key.values())

    def get(self, key: Key) -> DecodeSequence | None:
        """The sequence, if it is here."""
        return self._by_key.get(key)

    def of_request(self, request_id: str) -> DecodeSequence | None:
        """This request's sequence, by whatever dispatch it is here."""
        return self._by_request.get(request_id)

    def waits(self) -> Iterator[Wait]:
        """Every sequence here."""
        for sequence in self._by_key.values():
            yield Wait(sequence.key, "its end", sequence.deadline)

    def block_tables(self) -> Iterator[list[int]]:
        """The blocks that are referenced here; those of a dropped sequence too while a step uses them."""
        yield from (held(sequence.blocks) for sequence in self._by_key.values())
        yield from (held(sequence.blocks) for sequence in self._ended)

    def join(
        self,
        key: Key,
        request_id: str,
        state: SamplingState,
        blocks: list[int],
        last_hash: bytes,
        deadline: float,
        now: float = 0.0,
        answer_id: bytes = b"",
    ) -> None:
        """A handoff is complete. ``state`` includes the first token; ``blocks`` hold every token before
        it."""
        assert self.num_running < self.max_num_seqs, "a grant promises a row"
        last = last_output_index(state, self._max_model_len)
        stops = stop_set(state, self._eos)
        sequence = DecodeSequence(key, request_id, state, blocks, last_hash, stops, last, deadline, now)
        sequence.answer_id = answer_id
        self._by_key[key] = self._by_request[request_id] = sequence
        self._joining.append(sequence)

    def drop(self, key: Key) -> bool:
        """Forgets a sequence and frees its blocks: at once, or when the last step in flight that has them
        ends."""
        sequence = self._by_key.get(key)
        if sequence is None:
            return False
        self._end(sequence)
        return True

    def rename(self, sequence: DecodeSequence, key: Key, request_id: str, deadline: float) -> None:
        """The sequence goes on as another dispatch, of another request; also in the steps in flight."""
        self.resume(sequence.key)
        del self._by_key[sequence.key]
        if self._by_request.get(sequence.request_id) is sequence:
            del self._by_request[sequence.request_id]
        sequence.key, sequence.request_id, sequence.deadline = key, request_id, deadline
        self._by_key[key] = self._by_request[request_id] = sequence
        self._rows.rename(sequence)
        for step in self._in_flight:
            if sequence in step.sequences:
                step.dispatches[step.sequences.index(sequence)] = key[1]

    def pause(self, key: Key) -> None:
        """The sequence keeps its blocks and is in no further step; those in flight still give it their
        tokens."""
        sequence = self._by_key[key]
        sequence.paused = True
        self._leave_batch(sequence)

    def resume(self, key: Key) -> None:
        """A paused sequence takes part in steps again."""
        sequence = self._by_key[key]
        if sequence.paused:
            self._joining.append(sequence)
        sequence.paused = False

    def is_still(self, key: Key) -> bool:
        """Whether a paused sequence's tokens and blocks are final."""
        return self._by_key[key].in_flight == 0

    def schedule(self) -> DecodeStep | None:
        """The next step over all running sequences. None: there are none, or it has to wait for one in
        flight. Preempted ones are left in ``preempted``."""
        if self._failed or len(self._in_flight) == MAX_IN_FLIGHT:
            return None
        alone = False
        if self._apart:
            if self._in_flight:
                return None
            alone = self._admit_apart()
        elif self._joining:
            self._admit()
        if self._in_flight and not self._may_run_ahead():
            return None
        self._grow()
        if not self._rows.sequences:
            return None
        step = self._rows.build(alone)
        for sequence in step.sequences:
            sequence.in_flight += 1
        self._in_flight.append(step)
        return step

    def complete(self, step: DecodeStep, output: StepOutput) -> DecodeResult:
        """Books the oldest step in flight: every row's token, full blocks, and the sequences that end with
        it."""
        self._take_out(step)
        self._raise_row_limit()
        result = DecodeResult(step, output)
        rows = zip(step.sequences, output.token_ids.tolist(), step.indices.tolist(), strict=True)
        for row, (sequence, token, index) in enumerate(rows):
            if sequence.ended:
                result.dropped.append(row)
                continue
            if (
                token in sequence.stops
                and (matcher := sequence.state.matcher) is not None
                and (failure := matcher.failure(index))
            ):
                result.failed[sequence] = failure
                result.dropped.append(row)
                self._end(sequence)
                continue
            sequence.state.output_token_ids.append(token)
            if token in sequence.stops or index >= sequence.last_index:
                reason = finish_reason(
                    token, index, sequence.stops, sequence.state.params.min_tokens, sequence.last_index
                )
                if reason is not None:
                    result.finished[row] = reason
        for row in step.filling if self.prefix_cache else ():
            if step.sequences[row].blocks and not step.sequences[row].ended:
                self._commit(step.sequences[row], int(step.batch.seq_lens[row]) // self.block_size - 1)
        if self._window:
            self._release_behind_window(step)
        for row in result.finished:
            self._end(step.sequences[row])
        self._free_ended(step)
        if not self._in_flight:
            self._rows.settle(output.token_ids)
        return result

    def separate(self, step: DecodeStep, shared: bool = False) -> list[DecodeSequence]:
        """The step raised, and what it wrote will be written again: in halves, until it is known whose fault
        it was. Return the one that was alone in it and has ended here.

        ``shared``: prompts were in it, too. Its sequences are tried without them, and none is over."""
        self._take_out(step)
        left = [s for s in step.sequences if not s.ended and not s.paused]
        half = len(left) // 2
        if shared:
            self._apart.append(left)
        elif half:
            self._apart += [left[half:], left[:half]]
        else:
            for sequence in left:
                self._end(sequence)
        self._after_failure(step)
        return [] if half or shared else left

    def shrink(self, step: DecodeStep) -> list[DecodeSequence]:
        """The step ran out of memory, and what it wrote will be written again. The younger half of its
        sequences leave, and no more than the others are admitted for a while. Returns those that leave: all,
        where the step had but one."""
        self._take_out(step)
        staying = [s for s in step.sequences if not s.ended and not s.paused]
        staying.sort(key=list(self._by_key.values()).index)
        self.row_limit, self._steps_at_limit = max(1, len(staying) // 2), 0
        leaving = staying[len(staying) // 2 :]
        for sequence in leaving:
            self._end(sequence)
        self._after_failure(step)
        return leaving

    def skip(self, step: DecodeStep) -> None:
        """The step before this one failed, so this one has not run."""
        self._take_out(step)
        self._after_failure(step)

    def _take_out(self, step: DecodeStep) -> None:
        oldest = self._in_flight.popleft()
        assert oldest is step, "steps end in the order in which they were made"
        for sequence in step.sequences:
            sequence.in_flight -= 1

    def _after_failure(self, step: DecodeStep) -> None:
        self._free_ended(step)
        self._failed = bool(self._in_flight)
        if not self._failed:
            self._rows.recover()
            for sequence in self._by_key.values():  # those that were to have their last token by now
                if sequence.row < 0 and not sequence.paused and sequence not in self._joining:
                    self._joining.append(sequence)

    def _raise_row_limit(self) -> None:
        """Raise the limit by one row after STEPS_AT_LIMIT good steps."""
        if self.row_limit < self.max_num_seqs:
            self._steps_at_limit += 1
            if self._steps_at_limit == STEPS_AT_LIMIT:
                self.row_limit, self._steps_at_limit = self.row_limit + 1, 0

    def _admit(self) -> None:
        """Take joined sequences into the batch, except those whose grammar is still being compiled, and those
        still in a step: their newest token is not known."""
        for sequence in self._joining:
            if not sequence.state.lacks_matcher and not sequence.in_flight:
                self._rows.enter(sequence)
        self._joining = [sequence for sequence in self._joining if sequence.row < 0]

    def _admit_apart(self) -> bool:
        """Only the next group of a step that raised is in the batch; the others stay with the joining ones.
        Return False if all groups have ended meanwhile."""
        group: list[DecodeSequence] = []
        while self._apart and not group:
            group = [
                s for s in self._apart.pop() if not s.ended and not s.paused and self._by_key.get(s.key) is s
            ]
        if not group:
            self._admit()
            return False
        for sequence in [s for s in self._rows.sequences if s not in group]:
            self._rows.leave(sequence)
            self._joining.append(sequence)
        for sequence in group:
            if sequence.row < 0:
                self._joining.remove(sequence)
                self._rows.enter(sequence)
        return True

    def _may_run_ahead(self) -> bool:
        """Return whether a step can be made while another runs. Sequences that get their last token from that
        one are in no further step."""
        for sequence in self._rows.finished():
            self._rows.leave(sequence)
        return len(self._rows.beginning) <= self.blocks.num_available

    def _grow(self) -> None:
        """Gives every row that begins a new block one, in the order of the rows."""
        for sequence in sorted(self._rows.beginning, key=lambda sequence: sequence.row):
            if sequence.row >= 0 and (block := self._allocate_for(sequence)) is not None:
                self._rows.add_block(sequence, block)

    def _allocate_for(self, sequence: DecodeSequence) -> int | None:
        while (blocks := self.blocks.allocate(1)) is None:
            assert not self._in_flight, "there was room when a step was made ahead"
            youngest = next(s for s in reversed(self._by_key.values()) if s.row >= 0)
            self._end(youngest)
            self.preempted.append(youngest)
            self.num_preemptions += 1
            if youngest is sequence:
                return None
        return blocks[0]

    def _commit(self, sequence: DecodeSequence, block: int) -> None:
        """The sequence's ``block``-th block is full."""
        prompt, output = sequence.state.prompt_token_ids, sequence.state.output_token_ids
        start, end = block * self.block_size, (block + 1) * self.block_size
        tokens = [*prompt[start:end], *output[max(0, start - len(prompt)) : max(0, end - len(prompt))]]
        block_hash = chain(sequence.last_hash, u32(tokens), self.block_size)[0]
        self.blocks.commit(sequence.blocks[block], block_hash, sequence.last_hash)
        sequence.last_hash = block_hash

    def _release_behind_window(self, step: DecodeStep) -> None:
        """The step has run: later ones, one of which may be in flight, read no block that its successor does
        not."""
        for sequence, num_tokens in zip(step.sequences, step.batch.seq_lens.tolist(), strict=True):
            last = num_behind(num_tokens, self._window, self.block_size) - 1
            if last >= 0 and sequence.blocks and not sequence.ended and sequence.blocks[last] != NO_BLOCK:
                self.blocks.release(sequence.blocks[last : last + 1])
                sequence.blocks[last] = NO_BLOCK

    def _end(self, sequence: DecodeSequence) -> None:
        """It is over here. Frees its row, and its blocks as soon as nothing in flight has them."""
        del self._by_key[sequence.key]
        if self._by_request.get(sequence.request_id) is sequence:
            del self._by_request[sequence.request_id]
        self._leave_batch(sequence)
        if sequence.in_flight:
            sequence.ended = True
            self._ended[sequence] = None
        else:
            self._free(sequence)

    def _leave_batch(self, sequence: DecodeSequence) -> None:
        if sequence.row >= 0:
            self._rows.leave(sequence)
        elif sequence in self._joining:
            self._joining.remove(sequence)

    def _free_ended(self, step: DecodeStep) -> None:
        for sequence in step.sequences:
            if sequence.ended and not sequence.in_flight:
                del self._ended[sequence]
                self._free(sequence)

    def _free(self, sequence: DecodeSequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []
