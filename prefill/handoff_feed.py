"""Which of a prompt's blocks, or of their layers, are final while it is being computed, and may leave for its
decode worker. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..transport.handoff.outgoing import Outgoing
from ..transport.handoff.sender import HandoffSender
from ..transport.messages.messages import TokenLogprobs
from .chunks import Chunk, PrefillSequence, PrefillStep


class HandoffFeed:
    """Feeds the sender of the handoff, from the prompt's first chunk to its last."""

    def __init__(self, sender: HandoffSender, block_size: int, is_local: Callable[[str], bool]) -> None:
        """``is_local``: whether the decode worker of this name is of the same process, over the same
        blocks."""
        self._sender, self._block_size, self._is_local = sender, block_size, is_local

    def stays_here(self, sequence: PrefillSequence) -> bool:
        """Whether its decode worker is of the same process."""
        return self._is_local(sequence.peer_id[0])

    def begin(self, sequence: PrefillSequence, now: float) -> None:
        """It has its blocks. To a decode worker of its own process it is offered only once it is computed:
        then its full blocks are cached there, that is, here, and none of them moves."""
        if not self.stays_here(sequence):
            self._offer(sequence, now)
            self.blocks_ready(sequence)

    def blocks_ready(self, sequence: PrefillSequence) -> None:
        """A chunk of it has been computed."""
        self._sender.blocks_ready(
            sequence.key, sequence.handed_over, self._num_final(sequence, sequence.num_computed)
        )

    def layer_stride(self, step: PrefillStep) -> int:
        """Every how many layers ``layers_done`` is wanted while this step runs; 0: not at all."""
        strides = (out.layer_stride(stop) for out, stop in self._outgoing(step))
        return min(filter(None, strides), default=0)

    def next_slice(self, step: PrefillStep) -> int | None:
        """How many layers of the running step must be done before ``layers_done`` has anything leave, as
        things are now; None: nothing leaves before the step's end."""
        nexts = (out.next_slice(stop) for out, stop in self._outgoing(step))
        return min((layers for layers in nexts if layers is not None), default=None)

    def layers_done(self, step: PrefillStep, num_layers: int) -> None:
        """The running step, the oldest that is not booked, has computed the keys and values of its first
        ``num_layers`` layers."""
        for chunk in step.chunks:
            sequence = chunk.sequence
            stop = self._num_in_layers(chunk)
            self._sender.layers_ready(sequence.key, sequence.handed_over, stop, num_layers)

    def finish(
        self, sequence: PrefillSequence, token: int, logprobs: TokenLogprobs | None, now: float
    ) -> None:
        """It is computed, and goes on there after this first token."""
        if self.stays_here(sequence):
            self._offer(sequence, now)
        blocks, num_cached_tokens = sequence.handed_over, sequence.num_cached_tokens
        self._sender.finish(sequence.key, blocks, token, logprobs, now, num_cached_tokens)

    def _offer(self, sequence: PrefillSequence, now: float) -> None:
        self._sender.offer(sequence.decode, sequence.spec, len(sequence.handed_over), sequence.hashes, now)

    def _outgoing(self, step: PrefillStep) -> Iterator[tuple[Outgoing, int]]:
        """Yield the handoff of each chunk that has one, and how many blocks are final with the chunk."""
        for chunk in step.chunks:
            if (out := self._sender.outgoing.get(chunk.sequence.key)) is not None:
                yield out, self._num_in_layers(chunk)

    def _num_in_layers(self, chunk: Chunk) -> int:
        """Return how many blocks may leave layer by layer while this chunk runs. The state may not: if the
        step fails and shorter ones take its place, the state may end in the other copy."""
        return min(self._num_final(chunk.sequence, chunk.end), len(chunk.sequence.blocks))

    def _num_final(self, sequence: PrefillSequence, num_computed: int) -> int:
        """The last block, which may be partial, and its state only with the last token."""
        if num_computed == sequence.num_tokens:
            return len(sequence.handed_over)
        return num_computed // self._block_size
