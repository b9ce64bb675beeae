"""What the pure cores ask their shells to do. Each is carried out in the order given."""

from __future__ import annotations

from typing import NamedTuple

from ..messages.messages import FailureKind, Handoff, Joined, Message, Met, Peer, RequestSpec, TokenLogprobs
from .handoff import Key, PeerId


class ToCoordinator(NamedTuple):
    message: Message


class Connect(NamedTuple):
    """Open a channel to this decode worker."""

    peer: Peer


class OpenMover(NamedTuple):
    peer: PeerId
    met: Met


class ToPeer(NamedTuple):
    peer: PeerId
    message: Message


class Put(NamedTuple):
    """Move blocks, or the same layers of several: items are (position in the lease, own block, the peer's
    block).

    ``layers``: [first, end) of those that move; None: whole blocks. The slices of a block leave in the order
    of their layers.
    """

    peer: PeerId
    lease: int
    secret: bytes
    items: list[tuple[int, int, int]]
    layers: tuple[int, int] | None = None


class CancelPuts(NamedTuple):
    """Whatever puts of this lease have not left need not leave; said before Release."""

    peer: PeerId
    lease: int


class SendPlaced(NamedTuple):
    """Say Placed with the checksums of these own blocks, whose positions in the lease begin at ``first``."""

    peer: PeerId
    lease: int
    first: int
    source_blocks: list[int]


class SendHandoff(NamedTuple):
    """Say Handoff with the checksums of these own blocks, in this order."""

    peer: PeerId
    spec: RequestSpec
    lease: int
    token: int
    logprobs: TokenLogprobs | None
    source_blocks: list[int]
    num_cached_tokens: int = 0  # of the prompt, found in the prefix cache
    first_at: float = 0.0  # when the first token was there
    again: bool = False  # after blocks that were wrong have been put again

    def message(self, checksums: bytes, now: float) -> Handoff:
        """As it is said ``now``. ``checksums``: of the source blocks, as a column of uint64."""
        return Handoff(
            spec=self.spec,
            lease=self.lease,
            token=self.token,
            logprobs=self.logprobs,
            checksums=checksums,
            num_cached_tokens=self.num_cached_tokens,
            since_s=max(0.0, now - self.first_at),
            again=self.again,
        )


class Delivered(NamedTuple):
    """The receiver has verified every block: the sender's own may be unpinned."""

    key: Key


class Undelivered(NamedTuple):
    """The handoff has failed; the sender's blocks may be unpinned."""

    key: Key
    kind: FailureKind
    message: str


SenderAction = (
    Connect | OpenMover | ToPeer | Put | CancelPuts | SendPlaced | SendHandoff | Delivered | Undelivered
)


class OpenLease(NamedTuple):
    """Accept puts: ``targets`` maps positions to own blocks."""

    lease: int
    secret: bytes
    targets: dict[int, int]


class ExpectAgain(NamedTuple):
    """Accept one more put for these positions: what came was corrupt."""

    lease: int
    positions: list[int]


class CloseLease(NamedTuple):
    lease: int


class Verify(NamedTuple):
    """Compare these blocks with these checksums and report to ``HandoffReceiver.verified``, in parts if that
    is better for those who wait. Those that are right are taken into the cache. Of no use any more once the
    lease is closed."""

    lease: int
    positions: list[int]
    blocks: list[int]
    checksums: list[int]

    def split(self, count: int) -> tuple[Verify, Verify]:
        """The first ``count`` positions, and the rest."""
        first, rest = slice(count), slice(count, None)
        return (
            Verify(self.lease, self.positions[first], self.blocks[first], self.checksums[first]),
            Verify(self.lease, self.positions[rest], self.blocks[rest], self.checksums[rest]),
        )


class Join(NamedTuple):
    """The handoff is complete: the blocks now belong to this sequence."""

    key: Key
    spec: RequestSpec
    blocks: list[int]
    token: int
    logprobs: TokenLogprobs | None
    num_cached_blocks: int
    num_cached_tokens: int  # of the prompt, found in the prefill worker's prefix cache
    transfer_s: float
    last_hash: bytes | None  # of the last full block; None: there is none

    def message(self, index: int) -> Joined:
        """``index``: of the token in the request's output."""
        return Joined(
            coordinator=self.spec.coordinator,
            dispatch=self.spec.dispatch,
            index=index,
            token=self.token,
            logprobs=self.logprobs,
            transfer_s=self.transfer_s,
            num_cached_blocks=self.num_cached_blocks,
            num_cached_tokens=self.num_cached_tokens,
        )


class Supersede(NamedTuple):
    """A newer epoch of the same request has arrived: drop this one."""

    key: Key


ReceiverAction = ToPeer | OpenLease | ExpectAgain | CloseLease | Verify | Join | Supersede
