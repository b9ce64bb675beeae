"""Sequences that generate, and their KV blocks. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..engine.cache.block_manager import BlockManager
from ..engine.step.batch import SamplingState
from ..transport.handoff.protocol import Key
from ..transport.messages.blocks import NO_BLOCK, chain, held, num_behind
from ..transport.messages.messages import TokenLogprobs, u32
from .model_drafts import ModelDrafts
from .text_match import TextMatch


@dataclass(slots=True, eq=False)
class DecodeSequence:
    """A sequence that generates. ``blocks`` hold the KV of all its tokens but the newest."""

    key: Key
    request_id: str
    state: SamplingState
    blocks: list[int]  # NO_BLOCK behind a sliding window
    states: tuple[list[int], list[int]]  # two copies of its state: that of p tokens is copy p % 2
    last_hash: bytes  # of its newest full block, or the root
    stops: frozenset[int]
    last_index: int
    deadline: float
    joined_at: float = 0.0
    row: int = -1  # in the next step
    in_flight: int = 0  # rows of steps under way that are its: they read and write its blocks
    ended: bool = False  # it is over here
    paused: bool = False  # it keeps its blocks and is in no further step
    last_logprobs: TokenLogprobs | None = None  # of its newest token, where they are asked for
    answer_id: bytes = b""  # empty: it cannot be resumed
    match: TextMatch | None = None  # once its tokens may be drafted
    model_drafts: ModelDrafts | None = None  # once the model may draft its tokens

    @property
    def held(self) -> list[list[int]]:
        """The blocks that are referenced for it."""
        return [held(self.blocks), *self.states]


def divided(
    blocks: list[int], spare: Sequence[int], num_tokens: int
) -> tuple[list[int], tuple[list[int], list[int]]]:
    """Return the blocks of a sequence's tokens, and both copies of its state. ``blocks``: of its
    ``num_tokens`` tokens and behind them of their state; ``spare``: as many, for the second copy."""
    if not spare:
        return blocks, ([], [])
    newest, other = blocks[-len(spare) :], list(spare)
    return blocks[: -len(spare)], (other, newest) if num_tokens % 2 else (newest, other)


class SequenceBlocks:
    """The blocks of a worker's sequences. Those of one that has ended are freed when no step in flight reads
    or writes them."""

    def __init__(self, blocks: BlockManager, block_size: int, window: int) -> None:
        """``window``: the model's widest, in tokens; 0: none."""
        self._blocks, self._block_size, self._window = blocks, block_size, window
        self.ended: dict[DecodeSequence, None] = {}

    def commit(self, sequence: DecodeSequence, block: int) -> None:
        """The sequence's ``block``-th block is full."""
        prompt, output = sequence.state.prompt_token_ids, sequence.state.output_token_ids
        start, end = block * self._block_size, (block + 1) * self._block_size
        tokens = [*prompt[start:end], *output[max(0, start - len(prompt)) : max(0, end - len(prompt))]]
        block_hash = chain(sequence.last_hash, u32(tokens), self._block_size)[0]
        self._blocks.commit(sequence.blocks[block], block_hash, sequence.last_hash)
        sequence.last_hash = block_hash

    def release_behind_window(self, sequence: DecodeSequence, num_tokens: int) -> None:
        """Release a block that has left the window, after a step of this length. The one after it may be in
        flight. No later step reads the block."""
        last = num_behind(num_tokens, self._window, self._block_size) - 1
        if last >= 0 and not sequence.ended and sequence.blocks[last] != NO_BLOCK:
            self._blocks.release(sequence.blocks[last : last + 1])
            sequence.blocks[last] = NO_BLOCK

    def trim(self, sequence: DecodeSequence) -> None:
        """Release the blocks that only rejected drafts were written to."""
        num_blocks = -(-(sequence.state.position - 1) // self._block_size)
        self._blocks.release(sequence.blocks[num_blocks:])
        del sequence.blocks[num_blocks:]

    def end(self, sequence: DecodeSequence) -> None:
        """The sequence is over here."""
        sequence.ended = True
        if sequence.in_flight:
            self.ended[sequence] = None
        else:
            self._free(sequence)

    def free_ended(self, sequences: list[DecodeSequence]) -> None:
        """A step with these sequences is no longer in flight."""
        for sequence in sequences:
            if sequence in self.ended and not sequence.in_flight:
                del self.ended[sequence]
                self._free(sequence)

    def tables_of_ended(self) -> Iterator[list[int]]:
        """The blocks that are not free yet, sequence by sequence."""
        for sequence in self.ended:
            yield from sequence.held

    def _free(self, sequence: DecodeSequence) -> None:
        for blocks in (sequence.blocks, *sequence.states):
            self._blocks.release(blocks)
        sequence.blocks, sequence.states = [], ([], [])
