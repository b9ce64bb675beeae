"""The KV handoff as two pure state machines: no sockets, no clock, no memory of blocks' bytes.

    sender (prefill worker)                         receiver (decode worker)

    MEETING   -- Meet ------------------------->    compares identities, chooses a mover
              <------------------------- Met --
    OFFERED   -- Offer (again every second) --->    WAITING until there is room
              <----------------------- Grant --     GRANTED: blocks reserved under a lease
    GRANTED   == puts of finished layers ======>    lease renewed by Renew
              -- Placed (checksums) ---------->     blocks are verified while others are computed
    SENT      -- Handoff (checksums) ---------->    VERIFYING once every block has arrived
              <------------- Nack(positions) --     a block is corrupt: once again, then given up
              <------------------------- Ack --     JOINED: the blocks are the sequence's
    done

Either side ends it early with Release (the writer has stopped) or Revoke (the lease has ended). Every state
has a deadline, every message may be lost, doubled, late or out of order: what is unknown is answered so that
the other side lets go too.

**At most one writer.** With a one-sided mover the sender writes into the receiver's memory, and a stalled
sender may write long after its lease ran out. So blocks of a lease that ended without the writer's word go to
*quarantine*: they are given to nobody until the writer confirms (Release) or is known to be gone. With a
two-sided mover the receiver itself drops late puts (CloseLease), and the blocks are free at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PeerId = tuple[str, int]
"""(worker id, incarnation)"""
Key = tuple[int, int]
"""(coordinator incarnation, dispatch)"""


class Wait(NamedTuple):
    """Something that waits in a core: nothing may, without a time at which it gives up."""

    key: Key | str  # a dispatch; with the coordinator a request id
    what: str  # what it waits for
    until: float  # seconds of the core's clock: a tick at that time ends it


ONE_SIDED_MOVERS = frozenset({"cuda_ipc", "shm", "nixl"})
SAME_HOST_MOVERS = frozenset({"cuda_ipc", "shm"})
FALLBACK_MOVER = "tcp"
"""Works between any two workers; replaces a mover that fails."""
FORMER_NAME = "zmq"
"""Name of the ``tcp`` mover to workers of earlier builds, which share the wire version. Meet gives both
names."""
MADE_ANEW = frozenset({"nccl"})
"""Tried once more when they fail, by a new meeting: what two workers had set up together may have broken by
the fault of neither."""


@dataclass(frozen=True, slots=True)
class HandoffTimes:
    """Deadlines of the protocol, in seconds."""

    resend: float = 1.0  # an unanswered Meet, Offer or Handoff is said again
    grant: float = 60.0  # the sender gives up waiting for room
    ack: float = 10.0  # from the last put to the verified join
    lease: float = 3.0  # renewed every third of it
    waiting: float = 5.0  # the receiver forgets an offer that is no longer repeated
    silence: float = (
        10.0  # a one-sided writer that does not answer a Revoke for so long is shut out, where the mover can
    )
