"""The JSON of both generation endpoints: whole responses and the chunks of a stream."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from time import time
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import orjson

from ...transport.messages.messages import TokenLogprobs
from ..text.served_model import ServedModel
from ..text.token_table import TokenTable
from ..text.tokenizer import Tokenizer
from .plan import RequestPlan

Usage = dict[str, Any]
ReportedReason = Literal["stop", "length", "tool_calls", "function_call", "timeout", "error"]
DONE = b"data: [DONE]\n\n"
_TEXT = "\0text"
PAD_TO = 256
"""Bytes: the length of a padded chunk is a multiple."""
SMALLEST_LOGPROB = -9999.0


class TokenEntry(NamedTuple):
    """One token. ``offset`` is the number of characters before it; ``logprobs`` is None for a prompt's first
    token."""

    token_id: int
    logprobs: TokenLogprobs | None
    offset: int


@dataclass(slots=True)
class ChoiceResult:
    """One choice as it ended."""

    index: int
    text: str
    entries: Sequence[TokenEntry] | None
    finish_reason: ReportedReason
    tool_calls: Sequence[dict[str, Any]] = ()
    function_call: dict[str, Any] | None = None
    reasoning: str | None = None
    more: dict[str, Any] | None = None  # further fields of the choice


class Format(Protocol):
    """What differs between the two endpoints."""

    def opening(self, index: int) -> bytes:
        """The chunk before a choice's first text."""

    def chunk(
        self,
        index: int,
        text: str,
        *,
        entries: Sequence[TokenEntry] | None = None,
        finish_reason: ReportedReason | None = None,
        usage: Usage | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        """One chunk of a stream. ``usage`` only where the client asked for it on every chunk; ``more``:
        further fields of the choice."""

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk after the last choice's last."""

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """The whole response, not streamed."""


class _Envelope:
    __slots__ = ("created", "id", "include_usage", "model", "padded", "service_tier", "tokenizer")

    def __init__(
        self,
        id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        include_usage: bool,
        service_tier: str | None = None,
        *,
        padded: bool = False,
    ) -> None:
        self.id = id
        self.created = created  # seconds since 1970
        self.model = model
        self.tokenizer = tokenizer
        self.include_usage = include_usage
        self.service_tier = service_tier  # told where one was asked for
        self.padded = padded  # chunks: who sees only their lengths learns little of what they say

    def event(self, kind: str, choices: list[Any], usage: Usage | None) -> bytes:
        chunk = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }
        if self.include_usage:
            chunk["usage"] = usage
        if self.service_tier is not None:
            chunk["service_tier"] = self.service_tier
        if self.padded:
            chunk["obfuscation"] = ""
            chunk["obfuscation"] = _padding(len(orjson.dumps(chunk)))
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def body(self, kind: str, choices: list[Any], usage: Usage) -> bytes:
        answer = {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "usage": usage,
        }
        if self.service_tier is not None:
            answer["service_tier"] = self.service_tier
        return orjson.dumps(answer)


