"""/v1/messages, as Anthropic's clients speak it: the message as it grows, its events, and the routes."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import ApiError
from ..generate.api import GenerationApi
from ..http.answers import json_response
from .chat_stream import object_of
from .messages_body import CountTokensRequest, MessagesRequest
from .routes import Dialect, Event

PATH = "/v1/messages"
STOP_REASONS = {
    "stop": "end_turn", "length": "max_tokens", "timeout": "max_tokens", "tool_calls": "tool_use",
}  # fmt: skip
PING: Event = {"type": "ping"}
DELTAS = {"text": "text_delta", "thinking": "thinking_delta", "input": "input_json_delta"}
"""By the field of a block that grows."""


class MessageAnswer:
    """One message. ``feed`` takes the chunks of the chat completion behind it."""

    def __init__(self, model_name: str) -> None:
        self.message: dict[str, Any] = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {},
        }
        self._begun = False
        self._text: list[str] = []  # of the block that grows

    def feed(self, chunk: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of one chunk."""
        if chunk.get("usage"):
            self.message["usage"] = _usage(chunk["usage"])
        if not self._begun:
            self._begun = True
            self.message["model"] = chunk.get("model", self.message["model"])  # a route's is known now
            yield {"type": "message_start", "message": {**self.message, "content": []}}
        for choice in chunk["choices"]:
            yield from self._feed_delta(choice["delta"])
            if (reason := choice["finish_reason"]) is not None:
                stop = choice.get("stop_reason")
                self.message["stop_sequence"] = stop if isinstance(stop, str) else None
                self.message["stop_reason"] = (
                    "stop_sequence" if isinstance(stop, str) else STOP_REASONS.get(reason, "end_turn")
                )

    def finish(self) -> Iterator[Event]:
        """Yield the last events."""
        yield from self._close_block()
        ended = {name: self.message[name] for name in ("stop_reason", "stop_sequence")}
        yield {"type": "message_delta", "delta": ended, "usage": self.message["usage"]}
        yield {"type": "message_stop"}

    def fail(self, error: ApiError) -> Iterator[Event]:
        """Yield the error that breaks it off."""
        yield orjson.loads(error.body_for(PATH))

    def pause(self) -> Iterator[Event]:
        """See ``Answer``."""
        if self._begun:
            yield PING

    def whole(self) -> dict[str, Any]:
        """See ``Answer``."""
        return self.message

    def _feed_delta(self, delta: dict[str, Any]) -> Iterator[Event]:
        if thought := delta.get("reasoning_content"):
            yield from self._grow({"type": "thinking", "thinking": "", "signature": ""}, "thinking", thought)
        if text := delta.get("content"):
            yield from self._grow({"type": "text", "text": ""}, "text", text)
        for call in delta.get("tool_calls", ()):
            function = call["function"]
            if "name" in function:
                yield from self._close_block()
                yield from self._open(
                    {"type": "tool_use", "id": call["id"], "name": function["name"], "input": {}}
                )
            if arguments := function.get("arguments"):
                yield self._delta("input", arguments)

    def _grow(self, empty: dict[str, Any], field: str, text: str) -> Iterator[Event]:
        """Add to the last block, or begin another one if it is of another kind."""
        content = self.message["content"]
        if not content or content[-1]["type"] != empty["type"]:
            yield from self._close_block()
            yield from self._open(empty)
        yield self._delta(field, text)

    def _open(self, block: dict[str, Any]) -> Iterator[Event]:
        self.message["content"].append(block)
        yield {"type": "content_block_start", "index": self._last, "content_block": dict(block)}

    def _delta(self, field: str, text: str) -> Event:
        self._text.append(text)
        kind = DELTAS[field]
        name = "partial_json" if field == "input" else field
        return {"type": "content_block_delta", "index": self._last, "delta": {"type": kind, name: text}}

    def _close_block(self) -> Iterator[Event]:
        if not self.message["content"]:
            return
        block, text = self.message["content"][-1], "".join(self._text)
        self._text.clear()
        if block["type"] == "tool_use":
            block["input"] = object_of(text)
        else:
            block[block["type"]] = text
        yield {"type": "content_block_stop", "index": self._last}

    @property
    def _last(self) -> int:
        return len(self.message["content"]) - 1


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Return Anthropic's counts: tokens read from the cache are not among the input tokens."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"] - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {
            "thinking_tokens": usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
        },
    }


class MessagesRoutes:
    """Creates messages, and counts the tokens of their prompts."""

    def __init__(self, generation: GenerationApi) -> None:
        self._dialect = Dialect(generation)
        self._models = generation.models

    def routes(self) -> list[Route]:
        return [
            Route(PATH, self.create, methods=["POST"]),
            Route(f"{PATH}/count_tokens", self._count_tokens, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Answer a POST. Raises ApiError."""
        asked = await self._dialect.read(request, MessagesRequest)
        stream = await self._dialect.begin(request, asked.for_chat())
        answer = MessageAnswer(self._models.shown_name(asked.model))
        return await self._dialect.respond(request, stream, answer, streamed=bool(asked.stream))

    async def _count_tokens(self, request: Request) -> Response:
        asked = await self._dialect.read(request, CountTokensRequest)
        return json_response({"input_tokens": len(await self._dialect.prompt_ids(request, asked.for_chat()))})
