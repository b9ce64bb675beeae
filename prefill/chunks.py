"""Prompts, and the chunks of them that one step computes, as the batch that the model runs. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from ..engine.step.batch import Batch, ImagePart, SamplingState, adapters_of
from ..transport.handoff.protocol import Key
from ..transport.messages.images import FIRST_IMAGE_ID, Image, rope_positions
from ..transport.messages.messages import Peer, PeerId, RequestSpec
from .states import ChunkStates, PromptStates, batch_states


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
    states: PromptStates = field(default_factory=PromptStates)
    num_computed: int = 0
    num_scheduled: int = 0  # computed, or in a step that has not been booked
    num_steps: int = 0  # those steps
    num_cached_tokens: int = 0
    started: float = 0.0
    cancelled: bool = False  # cancelled while a step that writes its blocks is running
    alone: bool = False  # its step raised: its next ones have no other prompt
    prefix_by: float = 0.0  # it waits until then for cached blocks from elsewhere; 0: for none
    prefix_of: Key | None = None  # another dispatch, under which these blocks come; None: its own
    from_store: bool = False  # it is the KV store from which they come
    images: Sequence[Image] = ()
    rope: NDArray[np.int32] | None = field(init=False)  # see ``rope_positions``

    def __post_init__(self) -> None:
        self.rope = rope_positions(self.images, self.num_tokens)

    @property
    def request_id(self) -> str:
        return self.spec.request_id

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
    def until_branch(self) -> int:
        """The same, no further than to where a snapshot of its state is wanted."""
        ahead = self.states.branch - self.num_scheduled
        return min(ahead, self.unscheduled) if ahead > 0 else self.unscheduled

    @property
    def handed_over(self) -> list[int]:
        """The blocks of its tokens and of its state. (Of that only once its last chunk is in a step.)"""
        return self.blocks + self.states.newest(self.num_steps)

    def left(self, block_size: int, num_cached: Callable[[list[bytes]], int]) -> int:
        """Unscheduled tokens; before it has started, without those that are cached now."""
        hits = 0 if self.blocks else num_cached(self.usable_hashes(block_size))
        return self.unscheduled - hits * block_size

    @property
    def peer_id(self) -> PeerId:
        return (self.decode.worker_id, self.decode.incarnation)

    @property
    def returns(self) -> bool:
        """It was dispatched before, and its attempt was lost."""
        return self.spec.epoch > 0

    def usable_hashes(self, block_size: int) -> list[bytes]:
        """Hashes of the blocks that may come from the cache: never the one of the last token, whose logits
        are needed; none where the prompt's own logprobs are asked for."""
        if self.spec.prompt_logprobs is not None:
            return []
        return self.hashes[: (self.num_tokens - 1) // block_size]

    def next_hash(self, block_size: int) -> bytes | None:
        """The hash of the block that is computed next; None: that block will not be full."""
        index = self.num_computed // block_size
        return self.hashes[index] if index < len(self.hashes) else None

    def branch_hash(self, block_size: int) -> bytes | None:
        """The hash of the block behind which a snapshot is to come; None: there is none, or it has come."""
        is_ahead = self.states.branch > self.num_computed
        return self.hashes[self.states.branch // block_size - 1] if is_ahead else None

    @property
    def scores_only(self) -> bool:
        """``max_tokens`` 0: the prompt's logprobs or its embedding are wanted, and no token."""
        return self.spec.sampling.max_tokens == 0


@dataclass(frozen=True, slots=True)
class Chunk:
    sequence: PrefillSequence
    start: int
    count: int
    states: ChunkStates | None = None

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_last(self) -> bool:
        return self.end == self.sequence.num_tokens

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return self.sequence.token_ids[self.start : self.end]

    def images(self, row: int) -> Iterator[ImagePart]:
        """The images that it has tokens of; ``row``: where it begins in the batch."""
        for image in self.sequence.images:
            first, end = max(self.start, image.first), min(self.end, image.end)
            if first < end:
                before = self.sequence.token_ids[image.first : first]
                skipped = int((before >= FIRST_IMAGE_ID).sum())
                yield ImagePart(image, row + first - self.start, first - image.first, end - first, skipped)

    @property
    def sampling(self) -> SamplingState | None:
        """None: no token is sampled behind this chunk."""
        return self.sequence.state if self.is_last and not self.sequence.scores_only else None

    @property
    def embeds(self) -> Sequence[int] | None:
        """See ``Batch.embeds``."""
        return self.sequence.spec.logits_of if self.sequence.spec.embeds and self.is_last else None

    @property
    def next_id(self) -> int:
        """The token behind the chunk; -1: the one that is sampled; 0, any, where none follows or an image."""
        if not self.is_last:
            behind = int(self.sequence.token_ids[self.end])
            return behind if behind < FIRST_IMAGE_ID else 0
        return 0 if self.sequence.scores_only else -1

    @property
    def next_prompt_ids(self) -> list[int]:
        """The tokens behind those of the chunk, where the prompt's own logprobs are asked for."""
        spec = self.sequence.spec
        if spec.prompt_logprobs is None:
            return []
        following: list[int] = self.sequence.token_ids[
            self.start + 1 : min(self.end + 1, spec.num_prompt_tokens)
        ].tolist()
        return following


@dataclass(frozen=True, slots=True)
class PrefillStep:
    chunks: list[Chunk]
    batch: Batch
    is_full: bool  # no more prompt tokens would have gone into it: its rate is the worker's best
    made_at: float


def batch_of(chunks: Sequence[Chunk], block_size: int, model_drafts: bool = False) -> Batch:
    """Return the batch of these chunks, in this order. ``model_drafts``: it needs the tokens behind them."""
    next_ids = np.array([c.next_id for c in chunks], np.int32) if model_drafts else None
    if len(chunks) == 1:
        return _batch_of_one(chunks[0], block_size, next_ids)
    tables = np.zeros((len(chunks), max(len(c.sequence.blocks) for c in chunks)), np.int32)
    for row, chunk in enumerate(chunks):
        tables[row, : len(chunk.sequence.blocks)] = chunk.sequence.blocks
    np.maximum(tables, 0, out=tables)  # what stands for NO_BLOCK is never attended to
    counts = [c.count for c in chunks]
    positions = np.concatenate([np.arange(c.start, c.end, dtype=np.int32) for c in chunks])
    at_block = positions // block_size
    slots = tables[np.arange(len(chunks)).repeat(counts), at_block].astype(np.int64)
    slots *= block_size
    slots += positions - at_block * block_size
    starts = accumulate(counts, initial=0)
    images = [part for c, row in zip(chunks, starts, strict=False) for part in c.images(row)]
    return Batch(
        token_ids=np.concatenate([c.token_ids for c in chunks]),
        positions=positions,
        query_start_loc=np.array([0, *accumulate(counts)], np.int32),
        seq_lens=np.array([c.end for c in chunks], np.int32),
        block_tables=tables,
        slot_mapping=slots,
        sampling=[c.sampling for c in chunks],
        prompt_logprobs=[c.sequence.spec.prompt_logprobs for c in chunks],
        next_prompt_ids=[c.next_prompt_ids for c in chunks],
        adapters=adapters_of([c.sequence.state.adapter for c in chunks]),
        embeds=[c.embeds for c in chunks],
        states=batch_states(states) if (states := [c.states for c in chunks if c.states]) else None,
        next_ids=next_ids,
        rope=_rope_of(chunks, positions, images),
        images=images,
    )


def _batch_of_one(chunk: Chunk, block_size: int, next_ids: NDArray[np.int32] | None) -> Batch:
    """The same in 5 to 25 us less: most steps have one chunk, also in the simulator."""
    positions = np.arange(chunk.start, chunk.end, dtype=np.int32)
    tables = np.maximum(np.array([chunk.sequence.blocks], np.int32), 0)
    first = chunk.start // block_size
    starts = tables[0, first : -(-chunk.end // block_size)].astype(np.int64)
    starts *= block_size
    slots = np.add.outer(starts, np.arange(block_size)).ravel()[
        chunk.start - first * block_size : chunk.end - first * block_size
    ]
    images = list(chunk.images(0))
    return Batch(
        token_ids=chunk.token_ids.copy(),
        positions=positions,
        query_start_loc=np.array([0, chunk.count], np.int32),
        seq_lens=np.array([chunk.end], np.int32),
        block_tables=tables,
        slot_mapping=slots,
        sampling=[chunk.sampling],
        prompt_logprobs=[chunk.sequence.spec.prompt_logprobs],
        next_prompt_ids=[chunk.next_prompt_ids],
        adapters=adapters_of([chunk.sequence.state.adapter]),
        embeds=[chunk.embeds],
        states=batch_states([chunk.states]) if chunk.states else None,
        next_ids=next_ids,
        rope=_rope_of([chunk], positions, images),
        images=images,
    )


def _rope_of(
    chunks: Sequence[Chunk], positions: NDArray[np.int32], images: Sequence[ImagePart]
) -> NDArray[np.int32] | None:
    """``Batch.rope``: by axes only where there are images."""
    if all(chunk.sequence.rope is None for chunk in chunks):
        return None
    rope, row = positions[None].repeat(3, 0), 0
    for chunk in chunks:
        if chunk.sequence.rope is not None:
            rope[:, row : row + chunk.count] = chunk.sequence.rope[:, chunk.start : chunk.end]
        row += chunk.count
    return rope if images else rope[0]
