"""Every message that crosses a process boundary, as a closed set of validated types.

Rows of tokens travel as little-endian columns inside ``bytes`` fields (``U32``, ``U64``): one
message carries a whole engine step, and nothing is boxed on the way. All fields are bounded here,
before any of them is believed. Times on the wire are *durations* in seconds; no clock is shared.

Who says what:

    worker      -> coordinator   Hello, Load, BlockEvents, FirstToken, Joined, StepTokens, RequestFailed, Goodbye
    coordinator -> worker        Welcome, Alive, Fenced, Prefill, Move, Cancel, Drain
    prefill     -> decode        Meet, Offer, Renew, Handoff, Release
    decode      -> prefill       Met, Grant, Refuse, Ack, Nack, Revoke

A decode worker that leaves speaks to another decode worker as a prefill worker does.

A *dispatch* names one attempt (one epoch) of one request: the coordinator numbers them and never
uses a number twice in its life, so a message of an older epoch names a dispatch that is no longer
known, and is dropped. ``coordinator`` fields carry the coordinator's incarnation for the same reason.
"""

from __future__ import annotations

import sys
from array import array
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

MAX_REQUEST_TOKENS = 1 << 20
MAX_BLOCKS = 1 << 24
MAX_ROWS = 1 << 16
HASH_BYTES = 16
SECRET_BYTES = 16


def _whole(item_bytes: int) -> AfterValidator:
    """Refuses a column that ends in the middle of an item."""

    def check(column: bytes) -> bytes:
        if len(column) % item_bytes:
            raise ValueError(f"{len(column)} bytes are no whole number of {item_bytes}-byte items")
        return column

    return AfterValidator(check)


Name = Annotated[str, Field(min_length=1, max_length=256)]
Text = Annotated[str, Field(max_length=4096)]
Address = Annotated[str, Field(max_length=512)]
Count = Annotated[int, Field(ge=0, lt=1 << 63)]
Incarnation = Annotated[int, Field(ge=0, lt=1 << 63)]
Dispatch = Annotated[int, Field(ge=0, lt=1 << 32)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 32)]
Duration = Annotated[float, Field(ge=0, le=1e9)]
TokenColumn = Annotated[bytes, Field(max_length=4 * MAX_REQUEST_TOKENS), _whole(4)]
"""uint32 token ids."""
BlockColumn = Annotated[bytes, Field(max_length=4 * MAX_REQUEST_TOKENS), _whole(4)]
"""uint32 block numbers."""
RowColumn = Annotated[bytes, Field(max_length=4 * MAX_ROWS), _whole(4)]
HashColumn = Annotated[bytes, Field(max_length=HASH_BYTES * MAX_REQUEST_TOKENS), _whole(HASH_BYTES)]
"""Block hashes, HASH_BYTES each."""
ChecksumColumn = Annotated[bytes, Field(max_length=8 * MAX_REQUEST_TOKENS), _whole(8)]
"""uint64 checksums, one a block."""

FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode"]


class Message(BaseModel):
    """Base of all messages: immutable, closed, strictly typed."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


# --- parts of messages ---------------------------------------------------------------------------


class Sampling(Message):
    """How to choose tokens. ``seed`` is always set: the coordinator draws one where the client gave none.

    Noise is a function of (seed, absolute position) only. ``logprobs`` is the number of alternatives to
    report beside the chosen token's own logprob; None reports nothing.
    """

    max_tokens: Annotated[int, Field(ge=0, le=MAX_REQUEST_TOKENS)]
    min_tokens: Annotated[int, Field(ge=0, le=MAX_REQUEST_TOKENS)] = 0
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0  # 0: off
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Field(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Field(ge=-100, le=100)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-100, le=100)] = 0.0
    logit_bias: Annotated[dict[int, float], Field(max_length=1024)] = {}
    seed: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    stop_token_ids: Annotated[tuple[int, ...], Field(max_length=64, strict=False)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class TokenLogprobs(Message):
    """Natural-log probabilities at one position: the chosen token's, and the most likely ones in order."""

    logprob: float
    top_ids: Annotated[tuple[int, ...], Field(max_length=20, strict=False)] = ()
    top_logprobs: Annotated[tuple[float, ...], Field(max_length=20, strict=False)] = ()


