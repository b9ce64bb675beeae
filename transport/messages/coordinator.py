"""Messages between workers and the coordinator."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, field

from .fields import (
    MAX_ADAPTERS,
    MAX_REQUEST_TOKENS,
    MAX_ROWS,
    WIRE_VERSION,
    Adapter,
    Address,
    AnswerColumn,
    AnswerId,
    Count,
    Dispatch,
    Duration,
    FinishReason,
    FloatColumn,
    HashColumn,
    Incarnation,
    Message,
    ModelIdentity,
    Name,
    Peer,
    ProcessNumber,
    RequestSpec,
    Role,
    RowColumn,
    Text,
    TokenId,
    TokenLogprobs,
    WireVersion,
)
from .images import MAX_IMAGES, Image

Readings = Annotated[dict[Text, float], Meta(max_length=64)]
"""By name."""

# --- worker -> coordinator -----------------------------------------------------------------------


class Hello(Message, frozen=True, kw_only=True):
    """A worker introduces itself: on connecting, and again whenever the coordinator fences it."""

    wire_version: WireVersion = WIRE_VERSION
    worker_id: Name
    incarnation: Incarnation
    role: Role
    host: Name
    pid: ProcessNumber
    model: ModelIdentity
    max_model_len: Count
    vocab_size: Count
    vocabulary: Annotated[str, Meta(max_length=64)] = ""  # its name; empty: it cannot be compared
    size: Annotated[str, Meta(max_length=64)] = ""  # of its model, in words; empty likewise
    num_blocks: Count
    max_num_seqs: Count
    max_batch_tokens: Count
    peer_address: Address = ""  # where other workers hand KV blocks over to this one
    device: Annotated[str, Meta(max_length=64)] = ""  # its GPU's UUID; of four GPUs the first one's and *4
    process: Annotated[str, Meta(max_length=256)] = ""  # if it can change its role; it is this worker now
    mixed: bool = False  # its process is a worker of the other role too, for good, over the same blocks
    home: Literal["", Role] = ""  # of a mixed process: the other role is for borrowed work
    takes_images: bool = False  # in prompts
    joins_frames: bool = False  # a Prefill may come in several, see pixel_frames.py


class Load(Message, frozen=True, kw_only=True):
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
    # every dispatch of this coordinator of which the worker holds anything: lost and orphaned ones show here
    dispatches: RowColumn = b""
    num_others: Count = 0  # dispatches of other coordinators that it holds
    num_others_tokens: Count = 0  # prompt tokens of theirs that it has not computed
    num_cache_reports: Count = 0  # BlockEvents sent so far: one that was lost shows here
    counters: Readings = field(default_factory=dict)  # cumulative since start
    gauges: Readings = field(default_factory=dict)  # as they are now


class BlockEvents(Message, frozen=True, kw_only=True):
    """Which block hashes a worker's prefix cache gained and lost since its last report. ``reset`` first
    forgets all.

    ``number`` counts a worker's reports from 1; the coordinator takes them in order, and asks for everything
    where one is missing.
    """

    worker_id: Name
    incarnation: Incarnation
    number: Count = 0
    reset: bool = False
    stored: HashColumn = b""
    removed: HashColumn = b""
    answers_kept: AnswerColumn = b""  # a decode worker's: that a client may have resumed from now on
    answers_dropped: AnswerColumn = b""
    adapters: Annotated[tuple[Adapter, ...], Meta(max_length=MAX_ADAPTERS)] | None = None
    """All that are ready; None: as in the report before. After ``reset`` None means that there are none."""


class FirstToken(Message, frozen=True, kw_only=True):
    """The last prefill chunk is done. With ``finished`` set there is no handoff and the request is over.

    A request with ``max_tokens`` 0 (echo with logprobs, an embedding) has no token: ``token`` is None.
    """

    coordinator: Incarnation
    dispatch: Dispatch
    index: Count
    token: TokenId | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: Annotated[tuple[TokenLogprobs, ...], Meta(max_length=MAX_REQUEST_TOKENS)] | None = None
    """One entry per prompt token but the first."""
    embedding: FloatColumn = b""
    """The last token's hidden state behind the last norm, where ``RequestSpec.embeds`` asks for it, or its
    ``RequestSpec.logits_of``. A worker
    of an older release leaves it empty."""
    num_cached_tokens: Count = 0
    queue_s: Duration = 0.0  # waiting on the prefill worker
    prefill_s: Duration = 0.0
    finished: FinishReason | None = None


class Joined(Message, frozen=True, kw_only=True):
    """The decode worker has verified the handoff and the sequence joins its batch. Repeats FirstToken, which
    may arrive later, or never if the prefill worker has died."""

    coordinator: Incarnation
    dispatch: Dispatch
    index: Count
    token: TokenId
    logprobs: TokenLogprobs | None = None
    transfer_s: Duration = 0.0  # from the first token to the verified join, without the Handoff message's way
    num_cached_blocks: Count = 0  # blocks that did not travel
    num_cached_tokens: Count = 0  # of the prompt, found in the prefill worker's prefix cache


class StepTokens(Message, frozen=True, kw_only=True, omit_defaults=True):
    """All tokens of one decode step, as columns; ``finished``, ``logprobs`` and ``decode_s`` name rows."""

    coordinator: Incarnation
    dispatches: RowColumn
    indices: RowColumn
    tokens: RowColumn
    finished: Annotated[dict[int, FinishReason], Meta(max_length=MAX_ROWS)] = field(default_factory=dict)
    logprobs: Annotated[dict[int, TokenLogprobs], Meta(max_length=MAX_ROWS)] = field(default_factory=dict)
    # since the join, of finished rows
    decode_s: Annotated[dict[int, Duration], Meta(max_length=MAX_ROWS)] = field(default_factory=dict)

    def check(self) -> None:
        if not len(self.dispatches) == len(self.indices) == len(self.tokens):
            raise ValueError("the columns differ in length")


FailureKind = Literal["preempted", "handoff_failed", "peer_lost", "refused", "deadline", "internal"]


class RequestFailed(Message, frozen=True, kw_only=True):
    """The worker has given this dispatch up and holds nothing for it any more. ``refused`` and ``deadline``
    are final; the other kinds may be dispatched again."""

    coordinator: Incarnation
    dispatch: Dispatch
    kind: FailureKind
    message: Text


class Goodbye(Message, frozen=True, kw_only=True):
    """A draining worker holds no request any more, and ends. Sent again until it is answered with Fenced."""

    worker_id: Name
    incarnation: Incarnation


# --- coordinator -> worker -----------------------------------------------------------------------


class Welcome(Message, frozen=True, kw_only=True):
    """Answer to Hello, and sent again where BlockEvents were lost. A worker drops all work of the coordinator
    that it knew at this address before, and sends its whole cache as BlockEvents. ``others``: where more
    coordinator processes of this host listen."""

    coordinator: Incarnation
    heartbeat_s: Duration
    others: Annotated[tuple[Address, ...], Meta(max_length=256)] = ()


class Alive(Message, frozen=True, kw_only=True, omit_defaults=True):
    """The coordinator's heartbeat. A worker that misses it for long has no owner: it frees all it holds and
    sends Hello again.
    ``misfit``: why it gets no work, where it fits no worker of the other role, as a sentence for its log."""

    coordinator: Incarnation
    misfit: Text = ""


class Fenced(Message, frozen=True, kw_only=True):
    """The coordinator had declared this incarnation dead: drop all work, take a new incarnation, send Hello
    again. After Goodbye: the coordinator knows."""

    coordinator: Incarnation
    reason: Text


class Prefill(Message, frozen=True, kw_only=True):
    """Compute this prompt and hand its KV blocks to ``decode``."""

    spec: RequestSpec
    decode: Peer
    num_prefix_blocks: Count = 0  # leading ones that another worker sends, by SendPrefix
    images: Annotated[tuple[Image, ...], Meta(max_length=MAX_IMAGES)] = ()  # in the order of the prompt

    def check(self) -> None:
        end = 0
        for image in self.images:
            image.check()
            if not end <= image.first < image.end <= self.spec.num_prompt_tokens:
                raise ValueError(f"images: one is of tokens {image.first} to {image.end}")
            end = image.end


class SendPrefix(Message, frozen=True, kw_only=True):
    """Send the blocks of these hashes, as many leading ones as are cached here, to the prefill worker that
    computes this dispatch. Only workers of wire version 5 or later are sent this."""

    coordinator: Incarnation
    dispatch: Dispatch
    block_hashes: HashColumn  # from the prompt's first block on
    prefill: Peer


class Move(Message, frozen=True, kw_only=True):
    """Hand the running sequence of ``dispatch`` with its KV blocks to ``decode``, where it goes on as
    ``spec.dispatch``.

    ``spec.token_ids`` are the tokens that have reached the coordinator; the worker replaces them by all that
    it has.
    """

    dispatch: Dispatch
    spec: RequestSpec
    decode: Peer


class Resume(Message, frozen=True, kw_only=True):
    """Send the tokens of this answer from the first one on, and go on with it as ``dispatch``: its client has
    come to another coordinator. The answer is StepTokens, and Joined while it is not complete; or
    RequestFailed. Only a worker that has reported the answer is sent this."""

    coordinator: Incarnation
    dispatch: Dispatch
    request_id: Name
    answer_id: AnswerId
    deadline_s: Duration  # see RequestSpec


class Drain(Message, frozen=True, kw_only=True):
    """Take no new work, hand over or finish the present work, send Goodbye and end. ``timeout_s``: give back
    the rest by then; None: the worker's own setting."""

    coordinator: Incarnation
    timeout_s: Duration | None = None


class Flip(Message, frozen=True, kw_only=True):
    """Change the role of a process that can: ``role`` begins there at once, over the same weights, blocks and
    prefix cache, as a worker of its own; the addressee drains, and ends by itself.
    ``timeout_s``: see Drain."""

    coordinator: Incarnation
    role: Role
    timeout_s: Duration | None = None


class Cancel(Message, frozen=True, kw_only=True):
    """Drop these dispatches, free their blocks, send nothing more about them."""

    coordinator: Incarnation
    dispatches: RowColumn
