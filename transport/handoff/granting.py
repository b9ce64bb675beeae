"""The prompts that are offered to a decode worker: which get blocks and when (in order of arrival, once there
is room), and how their blocks arrive. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..messages.blocks import NO_BLOCK, num_behind
from ..messages.fields import COUNT_BITS
from ..messages.messages import Grant, Handoff, ModelIdentity, Offer, PeerId, Refuse, from_hashes, u32
from ..movers.interface import ONE_SIDED_MOVERS
from .protocol import Key, Verify, remember


@dataclass(slots=True)
class Incoming:
    """The handoff of one prompt, as its receiver knows it.

    WAITING    until there is room
    GRANTED    blocks arrive; one that has arrived and whose checksum is known is checked
    COMPLETE   Handoff has come: joined once every block is verified; corrupt ones are put again, once

    ``lease`` is 0 until granted. Positions count the prompt's blocks, and behind them those of its state.
    Those below ``num_cached`` do not travel: they are cached here, or lie below ``num_behind``, behind the
    sliding window, and have no block.
    """

    key: Key
    peer: PeerId
    request_id: str
    epoch: int
    num_tokens: int
    hashes: list[bytes]
    offered_at: float  # when Offer last came
    num_behind: int = 0
    is_test: bool = False  # of its writer's mover: it joins nothing
    is_prefix: bool = False  # it joins the cache, and no sequence
    adapter: str = ""
    lease: int = 0
    mover: str = ""  # by which its writer puts
    grant: Grant | None = None
    blocks: list[int] = field(default_factory=list)
    spare: list[int] = field(default_factory=list)  # for a second copy of its state
    num_cached: int = 0
    expires: float = 0.0
    handoff: Handoff | None = None
    handoff_at: float = 0.0
    retried: bool = False
    arrived: set[int] = field(default_factory=set)
    checksums: dict[int, int] = field(default_factory=dict)  # from the sender
    due: set[int] = field(default_factory=set)  # has arrived, has a checksum, and is not checked yet
    checking: set[int] = field(default_factory=set)
    right: set[int] = field(default_factory=set)
    wrong: set[int] = field(default_factory=set)

    @property
    def one_sided(self) -> bool:
        """Whether its writer writes this worker's memory by itself."""
        return self.mover in ONE_SIDED_MOVERS

    @property
    def held(self) -> list[int]:
        """The blocks that it holds here, in order."""
        return self.blocks[self.num_behind :] + self.spare

    @property
    def num_travelling(self) -> int:
        return len(self.blocks) - self.num_cached

    @property
    def verifying(self) -> bool:
        """Whether the writer has done its part, and the lease waits for this worker's own check."""
        unchecked = self.num_travelling - len(self.right) - len(self.wrong)
        return self.handoff is not None and 0 < unchecked == len(self.checking)

    @property
    def verified(self) -> bool:
        return self.handoff is not None and len(self.right) == self.num_travelling

    def add_checksums(self, first: int, checksums: list[int]) -> None:
        """Take the sender's checksums of the positions from ``first`` on; ignored unless all of them travel.
        A one-sided writer sends them after the blocks."""
        positions, known = range(first, first + len(checksums)), self.checksums
        if positions.start < self.num_cached or positions.stop > len(self.blocks):
            return
        if self.right:  # some may have been put again with other content since they were checked
            self.right.difference_update(
                p
                for p, checksum in zip(positions, checksums, strict=True)
                if known.get(p, checksum) != checksum
            )
        known.update(zip(positions, checksums, strict=True))
        if self.one_sided:
            self.arrived.update(positions)
        self._note_due(positions)

    def arrive(self, positions: Iterable[int]) -> None:
        """Note that these blocks have been written."""
        self.arrived.update(positions)
        self._note_due(positions)

    def checks(self) -> Verify | None:
        """Return a check of the due blocks, which is under way from now on."""
        if not self.due:
            return None
        due = sorted(self.due)
        self.due.clear()
        self.checking.update(due)
        return Verify(self.lease, due, [self.blocks[p] for p in due], [self.checksums[p] for p in due])

    def checked(self, positions: list[int], wrong: list[int]) -> None:
        """Take the result of (a part of) a check."""
        self.due.difference_update(positions)
        self.checking.difference_update(positions)
        self.right.update(positions)
        self.right.difference_update(wrong)
        self.wrong.update(wrong)

    def expect_again(self) -> list[int]:
        """Return the corrupt positions, which count as not arrived from now on."""
        wrong = sorted(self.wrong)
        self.arrived -= self.wrong
        self.wrong.clear()
        self.retried, self.handoff = True, None
        return wrong

    def _note_due(self, positions: Iterable[int]) -> None:
        due = self.arrived.intersection(positions).intersection(self.checksums)
        self.due |= due - self.right - self.checking - self.wrong