class RequestSpec(Message):
    """All a worker needs to know of one attempt at a request.

    ``token_ids`` is the prompt followed by the tokens that the client already has; the first
    ``num_prompt_tokens`` of them are the prompt, the rest are output (they count for penalties, for
    ``max_tokens`` and for ``min_tokens``). The next token's output index is ``num_tokens - num_prompt_tokens``.
    """

    request_id: Name
    epoch: Count
    dispatch: Dispatch
    coordinator: Incarnation
    token_ids: TokenColumn
    num_prompt_tokens: Annotated[int, Field(ge=1, le=MAX_REQUEST_TOKENS)]
    sampling: Sampling
    salt: Annotated[bytes, Field(max_length=64)] = b""
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    deadline_s: Duration  # seconds left until the request as a whole must have ended

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    @model_validator(mode="after")
    def _prompt_is_there(self) -> Self:
        if self.num_prompt_tokens > self.num_tokens:
            raise ValueError(f"{self.num_prompt_tokens} prompt tokens in {self.num_tokens} tokens")
        return self


class ModelIdentity(Message):
    """What two workers must share before KV blocks may pass between them. Compared field by field."""

    fingerprint: Name  # of weights, config and tokenizer
    dtype: Name  # of the KV cache
    block_size: Annotated[int, Field(ge=1, le=4096)]
    layout: Name  # e.g. "block-major/v1 [num_layers=12, 2, block_size=16, num_kv_heads=4, head_dim=64]"
    block_bytes: Annotated[int, Field(ge=1, le=1 << 32)]
    numerics: Name = "fast"  # or which exact kernels: bits agree only among the same


class Peer(Message):
    """A decode worker as a prefill worker reaches it."""

    worker_id: Name
    incarnation: Incarnation
    address: Address


# --- worker -> coordinator -----------------------------------------------------------------------


class Hello(Message):
    """A worker introduces itself: on connecting, and again whenever the coordinator fences it."""

    worker_id: Name
    incarnation: Incarnation
    role: Role
    host: Name
    pid: Count
    model: ModelIdentity
    max_model_len: Count
    vocab_size: Count
    num_blocks: Count
    max_num_seqs: Count
    max_batch_tokens: Count
    peer_address: Address = ""  # where prefill workers reach this decode worker


class Load(Message):
    """Heartbeat and load report. ``steps`` grows while a busy worker makes progress."""

    worker_id: Name
    incarnation: Incarnation
    blocks_free: Count
    blocks_cached: Count
    blocks_used: Count
    blocks_leased: Count
    num_running: Count
    num_waiting: Count
    num_waiting_tokens: Count
    steps: Count
    busy: bool
    accepting: bool
    draining: bool = False  # it takes no new work and leaves as soon as it holds nothing
    dispatches: RowColumn = b""  # every dispatch this worker holds anything of: lost and orphaned ones show here
    num_cache_reports: Count = 0  # BlockEvents said so far: one that was lost shows here
    counters: Annotated[dict[str, float], Field(max_length=64)] = {}  # cumulative since start


class BlockEvents(Message):
    """Which block hashes a worker's prefix cache gained and lost since its last report. ``reset`` first forgets all.

    ``number`` counts a worker's reports from 1; the coordinator takes them in order, and asks for everything where one is missing.
    """

    worker_id: Name
    incarnation: Incarnation
    number: Count = 0
    reset: bool = False
    stored: HashColumn = b""
    removed: HashColumn = b""


class FirstToken(Message):
    """The last prefill chunk is done. With ``finished`` set there is no handoff and the request is over.

    A request with ``max_tokens`` 0 (echo with logprobs) has no token: ``token`` is None.
    """

    coordinator: Incarnation
    dispatch: Dispatch
    index: Count
    token: TokenId | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Annotated[tuple[TokenLogprobs, ...], Field(max_length=MAX_REQUEST_TOKENS, strict=False)] | None = None
    """One entry per prompt token but the first."""
    num_cached_tokens: Count = 0
    queue_s: Duration = 0.0  # waiting on the prefill worker
    prefill_s: Duration = 0.0
    finished: FinishReason | None = None


