"""The JSON of both generation endpoints and of embeddings: whole responses and the chunks of a stream."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import time
from typing import Any, ClassVar, Literal

import orjson

from ...transport.messages.messages import TokenLogprobs
from ..errors import Headers
from ..text.served_model import ServedModel
from .logprobs import TokenEntry, chat_logprobs, completion_logprobs, first, prompt_logprob
from .plan import RequestPlan

HEADERS_AFTER_S = 2.0
"""Seconds after which a stream without text gets its headers at the latest."""
COMMENT_EVERY_S = 15.0
"""The longest silence of a stream in seconds; one that goes on never has a comment."""
COMMENT = b": waiting\n\n"


class Silence:
    """Decides when a silent stream needs headers or a comment, so that no proxy gives it up. All times are
    monotonic seconds."""

    def __init__(self, arrival: float) -> None:
        self._arrival = self._since = arrival

    def headers_due(self, by: float) -> bool:
        """Whether the headers must be sent ``by`` then, text or not."""
        return by >= self._arrival + HEADERS_AFTER_S

    def comment_due(self, now: float, by: float, last_writes: Iterable[float]) -> bool:
        """Whether a comment must be sent ``by`` then: it is taken to be sent ``now``.

        ``last_writes``: of each choice, 0 where there was none; not looked at before a comment may be due.
        """
        if by < self._since + COMMENT_EVERY_S:
            return False
        self._since = max([self._since, *last_writes])
        if by < self._since + COMMENT_EVERY_S:
            return False
        self._since = now
        return True


Usage = dict[str, Any]
ReportedReason = Literal["stop", "length", "tool_calls", "function_call", "timeout", "error"]
DONE = b"data: [DONE]\n\n"
STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_TEXT = "\0text"
PAD_TO = 256
"""Bytes: the length of a padded chunk is a multiple."""


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
    of_prompt: orjson.Fragment | None = None  # log probabilities of the prompt's tokens
    of_vector: orjson.Fragment | float | None = None  # an embedding, or a score


class CompletionFormat:
    """/v1/completions."""

    WHOLE: ClassVar[str] = "text_completion"
    CHUNK: ClassVar[str] = "text_completion"

    def __init__(self, plan: RequestPlan, id: str, model: ServedModel) -> None:
        self._id, self._model_name = id, plan.model
        self._created = int(time())
        self._model, self._table = model, model.tokenizer.table
        self._plan = plan

    def opening(self, index: int, usage: Usage | None) -> bytes:
        """Return the chunk before a choice's first text."""
        return b""

    def prompt_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the field of a choice that has its prompt's token ids."""
        return {"prompt_token_ids": list(token_ids)}

    def chunk(
        self,
        index: int,
        part: str | dict[str, Any],
        *,
        entries: Sequence[TokenEntry] | None = None,
        finish_reason: ReportedReason | None = None,
        usage: Usage | None = None,
        more: dict[str, Any] | None = None,
    ) -> bytes:
        """Return one chunk of a stream.

        ``part``: text, or any part of a chat's message; ``usage``: only if wanted on every chunk; ``more``:
        further fields of the choice.
        """
        shown = self._shown(part, last=finish_reason is not None)
        return self._event([self._choice(index, shown, entries, finish_reason, more)], usage)

    def of_prompt(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> orjson.Fragment:
        """Return the log probabilities of a prompt's tokens, none for the first, as JSON."""
        most = self._plan.num_prompt_logprobs or 0
        after = zip(token_ids[1:], logprobs, strict=True)
        found = (prompt_logprob(token_id, first(each, most), self._table) for token_id, each in after)
        return orjson.Fragment(orjson.dumps([None, *found]))

    def of_vector(self, numbers: bytes) -> orjson.Fragment | float:
        """Return what is answered of a prompt's hidden state, or of logits. Raises ValueError."""
        raise NotImplementedError(self._plan.endpoint)

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the chunk after the last choice's last one."""
        return self._event([], usage)

    def response(self, choices: Sequence[ChoiceResult], usage: Usage) -> bytes:
        """Return the whole response, not streamed."""
        whole = [
            self._choice(c.index, self._whole(c), c.entries, c.finish_reason, self._more(c)) for c in choices
        ]
        answer = {**self._head(self.WHOLE), "choices": whole, "usage": usage, **self._of_prompt(choices)}
        if self._plan.service_tier is not None:
            answer["service_tier"] = self._plan.service_tier
        return orjson.dumps(answer)

    def around_text(self, index: int) -> tuple[bytes, bytes]:
        """Return a plain chunk before and after its text: the hot path encodes only the text itself."""
        head, tail = self.chunk(index, _TEXT).split(orjson.dumps(_TEXT))
        return head, tail

    def _choice(
        self,
        index: int,
        shown: dict[str, Any],
        entries: Sequence[TokenEntry] | None,
        finish_reason: ReportedReason | None,
        more: dict[str, Any] | None,
    ) -> dict[str, Any]:
        logprobs = None if entries is None else self._logprobs(entries)
        choice = {"index": index, **shown, "logprobs": logprobs, "finish_reason": finish_reason}
        return choice if more is None else {**choice, **more}

    def _event(self, choices: list[dict[str, Any]], usage: Usage | None, **more: Any) -> bytes:
        plan, chunk = self._plan, {**self._head(self.CHUNK), "choices": choices, **more}
        if plan.include_usage:
            chunk["usage"] = usage
        if plan.service_tier is not None:
            chunk["service_tier"] = plan.service_tier
        if plan.padded:
            chunk["obfuscation"] = ""
            chunk["obfuscation"] = _padding(len(orjson.dumps(chunk)))
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": self._created, "model": self._model_name}

    # --- what differs between the endpoints --------------------------------------------------------

    def _more(self, choice: ChoiceResult) -> dict[str, Any] | None:
        """Return further fields of a choice."""
        return {**(choice.more or {}), **_prompt_logprobs(choice)}

    def _of_prompt(self, choices: Sequence[ChoiceResult]) -> dict[str, Any]:
        """Return the fields of a response that are about its prompt."""
        return {}

    def _shown(self, part: str | dict[str, Any], *, last: bool) -> dict[str, Any]:
        return {"text": part}

    def _whole(self, choice: ChoiceResult) -> dict[str, Any]:
        return {"text": choice.text}

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return completion_logprobs(entries, self._table, self._plan.tokens_as_ids)


class ChatFormat(CompletionFormat):
    """/v1/chat/completions."""

    WHOLE: ClassVar[str] = "chat.completion"
    CHUNK: ClassVar[str] = "chat.completion.chunk"

    def opening(self, index: int, usage: Usage | None) -> bytes:
        shown = self._shown({"role": "assistant", "content": ""}, last=False)
        return self._event([self._choice(index, shown, None, None, None)], usage, **self._of_prompt(()))

    def prompt_ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """None: the response has them, or the first chunk of a choice; see ``_of_prompt``."""
        return {}

    def _more(self, choice: ChoiceResult) -> dict[str, Any] | None:
        return choice.more

    def _of_prompt(self, choices: Sequence[ChoiceResult]) -> dict[str, Any]:
        logprobs = _prompt_logprobs(choices[0]) if choices else {}
        wanted = self._plan.return_token_ids
        ids = {"prompt_token_ids": list(self._plan.prompts[0].shown_ids)} if wanted else {}
        return {**logprobs, **ids}

    def _shown(self, part: str | dict[str, Any], *, last: bool) -> dict[str, Any]:
        if isinstance(part, str):
            part = {"content": part} if part or not last else {}
        return {"delta": part}

    def _whole(self, choice: ChoiceResult) -> dict[str, Any]:
        content = choice.text if choice.text or not (choice.tool_calls or choice.function_call) else None
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if choice.reasoning is not None:
            message["reasoning_content"] = message["reasoning"] = choice.reasoning
        if choice.tool_calls:
            message["tool_calls"] = choice.tool_calls
        if choice.function_call is not None:
            message["function_call"] = choice.function_call
        return {"message": message}

    def _logprobs(self, entries: Sequence[TokenEntry]) -> dict[str, Any]:
        return chat_logprobs(entries, self._table, self._plan.tokens_as_ids)


def error_event(body: bytes) -> bytes:
    """Return an error as a stream's event."""
    return b"data: " + body + b"\n\n"


def _prompt_logprobs(choice: ChoiceResult) -> dict[str, Any]:
    return {} if choice.of_prompt is None else {"prompt_logprobs": choice.of_prompt}


def _padding(num_bytes: int) -> str:
    """Return what pads ``num_bytes`` to a multiple of PAD_TO: random, so that it does not compress."""
    return secrets.token_urlsafe(PAD_TO)[: -num_bytes % PAD_TO]
