"""A client with an idempotency key has its answer resumed, by whichever coordinator it comes to.

The key, the tenant, the prompt and the sampling name the answer: a decode worker that keeps it is found by
that name. The key is also the seed where the client gave none, so that an answer that is computed anew is the
same one. Each event of a stream with one choice has an id: by the last one it saw, a client gets the rest.

    NUM_TOKENS-CHECKSUM              the last event of a token; the checksum is that of all tokens so far
    NUM_TOKENS-CHECKSUM.NUM_EVENTS   an earlier event of that token, or one of the answer's end

Behind either, for a request that named a route: @MODEL, a checksum of the model's name: it answers the rest.

Each token is written as events of its own, so its events are the same whichever tokens came with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import NamedTuple, Protocol
from zlib import crc32

from msgspec import msgpack
from msgspec.structs import replace

from ...transport.messages.messages import ANSWER_ID_BYTES, SamplingParams, TokenLogprobs, u32
from ..errors import AnswerDiffers, ApiError, WrongField
from ..http.call import Call
from ..lifecycle.request import Ended, Request
from .choice import Choice
from .conversation import LAST_ID_HEADER, model_mark
from .plan import RequestPlan

KEY_HEADER = b"idempotency-key"
KEY = re.compile(rb"[!-~]{1,255}")
EVENT_ID = re.compile(rb"(\d{1,9})-([0-9a-f]{8})(?:\.(\d{1,4}))?(@[0-9a-f]{8})?")


class Seen(NamedTuple):
    """What a client has of a stream: ``checksum`` is that of its first ``num_tokens`` tokens.
    ``num_events``: of those since the last of these tokens; None: all but the answer's end."""

    num_tokens: int
    checksum: int
    num_events: int | None


class IdempotencyKey(NamedTuple):
    """A client's key, within its tenant. ``seen``: None if the client wants the answer from its beginning."""

    digest: bytes
    seen: Seen | None

    @classmethod
    def of(cls, call: Call) -> IdempotencyKey | None:
        """Return the key of a call; None if it has none. Raises InvalidRequest."""
        if (key := call.headers.get(KEY_HEADER)) is None:
            return None
        if not KEY.fullmatch(key):
            raise WrongField("Idempotency-Key", "has to be 1 to 255 visible ASCII characters, without spaces")
        seen = None
        if (last := call.headers.get(LAST_ID_HEADER)) is not None:
            if (found := EVENT_ID.fullmatch(last)) is None:
                raise WrongField(
                    "Last-Event-ID", "is no id of an event of this server; leave it out for the whole answer"
                )
            seen = Seen(int(found[1]), int(found[2], 16), None if found[3] is None else int(found[3]))
        tenant = call.account.tenant.encode()
        return cls(_digest(32, tenant, key), seen)

    def applied(self, request: Request, number: int, seed: int | None) -> Request:
        """Return the request for the ``number``-th choice with the name of its answer, and with a seed where
        ``seed``, the client's, is None. Log probabilities and embeddings are not kept: their answers have
        no name."""
        if seed is None:
            own = int.from_bytes(_digest(8, self.digest, b"%d" % number)) >> 1
            request.sampling = replace(request.sampling, seed=own)
        if request.sampling.logprobs is None and request.prompt_logprobs is None and not request.embeds:
            asked = [u32(request.prompt_token_ids), _encoded(request.sampling), request.salt]
            asked += [request.adapter.encode()] if request.adapter else []
            request.answer_id = _digest(ANSWER_ID_BYTES, self.digest, b"%d" % number, *asked)
        return request


class Stream(Protocol):
    """What a client reads."""

    def begin(self) -> None:
        """Send its headers, once."""

    def fail(self, error: ApiError) -> None:
        """End it with an error, unless it has ended."""


