"""A prompt on its way to a decode worker, as the sender of a handoff knows it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..messages.messages import Grant, PeerId, RequestSpec, TokenLogprobs
from .layer_slicing import UNSEEN_RATE, LayerSlicing
from .protocol import Key, Put


@dataclass(slots=True)
class Outgoing:
    """One prompt on its way out, and which of its blocks have left."""

    key: Key
    peer: PeerId
    spec: RequestSpec
    num_blocks: int
    hashes: list[bytes]
    deadline: float
    said: float = -1e9  # when Offer or Handoff was last said
    grant: Grant | None = None
    targets: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # own blocks, in order
    num_ready: int = 0  # leading own blocks that are final
    num_put: int = 0  # leading own blocks that have left whole
    num_placed: int = 0  # of which the receiver was told
    filling: int = 0  # blocks [num_ready, filling) are final down to layer ``layers_ready``
    layers_ready: int = 0
    layers_put: int = 0  # of blocks [num_put, filling), these layers have left
    first: tuple[int, TokenLogprobs | None] | None = None  # the first token: the prompt is complete
    first_at: float = 0.0
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    sent: bool = False
    sent_again: bool = False

    def layers_per_put(self, stop: int, slicing: LayerSlicing, rate: float | None) -> int:
        """Of the blocks that do not leave whole before ``stop`` are final; 0: there are none. ``rate``: of
        the mover."""
        num_blocks = stop - max(self.num_put, self.num_ready)
        return slicing.layers_per_put(num_blocks, rate or UNSEEN_RATE) if num_blocks > 0 else 0

    def next_slice(self, stop: int, slicing: LayerSlicing, rate: float | None) -> int | None:
        """How many layers of the chunk up to block ``stop`` must be final for its next slice to leave; None:
        none leaves."""
        if self.grant is None or stop <= self.num_put:
            return None
        return self.layers_put + slicing.layers_per_put(stop - self.num_put, rate or UNSEEN_RATE)

    def puts_due(self, slicing: LayerSlicing, rate: float | None) -> list[Put]:
        """The rest of blocks whose first layers have left, whole blocks, then layers of the running chunk.
        They leave now."""
        if self.grant is None:
            return []
        puts = []
        if self.layers_put and self.num_ready >= self.filling:
            puts.append(self._put_layers(slicing.num_layers, slicing))
        elif self.layers_put and self.num_ready > self.num_put:  # a smaller chunk has come to its end
            puts.append(self._put(self.num_ready, (self.layers_put, slicing.num_layers)))
            self.num_put = self.num_ready
        if self.num_ready > self.num_put:
            puts.append(self._put(self.num_ready))
            self.num_put = self.num_ready
        if self.filling > max(self.num_put, self.num_ready):
            whole = self.layers_ready >= slicing.num_layers
            wanted = slicing.layers_per_put(self.filling - self.num_put, rate or UNSEEN_RATE)
            if self.layers_ready - self.layers_put >= wanted or (whole and self.layers_put):
                puts.append(self._put_layers(self.layers_ready, slicing))
        return puts

    def _put_layers(self, end: int, slicing: LayerSlicing) -> Put:
        """The slice of the blocks being filled from the layer last put up to ``end``."""
        put = self._put(
            self.filling,
            None if (self.layers_put, end) == (0, slicing.num_layers) else (self.layers_put, end),
        )
        self.layers_put = end
        if end == slicing.num_layers:
            self.num_put, self.layers_put = self.filling, 0
        return put

    def _put(self, stop: int, layers: tuple[int, int] | None = None) -> Put:
        """Of blocks [num_put, stop)."""
        assert self.grant is not None
        items = [(i, self.blocks[i], self.targets[i]) for i in range(self.num_put, stop)]
        return Put(self.peer, self.grant.lease, self.grant.secret, items, layers)