class BlockPool(Protocol):
    """A block manager, as both sides use it."""

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
    """The offers that wait for room, and how a grant is made.

    ``room`` returns (free sequence slots, blocks to leave for running sequences); ``secret`` draws a grant's
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
        self._block_size, self._window, self._state = model.block_size, model.window, model.state_blocks
        self.waiting: OrderedDict[Key, Incoming] = OrderedDict()
        self._epochs: OrderedDict[str, int] = OrderedDict()
        self._next_lease = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompts that wait."""
        return sum(incoming.num_tokens for incoming in self.waiting.values())

    def refusal(self, offer: Offer, worker_id: str) -> Refuse | None:
        """Return the answer to an offer that cannot wait for room. ``worker_id``: this worker's."""
        if offer.is_test:
            return None
        needed = self._num_blocks(offer.num_tokens) - self._num_behind(offer.num_tokens)
        needed += 0 if offer.is_prefix else 2 * self._state
        reason, final = "", needed > self._pool.num_blocks
        if offer.epoch < self._epochs.get(offer.request_id, -1):
            reason, final = "a newer epoch is known here", False
        elif final:
            reason = f"the prompt needs {needed} KV blocks; {worker_id} has {self._pool.num_blocks} in all"
        elif len(from_hashes(offer.block_hashes)) != offer.num_tokens // self._block_size:
            reason = "hashes do not match the token count"
        if not reason:
            return None
        return Refuse(coordinator=offer.coordinator, dispatch=offer.dispatch, reason=reason, final=final)

    def add(self, peer: PeerId, offer: Offer, now: float) -> None:
        """Let the offer wait for room. A test comes first: its writer's prompts wait for it."""
        key = (offer.coordinator, offer.dispatch)
        if not offer.is_test:
            remember(self._epochs, offer.request_id, offer.epoch)
        hashes, behind = from_hashes(offer.block_hashes), self._num_behind(offer.num_tokens)
        self.waiting[key] = Incoming(
            key, peer, offer.request_id, offer.epoch, offer.num_tokens, hashes, now, behind, offer.is_test
        )
        self.waiting[key].is_prefix, self.waiting[key].adapter = offer.is_prefix, offer.adapter
        if offer.is_test:
            self.waiting.move_to_end(key, last=False)

    def forget_silent(self, silent_s: float, now: float) -> None:
        """Drop offers that have not been repeated for ``silent_s``: their senders have given them up."""
        for incoming in [i for i in self.waiting.values() if now - i.offered_at > silent_s]:
            del self.waiting[incoming.key]

    def grant_next(self, incarnation: int, now: float) -> Incoming | None:
        """Give the first waiting offer its blocks under a new lease, which names this worker's incarnation.
        Return None where none waits or there is no room."""
        incoming = next(iter(self.waiting.values()), None)
        if incoming is None or not self._has_room_for(incoming):
            return None
        del self.waiting[incoming.key]
        behind = incoming.num_behind
        cached = self._pool.acquire_prefix(incoming.hashes[behind:])
        state = self._num_state_blocks(incoming)
        fresh = self._pool.allocate(self._num_blocks(incoming.num_tokens) - behind - len(cached) + 2 * state)
        assert fresh is not None, "room was checked"
        incoming.spare, fresh = fresh[len(fresh) - state :], fresh[: len(fresh) - state]
        incoming.blocks, incoming.num_cached = [NO_BLOCK] * behind + cached + fresh, behind + len(cached)
        incoming.lease = _lease_bits(incarnation) << 32 | self._next_lease
        self._next_lease += 1
        incoming.expires = now + self._lease_s
        coordinator, dispatch = incoming.key
        incoming.grant = Grant(
            coordinator=coordinator,
            dispatch=dispatch,
            lease=incoming.lease,
            secret=self._secret(),
            blocks=u32([0] * behind + incoming.blocks[behind:]),
            num_cached_blocks=incoming.num_cached,
            lease_s=self._lease_s,
        )
        return incoming

    def _has_room_for(self, incoming: Incoming) -> bool:
        if incoming.is_test:
            return self._pool.num_available > 0
        slots, headroom = self._room()
        if slots < 1:
            return False
        hashes = incoming.hashes[incoming.num_behind :]
        hits = self._pool.match_prefix(hashes)
        idle = self._pool.num_idle_among(hashes[:hits])
        needed = self._num_blocks(incoming.num_tokens) - incoming.num_behind - hits + headroom
        needed += 2 * self._num_state_blocks(incoming)
        return needed <= self._pool.num_available - idle

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _num_state_blocks(self, incoming: Incoming) -> int:
        """Blocks of one copy of its state; a sequence that runs has two."""
        return 0 if incoming.is_test or incoming.is_prefix else self._state

    def _num_behind(self, num_tokens: int) -> int:
        return num_behind(num_tokens, self._window, self._block_size)


def _lease_bits(incarnation: int) -> int:
    """30 bits that differ between the incarnations of a process, and as good as always between processes."""
    return (incarnation >> COUNT_BITS ^ incarnation) & 0x3FFFFFFF
