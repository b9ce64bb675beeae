"""Which sequences take part in the next decode step, and with which blocks: continuous batching. Pure.

    state         until                                                          then
    ------------  -------------------------------------------------------------  ------------
    joining       its grammar is compiled, and no step in flight has it          in the batch
    in the batch  its last token, or it is cancelled, preempted or failed        ended
    in the batch  it is to move (``pause``)                                      paused
    paused        it runs elsewhere (``drop``)                                   ended
    paused        it does not move after all (``resume``)                        joining
    ended         no step in flight has it                                       gone

The next step may be made while the one before runs (``MAX_IN_FLIGHT``): its input tokens are then fed on by
the runner of the steps, and a sequence that turns out to have ended has one row too many, whose token is
dropped. What needs to know more waits for the running step: preemption, a sequence that comes back into the
batch, a step that has drafts or asks for some (drafts.py), and the one behind it. A grammar's mask follows
from the newest token: the runner asks for it when that has come.

A sequence that needs a block when there is none makes the youngest sequence leave (it comes back through the
coordinator with the tokens it has). Blocks are freed when no step in flight reads or writes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from ..engine.cache.block_manager import BlockManager
from ..engine.role_core import SizeLimit
from ..engine.step.batch import SamplingState, StepOutput, finish_reason, last_output_index, stop_set
from ..transport.handoff.protocol import Key
from .drafts import Drafts
from .members import BatchMembers
from .rows import NO_DRAFTS, DecodeResult, DecodeRows, DecodeStep
from .sequences import DecodeSequence, SequenceBlocks, divided

MAX_IN_FLIGHT = 2
STEPS_AT_LIMIT = 64  # steps after which a limit that lack of memory had set is raised by one sequence


class DecodeScheduler:
    """Owns the running sequences of one decode worker."""

    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        max_num_seqs: int,
        max_model_len: int,
        eos_token_ids: frozenset[int],
        window: int = 0,
        drafts: Drafts | None = None,
        state_blocks: int = 0,
    ) -> None:
        """``window``: the model's widest, in tokens; 0: none. ``drafts``: how to draft; None: not at all.
        ``state_blocks``: of each sequence's state; 0: the model has none, and without that no drafts."""
        self.blocks, self.block_size, self.max_num_seqs = blocks, block_size, max_num_seqs
        self.kv_blocks, self._window = SequenceBlocks(blocks, block_size, window), window
        self.row_limit = SizeLimit(max_num_seqs, STEPS_AT_LIMIT, lambda rows: rows + 1)  # how many may run
        self._max_model_len, self._eos = max_model_len, eos_token_ids
        self._drafts = drafts or Drafts(0, 0)
        self._rows = DecodeRows(max_num_seqs, -(-max_model_len // block_size) + 1, block_size, state_blocks)
        self._members = BatchMembers(self._rows)
        self.running: dict[Key, DecodeSequence] = {}
        self.by_request: dict[str, DecodeSequence] = {}
        self._in_flight: deque[DecodeStep] = deque()  # oldest first
        self._failed = False  # a step did not run; what is in flight behind it will not either
        self.preempted: list[DecodeSequence] = []
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return len(self.running)

    @property
    def in_step(self) -> bool:
        """Whether a step with sequences of it is in flight."""
        return bool(self._in_flight)

    @property
    def held(self) -> list[Key]:
        return list(self.running)

    def get(self, key: Key) -> DecodeSequence | None:
        """The sequence, if it is here."""
        return self.running.get(key)

    def block_tables(self) -> Iterator[list[int]]:
        """The blocks that are referenced here; those of a dropped sequence too while a step uses them."""
        for sequence in self.running.values():
            yield from sequence.held
        yield from self.kv_blocks.tables_of_ended()

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
        spare: Sequence[int] = (),
    ) -> None:
        """A handoff is complete. ``state`` includes the first token; ``blocks`` hold every token before it;
        ``spare``: see ``divided``."""
        assert self.num_running < self.max_num_seqs, "a grant promises a row"
        last = last_output_index(state, self._max_model_len)
        stops = stop_set(state, self._eos)
        parts = divided(blocks, spare, state.position - 1)
        sequence = DecodeSequence(key, request_id, state, *parts, last_hash, stops, last, deadline, now)
        sequence.answer_id = answer_id
        self.running[key] = self.by_request[request_id] = sequence
        self._members.add(sequence)

    def drop(self, key: Key) -> None:
        """Forgets a sequence and frees its blocks: at once, or when no step in flight has them."""
        if (sequence := self.running.get(key)) is not None:
            self._end(sequence)

    def rename(self, sequence: DecodeSequence, key: Key, request_id: str, deadline: float) -> None:
        """The sequence goes on as another dispatch, of another request; also in the steps in flight."""
        self.resume(sequence.key)
        del self.running[sequence.key]
        if self.by_request.get(sequence.request_id) is sequence:
            del self.by_request[sequence.request_id]
        sequence.key, sequence.request_id, sequence.deadline = key, request_id, deadline
        self.running[key] = self.by_request[request_id] = sequence
        self._rows.rename(sequence)
        for step in self._in_flight:
            step.dispatches[[row for row, other in enumerate(step.sequences) if other is sequence]] = key[1]

    def pause(self, key: Key) -> None:
        """The sequence keeps its blocks and is in no further step; those in flight still give it their
        tokens."""
        sequence = self.running[key]
        sequence.paused = True
        self._members.remove(sequence)

    def resume(self, key: Key) -> None:
        """A paused sequence takes part in steps again."""
        sequence = self.running[key]
        if sequence.paused:
            self._members.add(sequence)
        sequence.paused = False

    def schedule(self) -> DecodeStep | None:
        """The next step over all running sequences. None: there are none, or it has to wait for one in
        flight. Preempted ones are left in ``preempted``."""
        if self._failed or len(self._in_flight) == MAX_IN_FLIGHT:
            return None
        if self._in_flight and self._in_flight[0].is_awaited:
            return None
        alone = False
        if self._members.are_tried_apart:
            if self._in_flight:
                return None
            alone = self._members.admit_apart()
        else:
            self._members.admit()
        if self._in_flight:
            self._rows.leave_finished()
            if len(self._rows.beginning) > self.blocks.num_available:
                return None
            if self._drafts.pay(self._rows.sequences, self.row_limit.now):
                return None
        self._grow()
        if not self._rows.sequences:
            return None
        drafts = NO_DRAFTS
        if not alone and not self._in_flight:
            drafts = self._drafts.draft(self._rows, self.blocks, self.row_limit.now)
        step = self._rows.build(alone, drafts)
        for sequence in step.sequences:
            sequence.in_flight += 1
        self._in_flight.append(step)
        return step

    def complete(self, step: DecodeStep, output: StepOutput) -> DecodeResult:
        """Books the oldest step in flight: every row's token, full blocks, and the sequences that end with
        it."""
        self._take_out(step)
        self.row_limit.good_step()
        result, num_members = DecodeResult(step, output), len(step.members)
        inputs = step.batch.token_ids  # known of drafts
        rows = zip(step.sequences, output.token_ids.tolist(), step.indices.tolist(), strict=True)
        for row, (sequence, token, index) in enumerate(rows):
            outputs = sequence.state.output_token_ids
            rejected = row >= num_members and (index != len(outputs) or outputs[-1] != inputs[row])
            if sequence.ended or rejected:
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
            outputs.append(token)
            if token in sequence.stops or index >= sequence.last_index:
                reason = finish_reason(
                    token, index, sequence.stops, sequence.state.params.min_tokens, sequence.last_index
                )
                if reason is not None:
                    result.finished[row] = reason
        for row in step.filling:
            if row not in result.dropped:
                self.kv_blocks.commit(
                    step.sequences[row], int(step.batch.seq_lens[row]) // self.block_size - 1
                )
        if self._window:
            for row, num_tokens in enumerate(step.batch.seq_lens.tolist()):
                if row not in result.dropped:
                    self.kv_blocks.release_behind_window(step.sequences[row], num_tokens)
        for row in result.finished:
            self._end(step.sequences[row])
        self._drafts.book(result)
        self.kv_blocks.free_ended(step.sequences)
        for sequence in step.sequences[num_members:]:
            if not sequence.ended:
                self.kv_blocks.trim(sequence)
        if not self._in_flight:
            self._rows.settle(step, output.token_ids)
        return result

    def separate(self, step: DecodeStep, shared: bool = False) -> list[DecodeSequence]:
        """The step raised, and what it wrote will be written again: in halves, until it is known whose fault
        it was. Return the one that was alone in it and has ended here.

        ``shared``: prompts were in it, too. Its sequences are tried without them, and none is over."""
        self._take_out(step)
        left = [s for s in step.members if not s.ended and not s.paused]
        half = len(left) // 2
        if shared:
            self._members.try_apart(left)
        elif half:
            self._members.try_apart(left[half:], left[:half])
        else:
            for sequence in left:
                self._end(sequence)
        self._after_failure(step)
        return [] if half or shared else left

    def shrink(self, step: DecodeStep) -> list[DecodeSequence]:
        """The step ran out of memory, and what it wrote will be written again. The younger half of its
        sequences leave, and no more than the others are admitted for a while. Returns those that leave: all,
        where the step had but one; none, where it had drafts, for which there is no row then."""
        self._take_out(step)
        staying = [s for s in step.members if not s.ended and not s.paused]
        staying.sort(key=list(self.running.values()).index)
        num_left = len(staying) if step.is_awaited else len(staying) // 2
        self.row_limit.lower(max(1, num_left))
        leaving = staying[num_left:]
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
        self.kv_blocks.free_ended(step.sequences)
        self._failed = bool(self._in_flight)
        if not self._failed:
            self._rows.recover()
            self._members.add_left(self.running.values())

    def _grow(self) -> None:
        """Give every row that begins a new block one, in the order of the rows. Where there is none, the
        youngest sequence leaves."""
        for sequence in sorted(self._rows.beginning, key=lambda sequence: sequence.row):
            while sequence.row >= 0:
                if (blocks := self.blocks.allocate(1)) is not None:
                    self._rows.add_block(sequence, blocks[0])
                    break
                assert not self._in_flight, "there was room when a step was made ahead"
                youngest = next(s for s in reversed(self.running.values()) if s.row >= 0)
                self._end(youngest)
                self.preempted.append(youngest)
                self.num_preemptions += 1

    def _end(self, sequence: DecodeSequence) -> None:
        """It is over here. Frees its row, and its blocks as soon as nothing in flight has them."""
        del self.running[sequence.key]
        if self.by_request.get(sequence.request_id) is sequence:
            del self.by_request[sequence.request_id]
        self._members.remove(sequence)
        self.kv_blocks.end(sequence)
