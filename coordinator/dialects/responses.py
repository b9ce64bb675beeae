"""/v1/responses, as OpenAI's newer clients speak it."""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ..errors import ContextTooLong, InvalidRequest, NotFound, StorageFull, Unavailable, WrongField
from ..generate.api import GenerationApi
from ..generate.plan import parse_generating
from ..generate.prompts import prompts_of
from ..http.answers import account_of, json_response, limit_of, page_response
from ..http.call import Endpoint
from ..stored_bytes import StorageLimitReached
from ..tenants.settings import REDIS_URL
from ..text.served_model import ServedModel
from .background_responses import BackgroundResponses
from .chat_stream import while_connected
from .responses_body import CHAT_PARAMS, CountInputRequest, ResponsesRequest
from .responses_events import FINAL, ResponseAnswer
from .responses_items import Item, items_of
from .responses_store import SqliteResponses
from .routes import EVENT_STREAM, Dialect, Event, encoded, events_of, read_whole
from .stored_response import ResponseStore

PAGE, MAX_PAGE = 20, 100
CHAT: Endpoint = "/v1/chat/completions"


class ResponsesRoutes:
    """Creates, continues and returns responses."""

    def __init__(self, generation: GenerationApi, store: ResponseStore | None) -> None:
        """``store``: None where there is none; then nothing can be continued."""
        self._dialect = Dialect(generation, CHAT_PARAMS)
        self._models, self._limits = generation.models, generation.limits
        self._store = store
        self.background = BackgroundResponses(self._dialect, store)

    def routes(self) -> list[Route]:
        one = "/v1/responses/{id}"
        return [
            Route("/v1/responses", self.create, methods=["POST"]),
            Route("/v1/responses", self._list),
            Route("/v1/responses/input_tokens", self._count, methods=["POST"]),
            Route(one, self._one),
            Route(one, self._delete, methods=["DELETE"]),
            Route(f"{one}/cancel", self._cancel, methods=["POST"]),
            Route(f"{one}/input_items", self._input_items),
        ]

    async def stop(self) -> None:
        """End what runs in the background, and close the store."""
        await self.background.stop()
        if self._store is not None:
            await self._store.close()

    async def create(self, request: Request) -> Response:
        """Answer a POST. Raises ApiError."""
        asked = await self._dialect.read(request, ResponsesRequest)
        prefers = await self._answered_before(request, asked)
        items, chat = await self._chat_of(request, asked, prefers)
        name = self._models.shown_name(asked.model)
        answer = ResponseAnswer(f"resp_{secrets.token_hex(24)}", asked, name)
        if self._store is None:
            answer.response["store"] = False
        if asked.background:
            return await self.background.begin(
                request, chat, answer, items, prefers, streamed=bool(asked.stream)
            )
        stream = await self._dialect.begin(request, chat, prefers=prefers)
        if not asked.stream:
            await while_connected(request, read_whole(stream, answer))
            await self._save(request, answer, items)
            return Response(orjson.dumps(answer.whole()), 200, stream.headers, "application/json")
        events = self._saved(request, answer, items, events_of(stream, answer))
        return StreamingResponse(
            encoded(events), 200, {**stream.headers, **EVENT_STREAM}, "text/event-stream"
        )

    async def _count(self, request: Request) -> Response:
        asked = await self._dialect.read(request, CountInputRequest)
        prefers = await self._answered_before(request, asked)
        _, chat = await self._chat_of(request, asked, prefers)
        model = self._dialect.model_of(request, chat, prefers=prefers)
        count = await model.tokenizer.aside(lambda: _num_tokens(chat, model))
        return json_response({"object": "response.input_tokens", "input_tokens": count})

    async def _list(self, request: Request) -> Response:
        limit = limit_of(request, PAGE, MAX_PAGE)
        store, after = self._stored_ones("after"), request.query_params.get("after")
        found, more = await store.newest(account_of(request).tenant, after, limit)
        return page_response(found, more=more)

    async def _one(self, request: Request) -> Response:
        id, store = request.path_params["id"], self._stored_ones("response_id")
        stored = await store.found(account_of(request).tenant, id)
        if request.query_params.get("stream") != "true":
            return json_response(stored.response)
        after = request.query_params.get("starting_after", "-1")
        if not after.removeprefix("-").isdecimal() or len(after) > 9:
            raise WrongField("starting_after", "must be the number of an event")
        return self.background.resume(account_of(request).tenant, stored, int(after))

    async def _delete(self, request: Request) -> Response:
        id = request.path_params["id"]
        await self._stored_ones("response_id").delete(account_of(request).tenant, id)
        return json_response({"id": id, "object": "response", "deleted": True})

    async def _cancel(self, request: Request) -> Response:
        store, tenant = self._stored_ones("response_id"), account_of(request).tenant
        id = request.path_params["id"]
        if not (await store.found(tenant, id)).response["background"]:
            raise InvalidRequest("Only a response that runs in the background can be cancelled.")
        stored = await store.cancel(tenant, id)
        self.background.look(id)
        return json_response(stored.response)

    async def _input_items(self, request: Request) -> Response:
        limit, after = limit_of(request, PAGE, MAX_PAGE), request.query_params.get("after")
        store = self._stored_ones("response_id")
        items = (await store.found(account_of(request).tenant, request.path_params["id"])).input
        if request.query_params.get("order", "desc") == "desc":
            items = items[::-1]
        if after is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise NotFound(f"after: there is no item {after!r}", param="after")
            items = items[ids.index(after) + 1 :]
        return page_response(items[:limit], more=len(items) > limit)

    # --- a request's conversation ------------------------------------------------------------------

    async def _answered_before(self, request: Request, asked: CountInputRequest) -> str:
        """Return the model of the response that a route's request continues; empty: it continues none.
        Raises NotFound."""
        if (previous := asked.previous_response_id) is None or asked.model not in self._models.routes:
            return ""
        stored = await self._stored_ones("previous_response_id").found(account_of(request).tenant, previous)
        return str(stored.response["model"])

    async def _chat_of(
        self, request: Request, asked: CountInputRequest, prefers: str
    ) -> tuple[list[Item], dict[str, Any]]:
        """Return the new items and the chat completion's body. Raises InvalidRequest or NotFound."""
        tenant, earlier = account_of(request).tenant, list[Item]()
        if (previous := asked.previous_response_id) is not None:
            earlier = await self._stored_ones("previous_response_id").conversation(tenant, previous)
        items = await self._resolved(tenant, items_of(asked.input or []), earlier)
        chat = asked.for_chat([*earlier, *items])
        if asked.truncation == "auto":
            model = self._dialect.model_of(request, chat, prefers=prefers)
            every = [*earlier, *items]
            chat = await model.tokenizer.aside(lambda: _shortened(asked, every, chat, model))
        return items, chat

    async def _resolved(self, tenant: str, items: list[Item], earlier: Sequence[Item]) -> list[Item]:
        """Put items in the place of references to them."""
        wanted = dict.fromkeys(item["id"] for item in items if item["type"] == "item_reference")
        if not wanted:
            return items
        found = {item["id"]: item for item in earlier if item["id"] in wanted}
        if missing := [id for id in wanted if id not in found]:
            found |= await self._stored_ones("input").items(tenant, missing)
        for i, item in enumerate(items):
            if item["type"] == "item_reference" and item["id"] not in found:
                raise NotFound(
                    f"input[{i}].id: there is no stored item {item['id']!r}", param=f"input[{i}].id"
                )
        return [found[item["id"]] if item["type"] == "item_reference" else item for item in items]

    # --- storing -----------------------------------------------------------------------------------

    def _stored_ones(self, param: str) -> ResponseStore:
        if self._store is None:
            raise WrongField(param, "this server stores no responses; give --responses-file")
        return self._store

    async def _save(self, request: Request, answer: ResponseAnswer, items: Sequence[Item]) -> None:
        if self._store is not None and answer.response["store"]:
            account = account_of(request)
            try:
                await self._store.save(
                    account.tenant, answer.response, items, max_bytes=account.max_stored_bytes
                )
            except (StorageFull, StorageLimitReached, Unavailable):  # the answer is worth more than its copy
                answer.response["store"] = False

    async def _saved(
        self, request: Request, answer: ResponseAnswer, items: Sequence[Item], events: AsyncIterator[Event]
    ) -> AsyncIterator[Event]:
        """Yield the events; store the response before the last one, so that it can be continued at once."""
        async for event in events:
            if event["type"] in FINAL:
                await self._save(request, answer, items)
            yield event