class CompletionFormat(_Envelope):
    """/v1/completions."""

    __slots__ = ()

    KIND: ClassVar[str] = "text_completion"

    def opening(self, index: int) -> bytes:
        return b""

    def chunk(
        self,
        index: int,
        text: str,
        *,
        entries: Sequence[TokenEntry] | None = None,
        finish_reason: ReportedReason | None = None,
        usage: Usage | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        return self.event(
            self.KIND, [{**self._choice(index, text, entries, finish_reason), **(more or {})}], usage
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        return self.event(self.KIND, [], usage)

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
        return self.body(
            self.KIND,
            [
                {**self._choice(c.index, c.text, c.entries, c.finish_reason), **(c.more or {})}
                for c in choices
            ],
            usage,
        )

    def _choice(
        self,
        index: int,
        text: str,
        entries: Sequence[TokenEntry] | None,
        finish_reason: ReportedReason | None,
    ) -> dict[str, Any]:
        logprobs = None if entries is None else completion_logprobs(entries, self.tokenizer.table)
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class ChatFormat(_Envelope):
    """/v1/chat/completions."""

    __slots__ = ()

    KIND: ClassVar[str] = "chat.completion"
    CHUNK: ClassVar[str] = "chat.completion.chunk"

    def opening(self, index: int) -> bytes:
        return self.event(
            self.CHUNK, [self._choice(index, {"role": "assistant", "content": ""}, None, None)], None
        )

    def chunk(
        self,
        index: int,
        text: str,
        *,
        entries: Sequence[TokenEntry] | None = None,
        finish_reason: ReportedReason | None = None,
        usage: Usage | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        delta = {"content": text} if text or finish_reason is None else {}
        return self.delta_chunk(
            index, delta, entries=entries, finish_reason=finish_reason, usage=usage, more=more
        )

    def delta_chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        entries: Sequence[TokenEntry] | None = None,
        finish_reason: ReportedReason | None = None,
        usage: Usage | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        """A chunk with any part of a message."""
        return self.event(
            self.CHUNK, [{**self._choice(index, delta, entries, finish_reason), **(more or {})}], usage
        )

    def usage_chunk(self, usage: Usage) -> bytes:
        return self.event(self.CHUNK, [], usage)

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
        return self.body(self.KIND, [self._whole(choice) for choice in choices], usage)

    def _choice(
        self,
        index: int,
        delta: dict[str, Any],
        entries: Sequence[TokenEntry] | None,
        finish_reason: ReportedReason | None,
    ) -> dict[str, Any]:
        logprobs = None if entries is None else chat_logprobs(entries, self.tokenizer.table)
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _whole(self, choice: ChoiceResult) -> dict[str, Any]:
        logprobs = None if choice.entries is None else chat_logprobs(choice.entries, self.tokenizer.table)
        content = choice.text if choice.text or not (choice.tool_calls or choice.function_call) else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning is not None:
            message["reasoning_content"] = choice.reasoning
        if choice.tool_calls:
            message["tool_calls"] = choice.tool_calls
        if choice.function_call is not None:
            message["function_call"] = choice.function_call
        whole = {
            "index": choice.index,
            "message": message,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
        }
        return {**whole, **(choice.more or {})}


def format_of(plan: RequestPlan, id: str, model: ServedModel) -> Format:
    """Return the format of the plan's endpoint, for the response with this id."""
    kind = ChatFormat if plan.endpoint == "/v1/chat/completions" else CompletionFormat
    return kind(
        id,
        int(time()),
        model.name,
        model.tokenizer,
        plan.include_usage,
        plan.service_tier,
        padded=plan.padded,
    )


def around_text(form: Format, index: int) -> tuple[bytes, bytes]:
    """A plain chunk of this choice before and after its text: on the hot path only the text itself is
    encoded."""
    head, tail = form.chunk(index, _TEXT).split(orjson.dumps(_TEXT))
    return head, tail


def error_event(body: bytes) -> bytes:
    """An error after the stream has begun."""
    return b"data: " + body + b"\n\n"


def _padding(num_bytes: int) -> str:
    """What brings so many bytes to the next multiple of PAD_TO: random, so that compression takes nothing
    off."""
    return secrets.token_urlsafe(PAD_TO)[: -num_bytes % PAD_TO]


def completion_logprobs(entries: Sequence[TokenEntry], table: TokenTable) -> dict[str, Any]:
    """Four lists of equal length."""
    return {
        "tokens": [_text(entry.token_id, table) for entry in entries],
        "token_logprobs": [
            None if entry.logprobs is None else _finite(entry.logprobs.logprob) for entry in entries
        ],
        "top_logprobs": [
            None if entry.logprobs is None else _top(entry.token_id, entry.logprobs, table)
            for entry in entries
        ],
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(entries: Sequence[TokenEntry], table: TokenTable) -> dict[str, Any]:
    """A list of tokens, each with its bytes and its alternatives."""
    content = []
    for entry in entries:
        assert entry.logprobs is not None
        alternatives = zip(entry.logprobs.top_ids, entry.logprobs.top_logprobs, strict=True)
        top = [_chat_token(token_id, logprob, table) for token_id, logprob in alternatives]
        content.append({**_chat_token(entry.token_id, entry.logprobs.logprob, table), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, table: TokenTable) -> dict[str, Any]:
    return {
        "token": _text(token_id, table),
        "logprob": _finite(logprob),
        "bytes": list(table.token_bytes(token_id)),
    }


def _top(token_id: int, logprobs: TokenLogprobs, table: TokenTable) -> dict[str, float]:
    """The alternatives and the token itself. Of two ids with the same text the likelier one stays."""
    top: dict[str, float] = {}
    for other_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
        top.setdefault(_text(other_id, table), _finite(logprob))
    top.setdefault(_text(token_id, table), _finite(logprobs.logprob))
    return top


def _text(token_id: int, table: TokenTable) -> str:
    return table.token_bytes(token_id).decode(errors="replace")


def _finite(logprob: float) -> float:
    return max(logprob, SMALLEST_LOGPROB) if not math.isnan(logprob) else SMALLEST_LOGPROB
