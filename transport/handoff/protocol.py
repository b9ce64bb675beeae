"""The KV handoff as two pure state machines, and the actions that they ask their shells for: no sockets, no
clock, no access to the blocks' bytes.

    sender (prefill worker)                         receiver (decode worker)

    MEETING   -- Meet ------------------------->    compares identities, chooses a mover
              <------------------------- Met --
    TESTING   == a handoff of one block =======>    verifies it; the mover is used from then on,
              <------------------------- Ack --     or left out, and they meet again for the next one
    OFFERED   -- Offer (again every second) --->    WAITING until there is room
              <----------------------- Grant --     GRANTED: blocks reserved under a lease
    GRANTED   == puts of finished layers ======>    lease renewed by Renew
              -- Placed (checksums) ---------->     blocks are verified while others are computed
    SENT      -- Handoff (checksums) ---------->    VERIFYING once every block has arrived
              <------------- Nack(positions) --     a block is corrupt: once again, then given up
              <------------------------- Ack --     JOINED: the blocks are the sequence's
    done

Either side ends it early with Release (the writer has stopped) or Revoke (the lease has ended). Every state
has a deadline, every message may be lost, doubled, late or out of order. A message about an unknown handoff
is answered so that the other side ends it too.

**At most one writer.** With a one-sided mover the sender writes into the receiver's memory, and a stalled
sender may write long after its lease expired. So blocks of a lease that ended without a Release go to
*quarantine*: they are not allocated again until the writer confirms (Release) or is known to be gone. With a
two-sided mover the receiver itself drops late puts (CloseLease), and the blocks are free at once.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from ..messages.messages import FailureKind, Handoff, Joined, Message, Met, Peer, PeerId

Key = tuple[int, int]
"""(coordinator incarnation, dispatch)"""


class Wait(NamedTuple):
    """A wait in a core. Each has a time at which the core gives up."""

    key: Key | str  # a dispatch; with the coordinator a request id
    what: str  # the event that is waited for
    until: float  # seconds of the core's clock: a tick at that time ends it


@dataclass(frozen=True, slots=True)
class HandoffTimes:
    """Deadlines of the protocol, in seconds."""

    resend: float = 1.0  # an unanswered Meet, Offer or Handoff is sent again
    grant: float = 60.0  # the sender gives up waiting for room
    prefix: float = 2.0  # the same of cached blocks for a prefill worker, which computes them then
    ack: float = 10.0  # from the last put to the verified join
    test: float = 5.0  # from the grant of a mover's self-test to its end; longer: the mover has failed
    lease: float = 10.0  # renewed every third of it; longer than a stall of a loaded host
    waiting: float = 5.0  # the receiver forgets an offer that is no longer repeated
    silence: float = 10.0  # a one-sided writer that does not answer a Revoke is then shut out, where possible


MEMORY_OF_PAST = 8192
_K = TypeVar("_K")
_V = TypeVar("_V")


def remember(past: OrderedDict[_K, _V], key: _K, value: _V) -> None:
    """Add an entry about something that is over, so that a late echo of it is recognized. Drop the oldest
    entry beyond MEMORY_OF_PAST."""
    past[key] = value
    past.move_to_end(key)
    if len(past) > MEMORY_OF_PAST:
        past.popitem(last=False)


# --- actions of the sender, carried out in the order given ---------------------------------------


class ToCoordinator(NamedTuple):
    message: Message


class Connect(NamedTuple):
    """Open a channel to this decode worker."""

    peer: Peer


class OpenMover(NamedTuple):
    """Open the mover that the peer has chosen. ``left_out``: why another one was not used."""

    peer: PeerId
    met: Met
    left_out: str = ""


class CloseMover(NamedTuple):
    """Close the mover, which has failed its self-test. ``error``: why no other one is used; may be empty."""

    peer: PeerId
    error: str = ""


class WriteTestBlock(NamedTuple):
    """Fill this own block, which holds nothing, with bytes that ``seed`` determines."""

    peer: PeerId
    block: int
    seed: tuple[int, int]


class ToPeer(NamedTuple):
    peer: PeerId
    message: Message


class Put(NamedTuple):
    """Move blocks, or the same layers of several blocks. The slices of a block leave in the order of their
    layers.

    ``items``: (position in the lease, own block, the peer's block). ``layers``: [first, end); None: all.
    """

    peer: PeerId
    lease: int
    secret: bytes
    items: list[tuple[int, int, int]]
    layers: tuple[int, int] | None = None


class CancelPuts(NamedTuple):
    """Cancel puts of this lease that have not left. Precedes Release."""

    peer: PeerId
    lease: int


class SendPlaced(NamedTuple):
    """Send Placed with the checksums of these own blocks, whose positions in the lease begin at ``first``."""

    peer: PeerId
    lease: int
    first: int
    source_blocks: list[int]


class SendHandoff(NamedTuple):
    """Send Handoff with the checksums of these own blocks, in this order. ``first_at``: time of the first
    token."""

    peer: PeerId
    lease: int
    handoff: Handoff
    source_blocks: list[int]
    first_at: float = 0.0

    def message(self, checksums: bytes, now: float) -> Handoff:
        """Return the message to send ``now``. ``checksums``: of the source blocks, as a column of uint64."""
        return replace(self.handoff, checksums=checksums, since_s=max(0.0, now - self.first_at))


class Delivered(NamedTuple):
    """The receiver has verified every block: the sender's own may be unpinned."""

    key: Key


class Undelivered(NamedTuple):
    """The handoff has failed; the sender's blocks may be unpinned."""

    key: Key
    kind: FailureKind
    message: str


SenderAction = (
    Connect
    | OpenMover
    | CloseMover
    | WriteTestBlock
    | ToPeer
    | Put
    | CancelPuts
    | SendPlaced
    | SendHandoff
    | Delivered
    | Undelivered
)


# --- actions of the receiver, carried out in the order given -------------------------------------


class OpenLease(NamedTuple):
    """Accept puts: ``targets`` maps positions to own blocks."""

    lease: int
    secret: bytes
    targets: dict[int, int]


class ExpectAgain(NamedTuple):
    """Accept one more put for these positions: the first one was corrupt."""

    lease: int
    positions: list[int]


class CloseLease(NamedTuple):
    lease: int


class Verify(NamedTuple):
    """Compare these blocks with these checksums and report to ``HandoffReceiver.verified``, in several parts
    if need be. The correct ones are taken into the cache. CloseLease cancels this action."""

    lease: int
    positions: list[int]
    blocks: list[int]
    checksums: list[int]

    def split(self, count: int) -> tuple[Verify, Verify]:
        """Return the first ``count`` positions, and the rest."""
        first, rest = slice(count), slice(count, None)
        return (
            Verify(self.lease, self.positions[first], self.blocks[first], self.checksums[first]),
            Verify(self.lease, self.positions[rest], self.blocks[rest], self.checksums[rest]),
        )


class Join(NamedTuple):
    """The handoff is complete: the blocks now belong to this sequence.

    ``blocks``: of its tokens, and behind them of its state; ``spare``: for a second copy of that."""

    key: Key
    handoff: Handoff
    blocks: list[int]
    spare: list[int]
    num_cached_blocks: int
    transfer_s: float
    last_hash: bytes | None  # of the last full block, if there is one

    def message(self, index: int) -> Joined:
        """Return the message for the coordinator. ``index``: position of the token in the output."""
        return Joined(
            coordinator=self.key[0],
            dispatch=self.key[1],
            index=index,
            token=self.handoff.token,
            logprobs=self.handoff.logprobs,
            transfer_s=self.transfer_s,
            num_cached_blocks=self.num_cached_blocks,
            num_cached_tokens=self.handoff.num_cached_tokens,
        )


class Supersede(NamedTuple):
    """A newer epoch of the same request has arrived: drop this one."""

    key: Key


class PrefixOver(NamedTuple):
    """The cached blocks that were to come for this dispatch are here, or do not come."""

    key: Key
    came: bool


ReceiverAction = ToPeer | OpenLease | ExpectAgain | CloseLease | Verify | Join | Supersede | PrefixOver