class Joined(Message):
    """The decode worker has verified the handoff and the sequence joins its batch. Repeats the first token, should
    the prefill worker have died before the coordinator heard it."""

    coordinator: Incarnation
    dispatch: Dispatch
    index: Count
    token: TokenId
    logprobs: TokenLogprobs | None = None
    transfer_s: Duration = 0.0  # from the Handoff message's arrival to the verified join
    num_cached_blocks: Count = 0  # blocks that did not travel


class StepTokens(Message):
    """All tokens of one decode step, as columns; ``finished`` and ``logprobs`` name rows."""

    coordinator: Incarnation
    dispatches: RowColumn
    indices: RowColumn
    tokens: RowColumn
    finished: Annotated[dict[int, FinishReason], Field(max_length=MAX_ROWS)] = {}
    logprobs: Annotated[dict[int, TokenLogprobs], Field(max_length=MAX_ROWS)] = {}

    @model_validator(mode="after")
    def _rows_match(self) -> Self:
        if not len(self.dispatches) == len(self.indices) == len(self.tokens):
            raise ValueError("the columns differ in length")
        return self


FailureKind = Literal["preempted", "handoff_failed", "peer_lost", "refused", "deadline", "internal"]


class RequestFailed(Message):
    """The worker has given this dispatch up and holds nothing of it any more. ``refused`` and ``deadline`` are final;
    the other kinds may be dispatched again."""

    coordinator: Incarnation
    dispatch: Dispatch
    kind: FailureKind
    message: Text


class Goodbye(Message):
    """A draining worker holds nothing any more, and ends."""

    worker_id: Name
    incarnation: Incarnation


# --- coordinator -> worker -----------------------------------------------------------------------


class Welcome(Message):
    """Answer to Hello, and said again where BlockEvents were lost. A worker drops all work of any other coordinator incarnation, and
    sends its whole cache as BlockEvents."""

    coordinator: Incarnation
    heartbeat_s: Duration


class Alive(Message):
    """The coordinator's heartbeat. A worker that misses it for long has no owner: it frees all it holds and says Hello again."""

    coordinator: Incarnation


class Fenced(Message):
    """The coordinator had declared this incarnation dead: drop all work, take a new incarnation, say Hello again."""

    coordinator: Incarnation
    reason: Text


class Prefill(Message):
    """Compute this prompt and hand its KV blocks to ``decode``."""

    spec: RequestSpec
    decode: Peer


class Move(Message):
    """Hand the running sequence of ``dispatch`` with its KV blocks to ``decode``, where it goes on as ``spec.dispatch``.

    ``spec.token_ids`` are the tokens that the coordinator has heard of; the worker puts those in their place that it has.
    """

    dispatch: Dispatch
    spec: RequestSpec
    decode: Peer


class Drain(Message):
    """Take no new work, hand over or finish what there is, say Goodbye and end. ``timeout_s``: give back by then what is left;
    None: the worker's own setting."""

    coordinator: Incarnation
    timeout_s: Duration | None = None


class Cancel(Message):
    """Drop these dispatches, free their blocks, say nothing more of them."""

    coordinator: Incarnation
    dispatches: RowColumn


# --- prefill -> decode ---------------------------------------------------------------------------


class Meet(Message):
    """First contact of a prefill worker: who it is, and which movers it has, best first."""

    worker_id: Name
    incarnation: Incarnation
    host: Name
    pid: Count
    model: ModelIdentity
    movers: Annotated[tuple[Name, ...], Field(max_length=16, strict=False)]
    addressee: Incarnation = 0  # the decode worker's incarnation that is meant; 0: whichever it is


class Offer(Message):
    """A prompt is being computed; its full blocks have these hashes. The receiver reserves room and answers Grant."""

    request_id: Name
    epoch: Count
    coordinator: Incarnation
    dispatch: Dispatch
    num_tokens: Annotated[int, Field(ge=1, le=MAX_REQUEST_TOKENS)]
    block_hashes: HashColumn


