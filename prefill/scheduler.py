"""Which prompt tokens are computed next: chunked prefill under a token budget, over a prefix cache. Pure.

Order: requests that come back from a lost attempt first, for their streams stand still; then shortest
remaining prompt first, where every second of waiting counts as ``aging`` tokens less, so that long prompts
are not starved. A prompt takes all its blocks when it starts (two half-computed prompts can never block each
other); one that has waited longer than ``starving_s`` for blocks keeps younger ones from taking them. A
prompt whose next block is just being computed for another prompt waits for it instead of computing it twice.
The last chunk waits for the grammar that its token must follow.

Computed blocks stay until their decode worker has them. One that takes in too little keeps at most half of
the pool in this way while there are prompts for others: it slows its own requests, not theirs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..engine.cache.block_manager import BlockManager
from ..engine.step.batch import Batch, SamplingState
from ..transport.handoff.protocol import Key, Wait
from ..transport.messages.blocks import NO_BLOCK, chain, held, num_behind, root_hash
from ..transport.messages.messages import Peer, PeerId, RequestSpec, u32_array
from ..transport.messages.prompt_order import prompt_rank

STEPS_AT_BUDGET = 32  # steps after which a budget that lack of memory had cut is doubled


@dataclass(slots=True)
class PrefillSequence:
    """One prompt (with the output it already has, if it was dispatched before)."""

    key: Key
    spec: RequestSpec
    decode: Peer
    token_ids: NDArray[np.int32]
    hashes: list[bytes]
    state: SamplingState
    arrival: float
    deadline: float
    blocks: list[int] = field(default_factory=list)  # NO_BLOCK behind a sliding window
    num_computed: int = 0
    num_scheduled: int = 0  # computed, or in a step that has not been booked
    num_steps: int = 0  # those steps
    num_cached_tokens: int = 0
    started: float = 0.0
    cancelled: bool = False  # cancelled while a step that writes its blocks is running
    alone: bool = False  # a step raised that it was in: nobody else is in its next ones

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def remaining(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def in_step(self) -> bool:
        return self.num_steps > 0

    @property
    def unscheduled(self) -> int:
        """Tokens that no step has taken along yet."""
        return self.num_tokens - self.num_scheduled

    @property
    def peer_id(self) -> PeerId:
        return (self.decode.worker_id, self.decode.incarnation)

    @property
    def returns(self) -> bool:
        """It was dispatched before, and its attempt was lost."""
        return self.spec.epoch > 0

    @property
    def scores_only(self) -> bool:
        """``max_tokens`` 0: the prompt's logprobs are wanted, and no token."""
        return self.spec.sampling.max_tokens == 0


@dataclass(frozen=True, slots=True)
class Chunk:
    sequence: PrefillSequence
    start: int
    count: int

    @property
    def is_last(self) -> bool:
        return self.start + self.count == self.sequence.num_tokens


