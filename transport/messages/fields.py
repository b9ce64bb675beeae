"""The fields of messages: bounded types, columns of numbers as little-endian bytes, and the parts that
several messages carry.

Rows of tokens travel as columns inside ``bytes`` fields: one message carries a whole engine step, and nothing
is boxed on the way. All fields are bounded here, before any of them is believed. Times on the wire are
*durations* in seconds; no clock is shared.
"""

from __future__ import annotations

import itertools
import secrets
from array import array
from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypeAlias

import numpy as np
from msgspec import Meta, Struct, field

from .cache_map import CacheMap, map_difference, num_bytes

PeerId: TypeAlias = tuple[str, int]
"""(worker id, incarnation)"""
WIRE_VERSION = 6
"""Processes work together if their versions are equal or neighbours. Every change of the messages raises it:
by one if an older process can skip what is new (optional fields; messages and values that it is never sent),
else by two."""
MAX_REQUEST_TOKENS = 1 << 20
MAX_ADAPTERS = 512  # of a worker
MAX_TEMPERATURE = 2  # that a client may ask for, by OpenAI's API
MAX_BLOCKS = 1 << 24
MAX_ROWS = 1 << 16
MAX_PARCEL_POSITIONS = 1024
HASH_BYTES = ANSWER_ID_BYTES = SECRET_BYTES = 16
MAX_GRAMMAR_BYTES = 256 << 10
_INT63 = (1 << 63) - 1


def _column(item_bytes: int, most_items: int) -> Meta:
    """Return the bounds of a column of items. The decoder checks that it ends with a whole item, by the item
    size noted here."""
    return Meta(max_length=item_bytes * most_items, extra={ITEM_BYTES: item_bytes})


ITEM_BYTES = "item_bytes"
WireVersion = Annotated[int, Meta(ge=0, lt=1 << 16)]
Grammar = Annotated[bytes, Meta(max_length=MAX_GRAMMAR_BYTES)]
"""In llguidance's notation, or with ``TokenRules`` around it; empty: any output."""
Name = Annotated[str, Meta(min_length=1, max_length=256)]
Text = Annotated[str, Meta(max_length=4096)]
Address = Annotated[str, Meta(max_length=512)]
Count = Annotated[int, Meta(ge=0, le=_INT63)]
ProcessNumber = Annotated[int, Meta(ge=0, lt=1 << 31)]
"""A process id: the operating system's calls take no larger ones."""
Incarnation = Annotated[int, Meta(ge=0, le=_INT63)]
Dispatch = Annotated[int, Meta(ge=0, lt=1 << 32)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 32)]
TokenIds = Annotated[tuple[TokenId, ...], Meta(max_length=8)]
Duration = Annotated[float, Meta(ge=0, le=1e9)]
TokenColumn = Annotated[bytes, _column(4, MAX_REQUEST_TOKENS)]
"""uint32 token ids."""
BlockColumn = Annotated[bytes, _column(4, MAX_REQUEST_TOKENS)]
"""uint32 block numbers."""
RowColumn = Annotated[bytes, _column(4, MAX_ROWS)]
HashColumn = Annotated[bytes, _column(HASH_BYTES, MAX_REQUEST_TOKENS)]
"""Block hashes, HASH_BYTES each."""
ChecksumColumn = Annotated[bytes, _column(8, MAX_REQUEST_TOKENS)]
"""uint64 checksums, one a block."""
ParcelColumn = Annotated[bytes, _column(4, MAX_PARCEL_POSITIONS)]
"""uint32 positions in a lease."""
AnswerId = Annotated[bytes, Meta(max_length=ANSWER_ID_BYTES)]
"""Names an answer whose client has an idempotency key (``Resume``); empty: the client has none."""
FloatColumn = Annotated[bytes, _column(4, MAX_ROWS)]
"""float32 numbers."""
AdapterId = Annotated[str, Meta(max_length=64)]
"""Names an adapter by its content, as its block hashes do; empty: none."""
AnswerColumn = Annotated[bytes, _column(ANSWER_ID_BYTES, MAX_ROWS)]
LeaseColumn = Annotated[bytes, _column(8, MAX_ROWS)]
"""uint64 lease numbers."""


