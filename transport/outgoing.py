"""A prompt on its way to a decode worker, and that worker, as the sender of a handoff knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from .handoff import Key, PeerId
from .messages import Grant, Met, Peer, RequestSpec, TokenLogprobs


@dataclass(slots=True)
class Contact:
    """A decode worker that is being met, or has been."""

    peer: Peer
    met: Met | None = None
    said: float = -1e9  # when Meet was last said
    born: float = 0.0  # when it was first said
    renewed: float = -1e9
    rate: float | None = None  # of its mover, bytes a second


@dataclass(slots=True)
class Outgoing:
    """One prompt on its way out."""

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
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    sent: bool = False
    sent_again: bool = False