class Renew(Message):
    """Keeps these leases alive."""

    leases: Annotated[bytes, Field(max_length=8 * MAX_ROWS), _whole(8)]  # uint64


class Placed(Message):
    """Blocks of this lease have been put whole, from position ``first`` on, with these checksums: they can be verified while the rest of
    the prompt is computed. Lost, it is made good by Handoff, which names all."""

    lease: Count
    first: Count
    checksums: ChecksumColumn


class Handoff(Message):
    """All blocks have been put. ``checksums`` has one entry per granted block that was not already cached there."""

    spec: RequestSpec
    lease: Count
    token: TokenId
    logprobs: TokenLogprobs | None = None
    checksums: ChecksumColumn


class Release(Message):
    """The writer has stopped: no put of this lease is in flight and none will follow."""

    lease: Count
    coordinator: Incarnation
    dispatch: Dispatch


# --- decode -> prefill ---------------------------------------------------------------------------


class Met(Message):
    """Answer to Meet: the mover both will use and what it needs, or ``refused`` with a sentence that says which field differs."""

    worker_id: Name
    incarnation: Incarnation
    mover: Annotated[str, Field(max_length=64)] = ""
    num_blocks: Count = 0
    data_address: Address = ""
    shm_name: Annotated[str, Field(max_length=256)] = ""
    refused: Annotated[str, Field(max_length=4096)] = ""


class Grant(Message):
    """Blocks reserved for a dispatch. ``blocks`` covers the whole prompt in order; the first ``num_cached_blocks`` are valid
    already and are not sent. ``secret`` must accompany each put over an open data socket."""

    coordinator: Incarnation
    dispatch: Dispatch
    lease: Count
    secret: Annotated[bytes, Field(min_length=SECRET_BYTES, max_length=SECRET_BYTES)]
    blocks: BlockColumn
    num_cached_blocks: Count
    lease_s: Duration


class Refuse(Message):
    """No grant: never possible (``final``), or given up now."""

    coordinator: Incarnation
    dispatch: Dispatch
    reason: Text
    final: bool


class Ack(Message):
    """Every block verified: the prefill worker may unpin its own."""

    coordinator: Incarnation
    dispatch: Dispatch
    lease: Count


class Nack(Message):
    """These blocks (positions in the grant) are missing or corrupt: send them again, then Handoff again."""

    coordinator: Incarnation
    dispatch: Dispatch
    lease: Count
    positions: BlockColumn


class Revoke(Message):
    """The lease has ended at the receiver: stop writing, drop the handoff, answer Release."""

    coordinator: Incarnation
    dispatch: Dispatch
    lease: Count
    reason: Text


FROM_WORKER = (Hello, Load, BlockEvents, FirstToken, Joined, StepTokens, RequestFailed, Goodbye)
FROM_COORDINATOR = (Welcome, Alive, Fenced, Prefill, Move, Cancel, Drain)
FROM_PREFILL = (Meet, Offer, Renew, Placed, Handoff, Release)
FROM_DECODE = (Met, Grant, Refuse, Ack, Nack, Revoke)


def u32(values: list[int] | np.ndarray) -> bytes:
    """A column of uint32, little-endian."""
    if isinstance(values, list) and sys.byteorder == "little":
        return array("I", values).tobytes()  # some times quicker than by way of numpy
    return np.asarray(values, dtype="<u4").tobytes()


def u64(values: list[int] | np.ndarray) -> bytes:
    """A column of uint64, little-endian."""
    return np.asarray(values, dtype="<u8").tobytes()


def from_u32(column: bytes) -> list[int]:
    """The numbers of a uint32 column."""
    result: list[int] = np.frombuffer(column, dtype="<u4").tolist()
    return result


def from_u64(column: bytes) -> list[int]:
    """The numbers of a uint64 column."""
    result: list[int] = np.frombuffer(column, dtype="<u8").tolist()
    return result


def from_hashes(column: bytes) -> list[bytes]:
    """The block hashes of a column."""
    return [column[i : i + HASH_BYTES] for i in range(0, len(column), HASH_BYTES)]