class Message(Struct, frozen=True, kw_only=True):
    """Base of all messages, immutable. Fields that are not known here, of a newer process, are skipped.
    Decoded messages have been checked against the types; those that our own code makes have not."""

    def check(self) -> None:
        """Raise ValueError if fields that are valid each do not fit together."""


class OtherVersion(Message, frozen=True, kw_only=True):
    """The sender's wire version, where it is no neighbour of the receiver's. It stands for a Hello or Meet of
    which nothing else is read, and is the answer to one. Its bytes are the same in all versions."""

    wire_version: WireVersion = WIRE_VERSION

    @property
    def sentence(self) -> str:
        """Why the two do not work together, and what to do."""
        older = "that one" if self.wire_version < WIRE_VERSION else "this process"
        return (
            f"wire version {self.wire_version} there, {WIRE_VERSION} here; only neighbours work together: "
            f"upgrade {older} (`splitserve version` names the wire version)"
        )


def is_neighbour(wire_version: int) -> bool:
    """Return whether a process of this version and this process work together."""
    return abs(wire_version - WIRE_VERSION) <= 1


FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode"]


class SamplingParams(Message, frozen=True, kw_only=True):
    """How to choose tokens. ``seed`` is always set: the coordinator draws one where the client gave none.

    Noise is a function of (seed, absolute position) only. ``logprobs`` is the number of alternatives to
    report beside the chosen token's own logprob; None reports nothing. The alternatives are the most likely
    tokens or, where there are any, ``logprob_token_ids``.
    """

    max_tokens: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)]
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_REQUEST_TOKENS)] = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0  # 0: off
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] = 1.0
    presence_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    logit_bias: Annotated[dict[int, float], Meta(max_length=1024)] = field(default_factory=dict)
    seed: Count = 0
    stop_token_ids: Annotated[tuple[int, ...], Meta(max_length=64)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    logprob_token_ids: Annotated[tuple[int, ...], Meta(max_length=20)] = ()
    grammar: Grammar = b""  # that the output follows; empty: any token may follow

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


class TokenLogprobs(Message, frozen=True, kw_only=False):
    """Natural-log probabilities at one position: the chosen token's, and the most likely ones in order."""

    logprob: float
    top_ids: Annotated[tuple[int, ...], Meta(max_length=20)] = ()
    top_logprobs: Annotated[tuple[float, ...], Meta(max_length=20)] = ()


class RequestSpec(Message, frozen=True, kw_only=True):
    """All a worker needs to know of one attempt at a request.

    ``token_ids`` is the prompt followed by the tokens that the client already has; the first
    ``num_prompt_tokens`` of them are the prompt, the rest are output (they count for penalties, for
    ``max_tokens`` and for ``min_tokens``). The next token's output index is ``num_tokens -
    num_prompt_tokens``.
    """

    request_id: Name
    epoch: Count
    dispatch: Dispatch
    coordinator: Incarnation
    token_ids: TokenColumn
    num_prompt_tokens: Annotated[int, Meta(ge=1, le=MAX_REQUEST_TOKENS)]
    sampling: SamplingParams
    salt: Annotated[bytes, Meta(max_length=64)] = b""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    deadline_s: Duration  # seconds left until the request as a whole must have ended
    traceparent: Annotated[str, Meta(max_length=64)] = ""  # of the request's span; empty: it leaves no trace
    answer_id: AnswerId = b""
    adapter: AdapterId = ""  # only a worker that has reported it is sent it
    embeds: bool = False  # with ``max_tokens`` 0: the hidden state of the last token is wanted
    logits_of: TokenIds = ()  # where ``embeds``: or its logits of these tokens
    rope_shift: Annotated[int, Meta(ge=-MAX_REQUEST_TOKENS, le=0)] = 0  # behind all images, see images.py

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // 4

    def check(self) -> None:
        if self.num_prompt_tokens > self.num_tokens:
            raise ValueError(f"{self.num_prompt_tokens} prompt tokens in {self.num_tokens} tokens")
        if self.num_prompt_tokens + self.rope_shift < 0:
            raise ValueError(f"rope_shift {self.rope_shift} behind {self.num_prompt_tokens} prompt tokens")


class ModelIdentity(Message, frozen=True, kw_only=True):
    """The model of a worker. KV blocks may pass between two workers if all fields but the revision are
    equal."""

    dtype: Name  # that the model computes in
    numerics: Name = "fast"  # or which exact kernels: bits agree only among the same
    window: Count = 0  # tokens that a token attends to at most, in any layer; 0: no bound
    state_blocks: Count = 0  # for a sequence's state, of layers that have no keys and values; 0: none has one
    kv_name: Name  # all that decides the bytes of KV: weights, quantisation, rope, types, numerics
    revision: Annotated[str, Meta(max_length=256)] = ""  # all files, also template and defaults
    block_size: Annotated[int, Meta(ge=1, le=4096)]
    cache_map: CacheMap
    block_bytes: Annotated[int, Meta(ge=1, le=1 << 32)]

    def check(self) -> None:
        if (size := num_bytes(self.cache_map)) != self.block_bytes:
            raise ValueError(f"the cache map has {size} bytes, the block {self.block_bytes}")

    def difference(self, other: ModelIdentity) -> tuple[str, str, str] | None:
        """Return the first field that keeps KV blocks apart, and both values in words; None: they fit."""
        for name in self.__struct_fields__:
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours == theirs or name == "revision":
                continue
            both = map_difference(ours, theirs) if name == "cache_map" else (repr(ours), repr(theirs))
            return name.replace("_", " ").replace("kv", "KV"), *both
        return None


class Adapter(Message, frozen=True, kw_only=True):
    """Low-rank updates of the model's weights (LoRA), ready on a worker."""

    name: Annotated[str, Meta(max_length=256)]  # for clients; empty: its folder has other content by now
    content: AdapterId


class Peer(Message, frozen=True, kw_only=True):
    """A decode worker as a prefill worker reaches it."""

    worker_id: Name
    incarnation: Incarnation
    address: Address


def u32(values: Sequence[int] | np.ndarray) -> bytes:
    """A column of uint32, little-endian: so are the machines that this runs on."""
    if isinstance(values, list | array):
        return array("I", values).tobytes()  # some times quicker than by way of numpy
    return np.asarray(values, dtype="<u4").tobytes()


def u64(values: list[int] | np.ndarray) -> bytes:
    """A column of uint64, little-endian."""
    if isinstance(values, list):
        return array("Q", values).tobytes()
    return np.asarray(values, dtype="<u8").tobytes()


def from_u32(column: bytes) -> list[int]:
    """The numbers of a uint32 column."""
    return u32_array(column).tolist()


def u32_array(column: bytes) -> array[int]:
    """Return the numbers in a fraction of the time and of the memory, for callers that read few of them."""
    return array("I", column)


def from_u64(column: bytes) -> list[int]:
    """The numbers of a uint64 column."""
    return array("Q", column).tolist()


def from_hashes(column: bytes) -> list[bytes]:
    """The block hashes of a column."""
    return [column[i : i + HASH_BYTES] for i in range(0, len(column), HASH_BYTES)]


PROCESS_BITS, COUNT_BITS = 41, 22
"""Incarnation numbers: which life of a worker or a coordinator a message is about. They need no clock and no
file.

    63 bits:   process, 41 bits, random   |   count, 22 bits: incarnations of that process, from 1

Two incarnations of one process are ordered by their counts. Two processes of one name have no order: between
them a clock may have been set back or a file lost, and two coordinators may have met them in different
orders. Where it matters which of the two is here now, it is asked: the answer to ``Meet`` names the
incarnation that gives it."""


def incarnations(draw: Callable[[int], int] = secrets.randbits) -> Callable[[], int]:
    """A source of one process's numbers, each later than those before it. ``draw``: that many random bits.

    Call it in the process itself: two that were forked after the call would share their numbers.
    """
    return itertools.count((draw(PROCESS_BITS) << COUNT_BITS) + 1).__next__


def same_process(a: int, b: int) -> bool:
    """Whether these are incarnations of one process."""
    return a >> COUNT_BITS == b >> COUNT_BITS


def is_earlier(a: int, b: int) -> bool:
    """Whether ``a`` is an incarnation that the process of ``b`` had before ``b``."""
    return a < b and same_process(a, b)


def has_ended(incarnation: int, ended: int) -> bool:
    """Whether this is ``ended``, the newest incarnation of its process that is over, or one before that."""
    return incarnation <= ended and same_process(incarnation, ended)
