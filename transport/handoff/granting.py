"""Which offered prompts get blocks, and when: in order of arrival, once there is room. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from ..messages.blocks import NO_BLOCK, num_behind
from ..messages.incarnation import COUNT_BITS
from ..messages.messages import Grant, ModelIdentity, Offer, PeerId, from_hashes, u32
from .incoming import Incoming
from .protocol import Key, remember


class BlockPool(Protocol):
    """What the receiver needs of a block manager."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_available(self) -> int: ...
    def match_prefix(self, hashes: Sequence[bytes]) -> int: ...
    def num_idle_among(self, hashes: Sequence[bytes]) -> int: ...
    def acquire_prefix(self, hashes: Sequence[bytes]) -> list[int]: ...
    def allocate(self, count: int) -> list[int] | None: ...
    def commit_all(self, blocks: Sequence[int], hashes: Sequence[bytes], parent: bytes | None) -> None: ...
    def release(self, blocks: Sequence[int]) -> None: ...


class Granting:
    """The offers that wait, and what a grant is made of.

    ``room`` answers (sequence slots free, blocks to leave for running sequences); ``secret`` draws a grant's
    secret.
    """

    def __init__(
        self,
        pool: BlockPool,
        model: ModelIdentity,
        room: Callable[[], tuple[int, int]],
        secret: Callable[[], bytes],
        lease_s: float,
    ) -> None:
        self._pool, self._room, self._secret, self._lease_s = pool, room, secret, lease_s
        self._block_size, self._window = model.block_size, model.window
        self.waiting: OrderedDict[Key, Incoming] = OrderedDict()
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._next_lease = 1

    def is_newest(self, offer: Offer) -> bool:
        """Whether no newer attempt at its request has been offered."""
        return offer.epoch >= self._epochs.get(offer.request_id, -1)

    def obstacle(self, offer: Offer, worker_id: str) -> tuple[str, bool] | None:
        """Why this offer gets no grant, and whether it never will."""
        needed = self._num_blocks(offer.num_tokens) - self._num_behind(offer.num_tokens)
        if needed >= self._pool.num_blocks:
            reason = (
                f"the prompt needs {needed} KV blocks and room to grow; {worker_id} has "
                f"{self._pool.num_blocks} in all"
            )
            return reason, True
        if len(from_hashes(offer.block_hashes)) != offer.num_tokens // self._block_size:
            return "hashes do not match the token count", False
        return None

    def join(self, peer: PeerId, offer: Offer, now: float) -> None:
        """One more waits for room."""
        remember(self._epochs, offer.request_id, offer.epoch)
        key = (offer.coordinator, offer.dispatch)
        hashes = from_hashes(offer.block_hashes)
        behind = self._num_behind(offer.num_tokens)
        self.waiting[key] = Incoming(
            key, peer, offer.request_id, offer.epoch, offer.num_tokens, hashes, now, behind
        )

    def forget_silent(self, silent_s: float, now: float) -> None:
        """Whoever has not repeated an offer for so long does not want it any more."""
        for incoming in [i for i in self.waiting.values() if now - i.heard > silent_s]:
            del self.waiting[incoming.key]

    def grant_next(self, incarnation: int, now: float) -> Incoming | None:
        """The first in the line gets its blocks under a new lease, which names this worker's incarnation.
        None: no room for it."""
        incoming = next(iter(self.waiting.values()), None)
        if incoming is None or not self._has_room_for(incoming):
            return None
        del self.waiting[incoming.key]
        behind = incoming.num_behind
        cached = self._pool.acquire_prefix(incoming.hashes[behind:])
        fresh = self._pool.allocate(self._num_blocks(incoming.num_tokens) - behind - len(cached))
        assert fresh is not None, "room was checked"
        incoming.blocks, incoming.num_cached = [NO_BLOCK] * behind + cached + fresh, behind + len(cached)
        incoming.lease, self._next_lease = (
            _lease_bits(incarnation) << 32 | self._next_lease,
            self._next_lease + 1,
        )
        incoming.expires = now + self._lease_s
        incoming.grant = self._grant(incoming)
        return incoming

    def _grant(self, incoming: Incoming) -> Grant:
        coordinator, dispatch = incoming.key
        return Grant(
            coordinator=coordinator,
            dispatch=dispatch,
            lease=incoming.lease,
            secret=self._secret(),
            blocks=u32([0] * incoming.num_behind + incoming.blocks[incoming.num_behind :]),
            num_cached_blocks=incoming.num_cached,
            lease_s=self._lease_s,
        )

    def _has_room_for(self, incoming: Incoming) -> bool:
        slots, headroom = self._room()
        if slots < 1:
            return False
        hashes = incoming.hashes[incoming.num_behind :]
        hits = self._pool.match_prefix(hashes)
        idle = self._pool.num_idle_among(hashes[:hits])
        needed = self._num_blocks(incoming.num_tokens) - incoming.num_behind - hits + headroom
        return needed <= self._pool.num_available - idle

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _num_behind(self, num_tokens: int) -> int:
        return num_behind(num_tokens, self._window, self._block_size)


def _lease_bits(incarnation: int) -> int:
    """30 bits that differ between the incarnations of a process, and as good as always between processes."""
    return (incarnation >> COUNT_BITS ^ incarnation) & 0x3FFFFFFF