class ResumableStream:
    """Between the dispatcher and the only choice of a stream, and between the choice and the client: writes
    the events' ids, and leaves out what the client has."""

    def __init__(
        self, stream: Stream, write: Callable[[bytes], None], seen: Seen | None, mark: bytes
    ) -> None:
        """``mark``: the end of each id."""
        self._stream, self._write, self._seen, self._mark = stream, write, seen or Seen(0, 0, 0), mark
        self._num_tokens = self._checksum = self._num_events = 0
        self._waiting: list[bytes] = []  # events until the next flush
        self._choice: Choice

    @property
    def is_muted(self) -> bool:
        """Whether the client has all events so far, and may have more."""
        return (self._num_tokens, self._num_events) < (self._seen.num_tokens, self._seen.num_events or 0)

    def around(self, choice: Choice) -> ResumableStream:
        """Return this, which is the sink in the choice's place."""
        self._choice = choice
        return self

    def write(self, events: bytes) -> None:
        """Take the events of a token."""
        self._waiting += self._numbered(events, all_of_token=True)

    def ending(self, events: bytes) -> bytes:
        """Return the events after the last token, as the client lacks them."""
        return b"".join(self._numbered(events, all_of_token=False))

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        before = self._choice.num_tokens
        self._choice.push(token_id, logprobs)
        if self._choice.num_tokens == before:  # a stop string has ended it already
            return
        differs = self._num_tokens == self._seen.num_tokens and self.is_muted
        self._num_tokens, self._num_events = self._num_tokens + 1, 0
        self._checksum = crc32(token_id.to_bytes(4, "little"), self._checksum)
        if differs or (self._num_tokens == self._seen.num_tokens and self._checksum != self._seen.checksum):
            self._stream.fail(AnswerDiffers())
        self._choice.flush()

    def push_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self._choice.push_prompt_logprobs(logprobs)

    def flush(self) -> None:
        if self._waiting:
            self._stream.begin()
            self._write(b"".join(self._waiting))
            self._waiting.clear()

    def end(self, ended: Ended) -> None:
        self.flush()
        if self._num_tokens < self._seen.num_tokens and ended.error is None:
            self._stream.fail(AnswerDiffers())
        self._choice.end(ended)

    def _numbered(self, events: bytes, *, all_of_token: bool) -> Iterator[bytes]:
        seen, *whole = self._seen, *events.split(b"\n\n")[:-1]
        for place, event in enumerate(whole, 1):
            self._num_events += 1
            if self._num_tokens != seen.num_tokens:
                is_seen = self._num_tokens < seen.num_tokens
            else:
                is_seen = all_of_token if seen.num_events is None else self._num_events <= seen.num_events
            if not is_seen:
                id = b"%d-%08x" % (self._num_tokens, self._checksum)
                more = b"" if all_of_token and place == len(whole) else b".%d" % self._num_events
                yield b"id: %b%b%b\n%b\n\n" % (id, more, self._mark, event)


def resumable_stream(
    key: IdempotencyKey | None, plan: RequestPlan, stream: Stream, write: Callable[[bytes], None]
) -> ResumableStream | None:
    """Return what stands around the choice; None: the events have no ids."""
    if key is None or not plan.streamed or plan.num_choices > 1:
        return None
    return ResumableStream(stream, write, key.seen, model_mark(plan.model) if plan.route else b"")


def _encoded(sampling: SamplingParams) -> bytes:
    """Return the bytes of all fields that differ from their defaults: the same ones from a build that has one
    more field, or one less."""
    default = type(sampling)(max_tokens=sampling.max_tokens)
    values = {f: getattr(sampling, f) for f in sampling.__struct_fields__}
    values["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias.items()}  # to be sorted
    named = {f: v for f, v in values.items() if f == "max_tokens" or v != getattr(default, f)}
    return msgpack.encode(named, order="sorted")


def _digest(size: int, *parts: bytes) -> bytes:
    return blake2b(b"".join(b"%d:%b" % (len(part), part) for part in parts), digest_size=size).digest()
