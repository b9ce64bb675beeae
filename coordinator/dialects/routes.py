"""What the endpoints of other APIs share: from a body to a chat completion, and its events back."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ..errors import ApiError, WrongField
from ..generate.api import GenerationApi
from ..generate.bodies.fields import Body, UnknownFields
from ..generate.conversation import LAST_ID_HEADER, model_for
from ..generate.plan import parse_generating
from ..generate.prompts import prompts_of
from ..http.answers import account_of
from ..http.body import check_is_json, held_body
from ..http.call import Endpoint
from ..http.limits import LARGE_BODY_BYTES
from ..text.served_model import ServedModel
from ..validation import validated
from .chat_stream import ChatStream, while_connected

Event = dict[str, Any]
Asked = TypeVar("Asked", bound=Body)
CHAT: Endpoint = "/v1/chat/completions"
EVENT_STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}


class Answer(Protocol):
    """An API's answer, as it grows with the chunks of a chat completion."""

    def feed(self, chunk: dict[str, Any]) -> Iterator[Event]:
        """Yield the events of one chunk."""

    def finish(self) -> Iterator[Event]:
        """Yield the last events: the completion is whole."""

    def fail(self, error: ApiError) -> Iterator[Event]:
        """Yield the last events of one that has broken off."""

    def pause(self) -> Iterator[Event]:
        """Yield what keeps the connection open where no chunk has come for a while."""

    def whole(self) -> dict[str, Any]:
        """Return the answer without its events."""


class Framing(NamedTuple):
    """The form of a stream's events, and what a request's headers must show."""

    media_type: str
    encode: Callable[[AsyncIterator[Event]], AsyncIterator[bytes]]
    check_source: Callable[[Mapping[bytes, bytes]], None] = check_is_json


class Dialect:
    """Reads bodies and writes answers."""

    def __init__(
        self,
        generation: GenerationApi,
        params: Mapping[str, str] | None = None,
        framing: Framing | None = None,
    ) -> None:
        """``params``: this API's names of a chat's fields, for errors. ``framing``: server-sent events unless
        given."""
        self.generation, self._params = generation, params or {}
        self._framing = framing or Framing("text/event-stream", encoded)
        self._unknown = UnknownFields()

    async def read(self, request: Request, kind: type[Asked]) -> Asked:
        """Return the body as ``kind``; the reader process validates large ones. Raises ApiError."""
        headers, limits = dict(request.scope["headers"]), self.generation.limits
        if LAST_ID_HEADER in headers:
            raise WrongField("Last-Event-ID", "events have no ids here; leave it out for the whole answer")
        bounds = limits.max_body_bytes, self.generation.overload
        async with held_body(headers, request.receive, *bounds, self._framing.check_source) as body:
            if len(body) > LARGE_BODY_BYTES:
                asked: Asked = await self.generation.reader.read("validate", body, kind)
            else:
                asked = validated(kind, body)
        self._unknown.note(asked.unknown_fields())
        return asked

    async def begin(
        self, request: Request, chat: dict[str, Any], endpoint: Endpoint = CHAT, prefers: str = ""
    ) -> ChatStream:
        """Ask for the completion; return once its first chunk is there. ``prefers``: see ``Call``. Raises
        ApiError or ClientGone."""
        headers = dict(request.scope["headers"])
        stream = ChatStream(self.generation, account_of(request), headers, chat, endpoint, prefers)
        try:
            await while_connected(request, stream.begin())
        except ApiError as error:
            raise self._renamed(error) from error
        except BaseException:
            stream.abandon()
            raise
        return stream

    def model_of(
        self, request: Request, body: dict[str, Any], endpoint: Endpoint = CHAT, prefers: str = ""
    ) -> ServedModel:
        """Return the model that a completion's body is for. Raises as ``ServedModels.of``."""
        models, name = self.generation.models, body.get("model")
        if name not in models.routes:
            return models.of(name)
        asked = parse_generating(endpoint, orjson.dumps(body))
        return model_for(models, asked, dict(request.scope["headers"]), prefers)

    async def prompt_ids(
        self, request: Request, body: dict[str, Any], endpoint: Endpoint = CHAT
    ) -> Sequence[int]:
        """Return the tokens of the one prompt of a completion's body. Raises InvalidRequest."""
        data, model = orjson.dumps(body), self.model_of(request, body, endpoint)
        (prompt,) = await model.tokenizer.aside(lambda: prompts_of(parse_generating(endpoint, data), model))
        return prompt.token_ids

    def _renamed(self, error: ApiError) -> ApiError:
        """Name the field at fault as this API does."""
        theirs = (error.param or "").split("[")[0].split(".")[0]
        if (name := self._params.get(theirs)) is not None:
            error.message, error.param = error.message.replace(theirs, name, 1), name
        return error

    async def respond(
        self, request: Request, stream: ChatStream, answer: Answer, *, streamed: bool
    ) -> Response:
        """Return the response: the answer's events as they come, or the whole answer."""
        if streamed:
            media_type, encode, _ = self._framing
            events = encode(events_of(stream, answer))
            return StreamingResponse(events, 200, {**stream.headers, **EVENT_STREAM}, media_type)
        await while_connected(request, read_whole(stream, answer))
        return Response(orjson.dumps(answer.whole()), 200, stream.headers, "application/json")


async def events_of(stream: ChatStream, answer: Answer) -> AsyncIterator[Event]:
    """Yield all events; cancel the chat completion if they are not read to their end."""
    try:
        try:
            async for chunk in stream.chunks():
                for event in answer.pause() if chunk is None else answer.feed(chunk):
                    yield event
        except ApiError as error:
            for event in answer.fail(error):
                yield event
        else:
            for event in answer.finish():
                yield event
    finally:
        stream.abandon()


async def encoded(events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """Yield the events as server-sent ones."""
    async for event in events:
        yield b"event: %b\ndata: %b\n\n" % (event["type"].encode(), orjson.dumps(event))


async def read_whole(stream: ChatStream, answer: Answer) -> None:
    """Read the chat completion to its end. Raises ApiError where it breaks off."""
    try:
        async for chunk in stream.chunks():
            if chunk is not None:
                for _ in answer.feed(chunk):
                    pass
        for _ in answer.finish():
            pass
    finally:
        stream.abandon()