def opened_store(where: str | None, keep_s: float) -> ResponseStore | None:
    """Open the file or the Redis URL; None without either. Raises as ``SqliteResponses``, or CannotStart."""
    if where is None:
        return None
    if re.match(REDIS_URL, where):
        from .redis_responses import RedisResponses  # needs the extra `redis`

        return RedisResponses(where, keep_s)
    return SqliteResponses(Path(where), keep_s)


def _shortened(
    asked: CountInputRequest, items: Sequence[Item], chat: dict[str, Any], model: ServedModel
) -> dict[str, Any]:
    """Leave out the oldest items, half of them at a time, until the others fit the context."""
    room = model.max_model_len - (chat.get("max_completion_tokens") or 1)
    while _num_tokens(chat, model) > room and len(items) > 1:
        items = items[(len(items) + 1) // 2 :]
        chat = asked.for_chat(items)
    return chat


def _num_tokens(chat: dict[str, Any], model: ServedModel) -> int:
    """Count the prompt's tokens; one more than the model takes where it is longer. Blocks."""
    body = orjson.dumps({name: value for name, value in chat.items() if value is not None})
    try:
        (prompt,) = prompts_of(parse_generating(CHAT, body), model)
    except ContextTooLong:
        return model.max_model_len + 1
    return len(prompt.token_ids)
