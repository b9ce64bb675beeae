"""Messages between prefill workers and decode workers about a KV handoff (the protocol: docs/handoff.md)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .fields import (
    MAX_REQUEST_TOKENS,
    SECRET_BYTES,
    WIRE_VERSION,
    AdapterId,
    Address,
    BlockColumn,
    ChecksumColumn,
    Count,
    Dispatch,
    Duration,
    Grammar,
    HashColumn,
    Incarnation,
    LeaseColumn,
    Message,
    ModelIdentity,
    Name,
    ParcelColumn,
    ProcessNumber,
    RequestSpec,
    Text,
    TokenId,
    TokenLogprobs,
    WireVersion,
)

# --- prefill -> decode ---------------------------------------------------------------------------


class Meet(Message, frozen=True, kw_only=True):
    """First contact of a prefill worker: its name, and its movers, best first."""

    wire_version: WireVersion = WIRE_VERSION
    worker_id: Name
    incarnation: Incarnation
    host: Name
    pid: ProcessNumber
    model: ModelIdentity
    movers: Annotated[tuple[Name, ...], Meta(max_length=16)]
    addressee: Incarnation = 0  # the decode worker's incarnation that is meant; 0: whichever it is
    # movers that have failed in use between these two
    failed: Annotated[tuple[Name, ...], Meta(max_length=16)] = ()
    gpu: Annotated[str, Meta(max_length=128)] = ""  # UUID of the one with the KV cache; empty: host memory


class Offer(Message, frozen=True, kw_only=True):
    """A prompt is being computed; its full blocks have these hashes. The receiver reserves room and answers
    Grant."""

    request_id: Name
    epoch: Count
    coordinator: Incarnation
    dispatch: Dispatch
    num_tokens: Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]
    block_hashes: HashColumn
    grammar: Grammar = b""  # to be compiled meanwhile
    is_test: bool = False  # of the mover: one block, which is verified and joins nothing
    is_prefix: bool = False  # cached blocks for a prefill worker: they join its cache, and no sequence
    adapter: AdapterId = ""  # the receiver keeps it meanwhile


class Renew(Message, frozen=True, kw_only=True):
    """Keeps these leases alive."""

    leases: LeaseColumn


class Placed(Message, frozen=True, kw_only=True):
    """Blocks of this lease have been put whole, from position ``first`` on, with these checksums: they can be
    verified while the rest of the prompt is computed. Lost, it is made good by Handoff, which names all."""

    lease: Count
    first: Count
    checksums: ChecksumColumn


class Handoff(Message, frozen=True, kw_only=True):
    """All blocks have been put. ``checksums`` has one entry per granted block that was not already cached
    there."""

    spec: RequestSpec
    lease: Count
    token: TokenId
    logprobs: TokenLogprobs | None = None
    checksums: ChecksumColumn
    num_cached_tokens: Count = 0  # of the prompt, found in the prefill worker's prefix cache; as in Joined
    since_s: Duration = 0.0  # the first token
    again: bool = False  # corrupt blocks have been put again; an echo of the first Handoff does not mean that


class Release(Message, frozen=True, kw_only=True):
    """The writer has stopped: no put of this lease is in flight and none will follow."""

    lease: Count
    coordinator: Incarnation
    dispatch: Dispatch


class Retire(Message, frozen=True, kw_only=True):
    """This process writes no more under its name up to this incarnation: all blocks granted to it are free.
    Repeated until Retired."""

    incarnation: Incarnation


# --- decode -> prefill ---------------------------------------------------------------------------


class Met(Message, frozen=True, kw_only=True):
    """Answer to Meet: the mover both will use and its addresses, or ``refused`` with a sentence that names
    the field that differs. Neither: that Meet was meant for an earlier incarnation, or sent before a mover
    failed, and the answer only names the decode worker."""

    worker_id: Name
    incarnation: Incarnation
    mover: Annotated[str, Meta(max_length=64)] = ""
    num_blocks: Count = 0
    data_address: Address = ""
    shm_name: Annotated[str, Meta(max_length=256)] = ""
    mover_address: Annotated[bytes, Meta(max_length=1 << 16)] = b""  # for other movers, in their own format
    refused: Annotated[str, Meta(max_length=4096)] = ""


class RendezvousEntry(Message, frozen=True, kw_only=True):
    """Sent both ways by the ends of a mover that makes a connection of its own: an entry of its
    rendezvous."""

    session: Count
    key: Name
    value: Annotated[bytes, Meta(max_length=1 << 15)]


class ParcelComing(Message, frozen=True, kw_only=True):
    """The next piece of data of this session: these layers of the blocks at these positions of a lease,
    packed. Counted from 0."""

    session: Count
    number: Count
    lease: Count
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    first_layer: Count
    num_layers: Count
    positions: ParcelColumn


class SessionOver(Message, frozen=True, kw_only=True):
    """Sent both ways: this end has given the session's connection up."""

    session: Count
    reason: Text


class Grant(Message, frozen=True, kw_only=True):
    """Blocks reserved for a dispatch. ``blocks`` covers the whole prompt in order; the first
    ``num_cached_blocks`` are valid already, or behind the model's sliding window, and are not sent.
    ``secret`` must accompany each put over an open data socket."""

    coordinator: Incarnation
    dispatch: Dispatch
    lease: Count
    secret: Annotated[bytes, Meta(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    blocks: BlockColumn
    num_cached_blocks: Count
    lease_s: Duration


class Refuse(Message, frozen=True, kw_only=True):
    """No grant: never possible (``final``), or given up now."""

    coordinator: Incarnation
    dispatch: Dispatch
    reason: Text
    final: bool


class Ack(Message, frozen=True, kw_only=True):
    """Every block verified: the prefill worker may unpin its own."""

    coordinator: Incarnation
    dispatch: Dispatch
    lease: Count


class Nack(Message, frozen=True, kw_only=True):
    """These blocks (positions in the grant) are missing or corrupt: send them again, then Handoff again."""

    coordinator: Incarnation
    dispatch: Dispatch
    lease: Count
    positions: BlockColumn


class Revoke(Message, frozen=True, kw_only=True):
    """The lease has ended at the receiver: stop writing, drop the handoff, answer Release."""

    coordinator: Incarnation
    dispatch: Dispatch
    lease: Count
    reason: Text


class Retired(Message, frozen=True, kw_only=True):
    """Answer to Retire: no block is held here any more for those names."""

    incarnation: Incarnation
