"""Which prompt tokens are computed next: chunked prefill under a token budget, over a prefix cache. Pure.

    state    until                                          then
    -------  ---------------------------------------------  -------
    waiting  the pool has all its blocks                    running
    running  its last chunk is computed                     pinned
    pinned   its decode worker has the blocks               gone
    any      it is cancelled, and no step in flight has it  gone

Order: requests that come back from a lost attempt first, for their streams stand still; then shortest
remaining prompt first, cached tokens left out, where every second of waiting counts as ``aging`` tokens less,
so that long prompts are not starved. A prompt takes all its blocks when it starts (two half-computed ones can
never block each other); one that has waited longer than ``starving_s`` for blocks keeps younger ones from
taking them. A prompt whose next block is computed for another waits; a last chunk waits for its grammar.

Computed blocks stay until their decode worker has them. One that takes in too little keeps at most half of
the pool in this way while there are prompts for others: it slows its own requests, not theirs."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..engine.cache.block_manager import BlockManager
from ..engine.role_core import SizeLimit
from ..engine.step.batch import SamplingState
from ..transport.handoff.protocol import Key
from ..transport.messages.blocks import chain, root_hash
from ..transport.messages.images import Image
from ..transport.messages.messages import Peer, PeerId, RequestSpec, u32_array
from ..transport.messages.prompt_order import prompt_rank
from .chunks import Chunk, PrefillSequence, PrefillStep, batch_of
from .prompt_blocks import PromptBlocks, tables
from .states import StateCache

STEPS_AT_BUDGET = 32  # steps after which a budget that lack of memory had cut is doubled


class PrefillScheduler:
    """Owns the prompts of one prefill worker, from arrival until their blocks are no longer needed."""

    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        kv_name: str,
        max_batch_tokens: int,
        max_num_seqs: int,
        aging: float | None = None,
        starving_s: float = 2.0,
        for_decode: Callable[[], int] | None = None,
        window: int = 0,
        state_blocks: int = 0,
        model_drafts: bool = False,
    ) -> None:
        """``for_decode``: how many blocks are to be left to the decode worker over the same blocks, which
        takes every prompt that is computed here; None: there is none. ``window``: the model's widest, in
        tokens; 0: none. ``state_blocks``: of each sequence's state; 0: the model has none. ``model_drafts``:
        see ``batch_of``."""
        states = StateCache(blocks, state_blocks, block_size)
        self.prompt_blocks = PromptBlocks(blocks, block_size, window, states, for_decode)
        self.blocks, self.block_size = blocks, block_size
        self.for_decode, self._kv_name, self._model_drafts = for_decode, kv_name, model_drafts
        self._max_batch_tokens, self._max_num_seqs = max_batch_tokens, max_num_seqs
        self._budget = SizeLimit(max_batch_tokens, STEPS_AT_BUDGET, lambda tokens: 2 * tokens)
        self._aging, self.starving_s = float(max_batch_tokens) if aging is None else aging, starving_s
        self.waiting: dict[Key, PrefillSequence] = {}
        self.running: dict[Key, PrefillSequence] = {}
        self.started: list[PrefillSequence] = []
        """They have got their blocks: in a step, or before one while their grammar is compiled."""
        self.pinned: dict[Key, PrefillSequence] = {}  # computed; blocks kept until the handoff is over
        self._in_flight: deque[PrefillStep] = deque()  # oldest first
        self._failed = False  # a step did not run; what is in flight behind it will not either
        self.num_prompt_tokens = self.num_cached_tokens = 0

    def num_waiting_tokens(self, but_of: int | None = None) -> int:
        """Tokens that are to be computed yet; without those of the coordinator ``but_of``."""
        unfinished = (*self.waiting.values(), *self.running.values())
        return sum(s.remaining for s in unfinished if s.key[0] != but_of)

    @property
    def held(self) -> list[Key]:
        return [*self.waiting, *self.running, *self.pinned]

    def sequences(self) -> list[PrefillSequence]:
        """The prompts that have anything here."""
        return [*self.waiting.values(), *self.running.values(), *self.pinned.values()]

    def block_tables(self) -> Iterator[list[int]]:
        """The blocks that are referenced here."""
        for sequence in (*self.running.values(), *self.pinned.values()):
            yield from tables(sequence)
        chunks = (chunk.states for step in self._in_flight for chunk in step.chunks)
        yield from (states.snapshot for states in chunks if states)

    def add(
        self, spec: RequestSpec, decode: Peer, now: float, images: Sequence[Image] = ()
    ) -> PrefillSequence:
        """Takes a prompt in, of at least one token; the coordinator saw to it that it fits the model."""
        tokens = u32_array(spec.token_ids)
        prompt, output = tokens[: spec.num_prompt_tokens], tokens[spec.num_prompt_tokens :].tolist()
        sequence = PrefillSequence(
            key=(spec.coordinator, spec.dispatch),
            spec=spec,
            decode=decode,
            token_ids=np.frombuffer(spec.token_ids, "<u4").astype(np.int32),
            hashes=chain(root_hash(self._kv_name, spec.salt, spec.adapter), spec.token_ids, self.block_size),
            state=SamplingState(spec.sampling, prompt, output, adapter=spec.adapter),
            images=images,
            arrival=now,
            deadline=now + spec.deadline_s,
        )
        self.waiting[sequence.key] = sequence
        return sequence

    def get(self, key: Key) -> PrefillSequence | None:
        """The prompt, if it is here and not computed yet."""
        return self.waiting.get(key) or self.running.get(key)

    def drop(self, key: Key) -> None:
        """Forgets a prompt and frees its blocks: at once, or when the running step that writes them ends."""
        sequence = self.waiting.pop(key, None) or self.running.get(key) or self.pinned.pop(key, None)
        if sequence is None:
            return
        if sequence.in_step:
            sequence.cancelled = True
        else:
            self.running.pop(key, None)
            self.prompt_blocks.free(sequence)

    def unpin(self, key: Key) -> None:
        """The handoff of a computed prompt is over."""
        if key in self.pinned:
            self.prompt_blocks.free(self.pinned.pop(key))

    def schedule(self, now: float, num_decode_rows: int = 0) -> PrefillStep | None:
        """The next step's chunks, or None where there is nothing to compute. New prompts are taken from
        ``waiting`` as they fit. Steps before it need not have been booked; behind one that failed, none is
        made until those in flight have been skipped.

        ``num_decode_rows``: sequences that generate in the same step, each a token of its budget. At least a
        block is left to prompts, so that they are never starved."""
        if self._failed or not (self.waiting or self.running):
            return None
        most = max(self._max_batch_tokens - num_decode_rows, min(self.block_size, self._max_batch_tokens))
        budget = min(self._budget.now, most)
        chunks: list[Chunk] = []
        queue = _QueuePass(self, now) if self.waiting else None
        started = (s for s in self.running.values() if s.unscheduled and not s.cancelled)
        candidates = [*started, *self.waiting.values()]
        if len(candidates) > 1:
            size, cached, aging = self.block_size, self.prompt_blocks.num_cached, self._aging
            candidates.sort(
                key=lambda s: prompt_rank(s.returns, s.left(size, cached), now - s.arrival, aging)
            )
        for sequence in candidates:
            if budget == 0 or len(chunks) == self._max_num_seqs:
                break
            if queue is not None and sequence.key in self.waiting and not queue.starts(sequence):
                continue
            count = min(budget, sequence.until_branch)
            if sequence.alone and (chunks or num_decode_rows):
                continue
            if sequence.state.lacks_matcher and count == sequence.unscheduled and not sequence.scores_only:
                continue  # nothing could be sampled yet
            others = len(self.running) + len(self.pinned)
            chunks.append(self.prompt_blocks.chunk(sequence, count, others))
            sequence.num_scheduled += count
            sequence.num_steps += 1
            budget = 0 if sequence.alone else budget - count
        if not chunks:
            return None
        self._budget.good_step()
        batch = batch_of(chunks, self.block_size, self._model_drafts)
        is_full = batch.num_tokens >= most or len(chunks) == self._max_num_seqs
        self._in_flight.append(step := PrefillStep(chunks, batch, is_full, now))
        return step

    @property
    def tries_apart(self) -> bool:
        """Whether a prompt waits for a step of its own, because one with others raised."""
        return any(s.alone and s.unscheduled and not s.cancelled for s in self.running.values())

    def shrink(self, step: PrefillStep) -> list[PrefillSequence]:
        """The step ran out of memory: half as many tokens a step for a while. Returns its prompts where it is
        down to a block already."""
        if step.batch.num_tokens <= self.block_size:
            return self._give_up(step)
        self._budget.lower(step.batch.num_tokens // 2)
        self.skip(step)
        return []

    def separate(self, step: PrefillStep, shared: bool = False) -> list[PrefillSequence]:
        """The step raised: each of its prompts is computed alone from now on. Returns the one that was alone
        in it. ``shared``: sequences that generate were in it, too."""
        if len(step.chunks) == 1 and not shared:
            return self._give_up(step)
        for chunk in step.chunks:
            chunk.sequence.alone = True
        self.skip(step)
        return []

    def _give_up(self, step: PrefillStep) -> list[PrefillSequence]:
        left = [chunk.sequence for chunk in step.chunks if not chunk.sequence.cancelled]
        self.skip(step)
        return left

    def skip(self, step: PrefillStep) -> None:
        """The step has not been run, or counts for nothing: its chunks are to be computed yet. What was
        dropped meanwhile is gone."""
        self._take_out(step)
        self._failed = bool(self._in_flight)
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.num_steps -= 1
            sequence.num_scheduled = sequence.num_computed
            self.prompt_blocks.drop(chunk)
            if sequence.cancelled:
                self.drop(sequence.key)

    def complete(self, step: PrefillStep) -> list[tuple[int, Chunk]]:
        """Books the oldest step in flight. Returns its chunks, each with its row; without those of sequences
        that had been dropped, which are gone with their last step."""
        self._take_out(step)
        return [(row, chunk) for row, chunk in enumerate(step.chunks) if self._complete(chunk)]

    def _take_out(self, step: PrefillStep) -> None:
        oldest = self._in_flight.popleft()
        assert oldest is step, "steps end in the order in which they were made"

    def _complete(self, chunk: Chunk) -> bool:
        sequence = chunk.sequence
        sequence.num_steps -= 1
        if sequence.cancelled:
            self.prompt_blocks.drop(chunk)
            self.drop(sequence.key)
            return False
        self.prompt_blocks.book(chunk)
        if chunk.is_last:
            del self.running[sequence.key]
            self.pinned[sequence.key] = sequence
        return True

    def start(self, sequence: PrefillSequence, now: float) -> bool:
        """Give a waiting prompt all its blocks. Return False if there is no room."""
        if not self.prompt_blocks.take(sequence, len(self.running) + len(self.pinned)):
            return False
        sequence.started = now
        self.num_prompt_tokens += sequence.num_tokens
        self.num_cached_tokens += sequence.num_cached_tokens
        self.running[sequence.key] = self.waiting.pop(sequence.key)
        self.started.append(sequence)
        return True


class _QueuePass:
    """One pass over the prompts that wait, most urgent first: which of them start."""

    def __init__(self, scheduler: PrefillScheduler, now: float) -> None:
        self._scheduler, self._now = scheduler, now
        running, size = scheduler.running.values(), scheduler.block_size
        self._computing = {block_hash for s in running if (block_hash := s.next_hash(size))}
        self._branches = {block_hash for s in running if (block_hash := s.branch_hash(size))}
        self._crowding = self._crowding_peers()
        self._starved = False  # a prompt that has waited too long gets the next blocks

    def starts(self, sequence: PrefillSequence) -> bool:
        """Start this prompt, unless it has to wait for blocks, its decode worker, cached blocks of another
        worker, or another prompt that computes its next block."""
        waits = self._starved or sequence.peer_id in self._crowding or self._now < sequence.prefix_by
        if waits or self._being_computed(sequence):
            return False
        if not self._scheduler.start(sequence, self._now):
            self._starved = self._now - sequence.arrival > self._scheduler.starving_s
            return False
        if block_hash := sequence.next_hash(self._scheduler.block_size):
            self._computing.add(block_hash)
        if block_hash := sequence.branch_hash(self._scheduler.block_size):
            self._branches.add(block_hash)
        return True

    def _being_computed(self, sequence: PrefillSequence) -> bool:
        usable = sequence.usable_hashes(self._scheduler.block_size)
        hits = self._scheduler.blocks.match_prefix(usable)
        if hits and usable[hits - 1] in self._branches:
            return True  # it will have a snapshot there
        return hits < len(usable) and usable[hits] in self._computing

    def _crowding_peers(self) -> set[PeerId]:
        """Decode workers whose blocks, computed and not taken in, fill half of the pool while prompts for
        others wait."""
        scheduler = self._scheduler
        if len({s.peer_id for s in scheduler.waiting.values()}) < 2:
            return set()
        kept: Counter[PeerId] = Counter()
        for sequence in scheduler.pinned.values():
            kept[sequence.peer_id] += sum(map(len, tables(sequence)))
        return {peer for peer, count in kept.items() if count >= scheduler.blocks.num_blocks // 2}
