"""A client with an idempotency key has its answer resumed, by whichever coordinator it comes to.

The key, the tenant, the prompt and the sampling name the answer: a decode worker that keeps it is found by
that name. The key is also the seed where the client gave none, so that an answer that is computed anew is the
same one. Each event of a stream with one choice has an id, ``NUM_TOKENS-CHECKSUM`` of the tokens so far: by
the id that a client saw last, it gets the rest alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

from msgspec import msgpack
from msgspec.structs import replace

from ...transport.messages.messages import ANSWER_ID_BYTES, TokenLogprobs, u32
from ..errors import AnswerDiffers, ApiError, InvalidRequest
from ..http.call import Call
from ..lifecycle.request import Ended, Request, Sink
from .plan import RequestPlan

KEY_HEADER, LAST_ID_HEADER = b"idempotency-key", b"last-event-id"
KEY = re.compile(rb"[!-~]{1,255}")
EVENT_ID = re.compile(rb"(\d{1,9})-([0-9a-f]{8})")


class Seen(NamedTuple):
    """What a client has of a stream: ``checksum`` is that of its first ``num_tokens`` tokens."""

    num_tokens: int
    checksum: int


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
            message = "Idempotency-Key: has to be 1 to 255 visible ASCII characters, without spaces"
            raise InvalidRequest(message, param="Idempotency-Key")
        seen = None
        if (last := call.headers.get(LAST_ID_HEADER)) is not None:
            if (found := EVENT_ID.fullmatch(last)) is None:
                message = (
                    "Last-Event-ID: is no id of an event of this server; leave it out for the whole answer"
                )
                raise InvalidRequest(message, param="Last-Event-ID")
            seen = Seen(int(found[1]), int(found[2], 16))
        tenant = call.account.tenant.encode()
        return cls(_digest(32, tenant, key), seen)

    def applied(self, request: Request, number: int, seed: int | None) -> Request:
        """Return the request for the ``number``-th choice with the name of its answer, and with a seed where
        ``seed``, the client's, is None. An answer with log probabilities is not kept, and has no name."""
        if seed is None:
            own = int.from_bytes(_digest(8, self.digest, b"%d" % number)) >> 1
            request.sampling = replace(request.sampling, seed=own)
        if request.sampling.logprobs is None and request.prompt_logprobs is None:
            asked = (u32(request.prompt_token_ids), msgpack.encode(request.sampling), request.salt)
            request.answer_id = _digest(ANSWER_ID_BYTES, self.digest, b"%d" % number, *asked)
        return request


class ResumableStream:
    """Between the dispatcher and the only choice of a stream, and between the choice and the client: writes
    the events' ids, and leaves out what the client has."""

    def __init__(
        self, write: Callable[[bytes], None], fail: Callable[[ApiError], None], seen: Seen | None
    ) -> None:
        self._write, self._fail, self._seen = write, fail, seen or Seen(0, 0)
        self._is_muted = self._seen.num_tokens > 0
        self._num_tokens = self._checksum = 0
        self._choice: Sink

    def around(self, choice: Sink) -> ResumableStream:
        """Return this, which is the sink in the choice's place."""
        self._choice = choice
        return self

    def write(self, events: bytes) -> None:
        """Write events to the client; the last one gets the id."""
        if not self._is_muted:
            last = events.rfind(b"\n\n", 0, -2) + 2 if b"\n\n" in events[:-2] else 0
            id = b"id: %d-%08x\n" % (self._num_tokens, self._checksum)
            self._write(events[:last] + id + events[last:])

    def push(self, token_id: int, logprobs: TokenLogprobs | None) -> None:
        self._num_tokens += 1
        self._checksum = crc32(token_id.to_bytes(4, "little"), self._checksum)
        self._choice.push(token_id, logprobs)
        if self._num_tokens == self._seen.num_tokens:
            if self._checksum != self._seen.checksum:
                self._fail(AnswerDiffers())
            self._choice.flush()
            self._is_muted = False

    def push_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        self._choice.push_prompt_logprobs(logprobs)

    def flush(self) -> None:
        if not self._is_muted:
            self._choice.flush()

    def end(self, ended: Ended) -> None:
        if self._is_muted and ended.error is None:
            self._fail(AnswerDiffers())
        self._choice.end(ended)


def resumable_stream(
    key: IdempotencyKey | None,
    plan: RequestPlan,
    write: Callable[[bytes], None],
    fail: Callable[[ApiError], None],
) -> ResumableStream | None:
    """Return what stands around the choice; None: the events have no ids."""
    if key is None or not plan.streamed or plan.num_choices > 1:
        return None
    return ResumableStream(write, fail, key.seen)


def _digest(size: int, *parts: bytes) -> bytes:
    return blake2b(b"".join(b"%d:%b" % (len(part), part) for part in parts), digest_size=size).digest()
