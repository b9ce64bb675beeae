"""Every message that crosses a process boundary, as a closed set of validated types.

Senders and receivers:

    worker      -> coordinator   Hello, Load, BlockEvents, FirstToken, Joined, StepTokens, RequestFailed,
                                 Goodbye
    coordinator -> worker        Welcome, OtherVersion, Alive, Fenced, Prefill, Move, Resume, Cancel, Drain,
                                 Flip
    prefill     -> decode        Meet, Offer, Renew, Placed, Handoff, Release, Retire
    decode      -> prefill       Met, OtherVersion, Grant, Refuse, Ack, Nack, Revoke, Retired
    their movers, both ways      RendezvousEntry, ParcelComing, SessionOver

A decode worker that drains sends to another decode worker what a prefill worker does.

A *dispatch* names one attempt (one epoch) of one request: the coordinator numbers them and never
uses a number twice in its life, so a message of an older epoch names a dispatch that is no longer
known, and is dropped. ``coordinator`` fields carry the coordinator's incarnation for the same reason.
"""

from __future__ import annotations

from .coordinator import (
    Alive,
    BlockEvents,
    Cancel,
    Drain,
    FailureKind,
    Fenced,
    FirstToken,
    Flip,
    Goodbye,
    Hello,
    Joined,
    Load,
    Move,
    Prefill,
    RequestFailed,
    Resume,
    SendPrefix,
    StepTokens,
    Welcome,
)
from .fields import (
    ANSWER_ID_BYTES,
    HASH_BYTES,
    MAX_PARCEL_POSITIONS,
    MAX_ROWS,
    SECRET_BYTES,
    Adapter,
    FinishReason,
    Message,
    ModelIdentity,
    OtherVersion,
    Peer,
    PeerId,
    RequestSpec,
    Role,
    SamplingParams,
    TokenLogprobs,
    from_hashes,
    from_u32,
    from_u64,
    u32,
    u32_array,
    u64,
)
from .handoff import (
    Ack,
    Grant,
    Handoff,
    Meet,
    Met,
    Nack,
    Offer,
    ParcelComing,
    Placed,
    Refuse,
    Release,
    RendezvousEntry,
    Renew,
    Retire,
    Retired,
    Revoke,
    SessionOver,
)

FROM_WORKER = (Hello, Load, BlockEvents, FirstToken, Joined, StepTokens, RequestFailed, Goodbye)
FROM_COORDINATOR = (
    Welcome,
    OtherVersion,
    Alive,
    Fenced,
    Prefill,
    SendPrefix,
    Move,
    Resume,
    Cancel,
    Drain,
    Flip,
)
FROM_PREFILL = (
    Meet,
    Offer,
    Renew,
    Placed,
    Handoff,
    Release,
    Retire,
    RendezvousEntry,
    ParcelComing,
    SessionOver,
)
FROM_DECODE = (Met, OtherVersion, Grant, Refuse, Ack, Nack, Revoke, Retired, RendezvousEntry, SessionOver)
BETWEEN_MOVERS = (RendezvousEntry, ParcelComing, SessionOver)
"""The movers' own: the handoff's cores never see them."""

__all__ = [
    "ANSWER_ID_BYTES",
    "BETWEEN_MOVERS",
    "FROM_COORDINATOR",
    "FROM_DECODE",
    "FROM_PREFILL",
    "FROM_WORKER",
    "HASH_BYTES",
    "MAX_PARCEL_POSITIONS",
    "MAX_ROWS",
    "SECRET_BYTES",
    "Ack",
    "Adapter",
    "Alive",
    "BlockEvents",
    "Cancel",
    "Drain",
    "FailureKind",
    "Fenced",
    "FinishReason",
    "FirstToken",
    "Flip",
    "Goodbye",
    "Grant",
    "Handoff",
    "Hello",
    "Joined",
    "Load",
    "Meet",
    "Message",
    "Met",
    "ModelIdentity",
    "Move",
    "Nack",
    "Offer",
    "OtherVersion",
    "ParcelComing",
    "Peer",
    "PeerId",
    "Placed",
    "Prefill",
    "Refuse",
    "Release",
    "RendezvousEntry",
    "Renew",
    "RequestFailed",
    "RequestSpec",
    "Resume",
    "Retire",
    "Retired",
    "Revoke",
    "Role",
    "SamplingParams",
    "SendPrefix",
    "SessionOver",
    "StepTokens",
    "TokenLogprobs",
    "Welcome",
    "from_hashes",
    "from_u32",
    "from_u64",
    "u32",
    "u32_array",
    "u64",
]