@dataclass(frozen=True, slots=True)
class PrefillStep:
    chunks: list[Chunk]
    batch: Batch
    is_full: bool = False  # no more prompt tokens would have gone into it: its rate is the worker's best


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
    ) -> None:
        """``for_decode``: how many blocks are to be left to the decode worker over the same blocks, which
        takes every prompt that is computed here; None: there is none. ``window``: the model's widest, in
        tokens; 0: none."""
        self.blocks, self.block_size, self._window = blocks, block_size, window
        self._offsets = np.arange(block_size, dtype=np.int64)  # of tokens in a block
        self._for_decode = for_decode
        self._kv_name = kv_name
        self._max_batch_tokens, self._max_num_seqs = max_batch_tokens, max_num_seqs
        self._budget = max_batch_tokens  # lower for a while after a step that ran out of memory
        self._steps_at_budget = 0
        self._aging = float(max_batch_tokens) if aging is None else aging
        self._starving_s = starving_s
        self.waiting: dict[Key, PrefillSequence] = {}
        self.running: dict[Key, PrefillSequence] = {}
        self._started: list[PrefillSequence] = []
        self.pinned: dict[Key, PrefillSequence] = {}  # computed; blocks kept until the handoff is over
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0

    @property
    def num_waiting_tokens(self) -> int:
        return sum(s.remaining for s in (*self.waiting.values(), *self.running.values()))

    def num_waiting_tokens_but_of(self, coordinator: int) -> int:
        """Return the tokens that wait for other coordinators."""
        return sum(
            s.remaining for s in (*self.waiting.values(), *self.running.values()) if s.key[0] != coordinator
        )

    @property
    def held(self) -> list[Key]:
        """Every prompt of which anything is kept here."""
        return [*self.waiting, *self.running, *self.pinned]

    def waits(self) -> Iterator[Wait]:
        """Yield a wait for every prompt here that is not cancelled."""
        for sequence in (*self.waiting.values(), *self.running.values(), *self.pinned.values()):
            if not sequence.cancelled:
                yield Wait(
                    sequence.key,
                    "its handoff" if sequence.key in self.pinned else "its turn",
                    sequence.deadline,
                )

    def block_tables(self) -> Iterator[list[int]]:
        """The blocks that are referenced here."""
        yield from (held(sequence.blocks) for sequence in (*self.running.values(), *self.pinned.values()))

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
            hashes=chain(root_hash(self._kv_name, spec.salt), spec.token_ids, self.block_size),
            state=SamplingState(spec.sampling, prompt, output),
            arrival=now,
            deadline=now + spec.deadline_s,
        )
        self.waiting[sequence.key] = sequence
        return sequence

    def get(self, key: Key) -> PrefillSequence | None:
        """The prompt, if it is here and not computed yet."""
        return self.waiting.get(key) or self.running.get(key)

    def drop(self, key: Key) -> PrefillSequence | None:
        """Forgets a prompt and frees its blocks: at once, or when the running step that writes them ends."""
        sequence = self.waiting.pop(key, None) or self.running.get(key) or self.pinned.pop(key, None)
        if sequence is None:
            return None
        if sequence.in_step:
            sequence.cancelled = True
        else:
            self.running.pop(key, None)
            self._free(sequence)
        return sequence

    def unpin(self, key: Key) -> None:
        """The handoff of a computed prompt is over."""
        if key in self.pinned:
            self._free(self.pinned.pop(key))

    def schedule(self, now: float, num_decode_rows: int = 0) -> PrefillStep | None:
        """The next step's chunks, or None where there is nothing to compute. New prompts are taken from
        ``waiting`` as they fit. Steps before it need not have been booked.

        ``num_decode_rows``: sequences that generate in the same step, each a token of its budget. At least a
        block is left to prompts, so that they are never starved."""
        if not self.waiting and not self.running:
            return None
        most = max(self._max_batch_tokens - num_decode_rows, min(self.block_size, self._max_batch_tokens))
        budget = min(self._budget, most)
        chunks: list[Chunk] = []
        computing: set[bytes] = set()
        crowding: set[PeerId] = set()
        if self.waiting:
            computing = {
                h
                for s in self.running.values()
                if (h := self._next_hash(s, s.num_computed // self.block_size))
            }
            crowding = self._crowding_peers()
        starved = False
        candidates = [*self.running.values(), *self.waiting.values()]
        if len(candidates) > 1:
            candidates.sort(key=lambda s: self._rank(s, now))
        for sequence in candidates:
            if budget == 0 or len(chunks) == self._max_num_seqs:
                break
            if sequence.key in self.waiting:
                if starved or sequence.peer_id in crowding or self._being_computed(sequence, computing):
                    continue
                if not self._start(sequence, now):
                    starved = now - sequence.arrival > self._starving_s
                    continue
                self._started.append(sequence)
                if block_hash := self._next_hash(sequence, sequence.num_computed // self.block_size):
                    computing.add(block_hash)
            count = min(budget, sequence.unscheduled)
            if count == 0 or sequence.cancelled or (sequence.alone and (chunks or num_decode_rows)):
                continue
            if sequence.state.lacks_matcher and count == sequence.unscheduled and not sequence.scores_only:
                continue  # nothing could be sampled yet
            chunks.append(Chunk(sequence, sequence.num_scheduled, count))
            sequence.num_scheduled += count
            sequence.num_steps += 1
            budget = 0 if sequence.alone else budget - count
        if not chunks:
            return None
        self._raise_budget()
        batch = self._batch(chunks)
        return PrefillStep(chunks, batch, batch.num_tokens >= most or len(chunks) == self._max_num_seqs)

    @property
    def tries_apart(self) -> bool:
        """Whether a prompt waits for a step of its own, because one with others raised."""
        return any(s.alone and s.unscheduled and not s.cancelled for s in self.running.values())

    def take_started(self) -> list[PrefillSequence]:
        """Those that have their blocks since the last call: in a step, or before one while their grammar is
        compiled."""
        started, self._started = self._started, []
        return started

    def _rank(self, sequence: PrefillSequence, now: float) -> tuple[bool, float]:
        return prompt_rank(sequence.returns, sequence.unscheduled, now - sequence.arrival, self._aging)

    def shrink(self, step: PrefillStep) -> bool:
        """The step ran out of memory: half as many tokens a step for a while. False: it is down to a block,
        and nothing was done."""
        if step.batch.num_tokens <= self.block_size:
            return False
        self._budget, self._steps_at_budget = step.batch.num_tokens // 2, 0
        self.skip(step)
        return True

    def separate(self, step: PrefillStep, shared: bool = False) -> bool:
        """The step raised: each of its prompts is computed alone from now on. False: one was alone in it, and
        nothing was done. ``shared``: sequences that generate were in it, too."""
        if len(step.chunks) == 1 and not shared:
            return False
        for chunk in step.chunks:
            chunk.sequence.alone = True
        self.skip(step)
        return True

    def skip(self, step: PrefillStep) -> None:
        """The step has not been run, or counts for nothing: its chunks are to be computed yet. What was
        dropped meanwhile is gone."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.num_steps -= 1
            sequence.num_scheduled = sequence.num_computed
            if sequence.cancelled:
                self.drop(sequence.key)

    def _raise_budget(self) -> None:
        """Double the limit after a number of steps that did not run out of memory."""
        if self._budget < self._max_batch_tokens:
            self._steps_at_budget += 1
            if self._steps_at_budget > STEPS_AT_BUDGET:
                self._budget, self._steps_at_budget = min(2 * self._budget, self._max_batch_tokens), 0

    def complete(self, chunk: Chunk) -> bool:
        """Books one chunk of a finished step. False: the sequence had been dropped, and is gone with its last
        step."""
        sequence = chunk.sequence
        sequence.num_steps -= 1
        if sequence.cancelled:
            self.drop(sequence.key)
            return False
        first, last = sequence.num_computed // self.block_size, (chunk.start + chunk.count) // self.block_size
        sequence.num_computed += chunk.count
        before = sequence.hashes[first - 1] if first else None
        self.blocks.commit_all(sequence.blocks[first:last], sequence.hashes[first:last], before)
        self._release_behind_window(sequence)
        if chunk.is_last:
            del self.running[sequence.key]
            self.pinned[sequence.key] = sequence
        return True

    def _crowding_peers(self) -> set[PeerId]:
        """Decode workers whose blocks, computed and not taken in, fill half of the pool while prompts for
        others wait."""
        if len(self.waiting) < 2 or len({s.peer_id for s in self.waiting.values()}) < 2:
            return set()
        kept: Counter[PeerId] = Counter()
        for sequence in self.pinned.values():
            kept[sequence.peer_id] += len(held(sequence.blocks))
        return {peer for peer, count in kept.items() if count >= self.blocks.num_blocks // 2}

    def _start(self, sequence: PrefillSequence, now: float) -> bool:
        usable = self._usable(sequence)
        hits = self.blocks.match_prefix(usable)
        behind = num_behind(hits * self.block_size, self._window, self.block_size)
        total = -(-sequence.num_tokens // self.block_size)
        if total - hits + self._left_to_decode() > self.blocks.num_available - self.blocks.num_idle_among(
            usable[behind:hits]
        ):
            return False
        cached = self.blocks.acquire_prefix(usable[behind:hits])
        fresh = self.blocks.allocate(total - hits)
        assert fresh is not None, "room was checked"
        sequence.blocks = [NO_BLOCK] * behind + cached + fresh
        sequence.num_computed = sequence.num_scheduled = sequence.num_cached_tokens = hits * self.block_size
        sequence.started = now
        self.num_prompt_tokens += sequence.num_tokens
        self.num_cached_tokens += sequence.num_cached_tokens
        self.running[sequence.key] = self.waiting.pop(sequence.key)
        return True

    def _left_to_decode(self) -> int:
        """What the sequences that run there may grow into, and a last, partial block for each prompt from
        here, which moves."""
        return (
            0 if self._for_decode is None else self._for_decode() + len(self.running) + len(self.pinned) + 1
        )

    def _usable(self, sequence: PrefillSequence) -> list[bytes]:
        """The blocks that may come from the cache: never the one of the last token, whose logits are needed;
        none where the prompt's own logprobs are asked for."""
        if sequence.spec.prompt_logprobs is not None:
            return []
        return sequence.hashes[: (sequence.num_tokens - 1) // self.block_size]

    def _being_computed(self, sequence: PrefillSequence, computing: set[bytes]) -> bool:
        usable = self._usable(sequence)
        hits = self.blocks.match_prefix(usable)
        return hits < len(usable) and usable[hits] in computing

    def _next_hash(self, sequence: PrefillSequence, index: int) -> bytes | None:
        return sequence.hashes[index] if index < len(sequence.hashes) else None

    def _release_behind_window(self, sequence: PrefillSequence) -> None:
        """No later chunk reads these blocks, and the decode worker wants none of them."""
        behind = num_behind(sequence.num_computed, self._window, self.block_size)
        if behind and (left := held(sequence.blocks[:behind])):
            self.blocks.release(left)
            sequence.blocks[:behind] = [NO_BLOCK] * behind

    def _free(self, sequence: PrefillSequence) -> None:
        self.blocks.release(sequence.blocks)
        sequence.blocks = []

    def _batch(self, chunks: Sequence[Chunk]) -> Batch:
        if len(chunks) == 1:
            return self._batch_of_one(chunks[0])
        tables = np.zeros((len(chunks), max(len(c.sequence.blocks) for c in chunks)), np.int32)
        for row, chunk in enumerate(chunks):
            tables[row, : len(chunk.sequence.blocks)] = chunk.sequence.blocks
        np.maximum(tables, 0, out=tables)  # what stands for NO_BLOCK is never attended to
        counts = [c.count for c in chunks]
        positions = np.concatenate([np.arange(c.start, c.start + c.count, dtype=np.int32) for c in chunks])
        at_block = positions // self.block_size
        slots = tables[np.arange(len(chunks)).repeat(counts), at_block].astype(np.int64)
        slots *= self.block_size
        slots += positions - at_block * self.block_size
        return Batch(
            token_ids=np.concatenate([c.sequence.token_ids[c.start : c.start + c.count] for c in chunks]),
            positions=positions,
            query_start_loc=np.array([0, *accumulate(counts)], np.int32),
            seq_lens=np.array([c.start + c.count for c in chunks], np.int32),
            block_tables=tables,
            slot_mapping=slots,
            sampling=[c.sequence.state if c.is_last and not c.sequence.scores_only else None for c in chunks],
            prompt_logprobs=[c.sequence.spec.prompt_logprobs for c in chunks],
            next_prompt_ids=[_next_prompt_ids(c) for c in chunks],
        )

    def _batch_of_one(self, chunk: Chunk) -> Batch:
        """The same, of fewer operations: most steps have one chunk."""
        sequence, end = chunk.sequence, chunk.start + chunk.count
        positions = np.arange(chunk.start, end, dtype=np.int32)
        tables = np.maximum(np.array([sequence.blocks], np.int32), 0)
        first = chunk.start // self.block_size
        starts = tables[0, first : -(-end // self.block_size)].astype(np.int64)
        starts *= self.block_size
        slots = np.add.outer(starts, self._offsets).ravel()[
            chunk.start - first * self.block_size : end - first * self.block_size
        ]
        return Batch(
            token_ids=sequence.token_ids[chunk.start : end].copy(),
            positions=positions,
            query_start_loc=np.array([0, chunk.count], np.int32),
            seq_lens=np.array([end], np.int32),
            block_tables=tables,
            slot_mapping=slots,
            sampling=[sequence.state if chunk.is_last and not sequence.scores_only else None],
            prompt_logprobs=[sequence.spec.prompt_logprobs],
            next_prompt_ids=[_next_prompt_ids(chunk)],
        )


def _next_prompt_ids(chunk: Chunk) -> list[int]:
    sequence = chunk.sequence
    if sequence.spec.prompt_logprobs is None:
        return []
    end = min(chunk.start + chunk.count + 1, sequence.spec.num_prompt_tokens)
    following: list[int] = sequence.token_ids[chunk.start + 1 : end].tolist()
    return following
