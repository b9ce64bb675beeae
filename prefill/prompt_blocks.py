"""The KV blocks of prompts, from the prefix cache and from the pool, and those of their states. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..engine.cache.block_manager import BlockManager
from ..transport.messages.blocks import NO_BLOCK, held, num_behind
from .chunks import Chunk, PrefillSequence
from .states import StateCache, held_states


class PromptBlocks:
    def __init__(
        self,
        blocks: BlockManager,
        block_size: int,
        window: int,
        states: StateCache,
        for_decode: Callable[[], int] | None,
    ) -> None:
        """See ``PrefillScheduler``."""
        self._blocks, self._block_size, self._window = blocks, block_size, window
        self.states, self._for_decode = states, for_decode

    @property
    def fixed_blocks(self) -> int:
        """Blocks that a prompt needs however long it is."""
        return 2 * self.states.num_blocks

    def take(self, sequence: PrefillSequence, num_beside: int) -> bool:
        """Give a prompt all its blocks. Return False if there is no room beside the decode worker and
        ``num_beside`` other prompts from here."""
        size, left = self._block_size, self._left_to_decode(num_beside + 1)
        usable = sequence.usable_hashes(size)
        cached_hashes = usable[: self._blocks.match_prefix(usable)]
        total = -(-sequence.num_tokens // size)
        for hits in (self.states.match(cached_hashes), 0):  # a snapshot needs room, too
            needed = total - hits + left + self.states.num_needed(usable[:hits])
            behind = num_behind(hits * size, self._window, size)
            if needed <= self._blocks.num_available - self._blocks.num_idle_among(usable[behind:hits]):
                break
        else:
            return False
        cached = self._blocks.acquire_prefix(usable[behind:hits])
        sequence.states = self.states.begin(cached_hashes, hits)
        fresh = self._blocks.allocate(total - hits)
        assert fresh is not None, "room was checked"
        sequence.blocks = [NO_BLOCK] * behind + cached + fresh
        sequence.num_computed = sequence.num_scheduled = sequence.num_cached_tokens = hits * size
        return True

    def chunk(self, sequence: PrefillSequence, count: int, num_beside: int) -> Chunk:
        """Its next chunk, of ``count`` tokens, which may leave a snapshot beside ``num_beside`` prompts."""
        start, left = sequence.num_scheduled, self._left_to_decode(num_beside)
        of_chunk = self.states.of_chunk(
            sequence.states, sequence.num_steps, start, start + count, sequence.hashes, left
        )
        return Chunk(sequence, start, count, of_chunk)

    def drop(self, chunk: Chunk) -> None:
        """The chunk has not been computed, or counts for nothing."""
        self.states.release(chunk.states)

    def book(self, chunk: Chunk) -> None:
        """The chunk has been computed: what is full is cached, what no later one reads is released."""
        sequence = chunk.sequence
        first, last = sequence.num_computed // self._block_size, chunk.end // self._block_size
        sequence.num_computed += chunk.count
        before = sequence.hashes[first - 1] if first else None
        self._blocks.commit_all(sequence.blocks[first:last], sequence.hashes[first:last], before)
        if chunk.states:
            self.states.book(sequence.states, chunk.states, sequence.hashes[:last])
        behind = num_behind(sequence.num_computed, self._window, self._block_size)
        if behind and (left := held(sequence.blocks[:behind])):  # the decode worker wants none of them
            self._blocks.release(left)
            sequence.blocks[:behind] = [NO_BLOCK] * behind

    def free(self, sequence: PrefillSequence) -> None:
        """The prompt is over here."""
        self._blocks.release(sequence.blocks)
        self.states.free(sequence.states)

    def _left_to_decode(self, num_prompts: int) -> int:
        """Blocks to leave to the decode worker over the same ones, with this number of prompts from here: for
        each a last, partial block, which moves, and its states."""
        return self._for_decode() + num_prompts * (1 + self.fixed_blocks) if self._for_decode else 0


def tables(sequence: PrefillSequence) -> Iterator[list[int]]:
    """The blocks that are referenced for a prompt, without the snapshots of its chunks."""
    yield held(sequence.blocks)
    yield from held_states(sequence.states)
