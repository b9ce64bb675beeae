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

from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from ..engine.cache.block_manager import BlockManager
from ..engine.role_core import SizeLimit
from ..engine.step.batch import SamplingState
from ..transport.handoff.protocol import Key
from ..transport.messages.blocks import NO_BLOCK, chain, held, num_behind, root_hash
from ..transport.messages.messages import Peer, RequestSpec, u32_array
from ..transport.messages.prompt_order import prompt_rank
from .chunks import Chunk, PrefillSequence, PrefillStep, batch_of
from .queue_pass import QueuePass
from .states import StateCache, held_states

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
    ) -> None:
        """``for_decode``: how many blocks are to be left to the decode worker over the same blocks, which
        takes every prompt that is computed here; None: there is none. ``window``: the model's widest, in
        tokens; 0: none. ``state_blocks``: of each sequence's state; 0: the model has none."""
        self._states = StateCache(blocks, state_blocks, block_size)
        self.blocks, self.block_size, self._window = blocks, block_size, window
        self.for_decode, self._kv_name = for_decode, kv_name
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
    def fixed_blocks(self) -> int:
        """Blocks that a prompt needs however long it is."""
        return 2 * self._states.num_blocks

    @property
    def held(self) -> list[Key]:
        return [*self.waiting, *self.running, *self.pinned]

    def sequences(self) -> list[PrefillSequence]:
        """The prompts that have anything here."""
        return [*self.waiting.values(), *self.running.values(), *self.pinned.values()]

    def block_tables(self) -> Iterator[list[int]]:
        """The blocks that are referenced here."""
        for sequence in (*self.running.values(), *self.pinned.values()):
            yield held(sequence.blocks)
            yield from held_states(sequence.states)
        chunks = (chunk.states for step in self._in_flight for chunk in step.chunks)
        yield from (states.snapshot for states in chunks if states)

    def add(self, spec: RequestSpec, decode: Peer, now: float) -> PrefillSequence:
        """Takes a prompt in. ``spec`` has at least one token and fits the model (the coordinator saw to
        that)."""
        tokens = u32_array(spec.token_ids)
        prompt, output = tokens[: spec.num_prompt_tokens], tokens[spec.num_prompt_tokens :].tolist()
        sequence = PrefillSequence(
            key=(spec.coordinator, spec.dispatch),
            spec=spec,
            decode=decode,
            token_ids=np.frombuffer(spec.token_ids, "<u4").astype(np.int32),
            hashes=chain(root_hash(self._kv_name, spec.salt, spec.adapter), spec.token_ids, self.block_size),
            state=SamplingState(spec.sampling, prompt, output, adapter=spec.adapter),
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
            self._free(sequence)

    def unpin(self, key: Key) -> None:
        """The handoff of a computed prompt is over."""
        if key in self.pinned:
            self._free(self.pinned.pop(key))

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
        queue = QueuePass(self, now) if self.waiting else None
        candidates = [*self.running.values(), *self.waiting.values()]
        if len(candidates) > 1:
            size, match, aging = self.block_size, self.blocks.match_prefix, self._aging
            candidates.sort(key=lambda s: prompt_rank(s.returns, s.left(size, match), now - s.arrival, aging))
        for sequence in candidates:
            if budget == 0 or len(chunks) == self._max_num_seqs:
                break
            if queue is not None and sequence.key in self.waiting and not queue.starts(sequence):
                continue
            count = min(budget, sequence.until_branch)
            if count == 0 or sequence.cancelled or (sequence.alone and (chunks or num_decode_rows)):
                continue
            if sequence.state.lacks_matcher and count == sequence.unscheduled and not sequence.scores_only:
                continue  # nothing could be sampled yet
            chunks.append(self._chunk(sequence, count))
            sequence.num_scheduled += count
            sequence.num_steps += 1
            budget = 0 if sequence.alone else budget - count
        if not chunks:
            return None
        self._budget.good_step()
        batch = batch_of(chunks, self.block_size)
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
        for sequence, states in [(chunk.sequence, chunk.states) for chunk in step.chunks]:
            sequence.num_steps -= 1
            sequence.num_scheduled = sequence.num_computed
            self._states.release(states)
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
            self._states.release(chunk.states)
            self.drop(sequence.key)
            return False
        first, last = sequence.num_computed // self.block_size, chunk.end // self.block_size
        sequence.num_computed += chunk.count
        before = sequence.hashes[first - 1] if first else None
        self.blocks.commit_all(sequence.blocks[first:last], sequence.hashes[first:last], before)
        if chunk.states:
            self._states.book(sequence.states, chunk.states, sequence.hashes[last - 1] if last else None)
        self._release_behind_window(sequence)
        if chunk.is_last:
            del self.running[sequence.key]
            self.pinned[sequence.key] = sequence
        return True

    def start(self, sequence: PrefillSequence, now: float) -> bool:
        """Give a waiting prompt all its blocks. Return False if there is no room.

        Beside a decode worker some are left to it: those that its sequences may grow into, and a last,
        partial block for each prompt from here, which moves."""
        left = self._left_to_decode(len(self.running) + len(self.pinned) + 1)
        usable = sequence.usable_hashes(self.block_size)
        cached_hashes = usable[: self.blocks.match_prefix(usable)]
        total = -(-sequence.num_tokens // self.block_size)
        for hits in (self._states.match(cached_hashes), 0):  # a snapshot needs room, too
            needed = total - hits + left + self._states.num_needed(usable[:hits])
            behind = num_behind(hits * self.block_size, self._window, self.block_size)
            if needed <= self.blocks.num_available - self.blocks.num_idle_among(usable[behind:hits]):
                break
        else:
            return False
        cached = self.blocks.acquire_prefix(usable[behind:hits])
        sequence.states = self._states.begin(cached_hashes, hits)
        fresh = self.blocks.allocate(total - hits)
        assert fresh is not None, "room was checked"
        sequence.blocks = [NO_BLOCK] * behind + cached + fresh
        sequence.num_computed = sequence.num_scheduled = sequence.num_cached_tokens = hits * self.block_size
        sequence.started = now
        self.num_prompt_tokens += sequence.num_tokens
        self.num_cached_tokens += sequence.num_cached_tokens
        self.running[sequence.key] = self.waiting.pop(sequence.key)
        self.started.append(sequence)
        return True

    def _left_to_decode(self, num_prompts: int) -> int:
        """Blocks to leave to the decode worker over the same ones, with this number of prompts from here."""
        return self.for_decode() + num_prompts * (1 + self.fixed_blocks) if self.for_decode else 0

    def _chunk(self, sequence: PrefillSequence, count: int) -> Chunk:
        start, left = sequence.num_scheduled, self._left_to_decode(len(self.running) + len(self.pinned))
        states = self._states.of_chunk(
            sequence.states, sequence.num_steps, start, start + count, sequence.hashes, left
        )
        return Chunk(sequence, start, count, states)

    def _free(self, sequence: PrefillSequence) -> None:
        self.blocks.release(sequence.blocks)
        self._states.free(sequence.states)

    def _release_behind_window(self, sequence: PrefillSequence) -> None:
        """No later chunk reads these blocks, and the decode worker wants none of them."""
        behind = num_behind(sequence.num_computed, self._window, self.block_size)
        if behind and (left := held(sequence.blocks[:behind])):
            self.blocks.release(left)
            sequence.blocks[:behind] = [NO_BLOCK] * behind
