"""/v1/messages, as Anthropic's clients speak it."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..generate.api import GenerationApi
from ..http.answers import json_response
from .messages_body import CountTokensRequest, MessagesRequest
from .messages_events import MessageAnswer
from .routes import Dialect


class MessagesRoutes:
    """Creates messages, and counts the tokens of their prompts."""

    def __init__(self, generation: GenerationApi) -> None:
        self._dialect = Dialect(generation)
        self._model = generation.model

    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        """Answer a POST. Raises ApiError."""
        asked = await self._dialect.read(request, MessagesRequest)
        stream = await self._dialect.begin(request, asked.for_chat())
        answer = MessageAnswer(self._model.name)
        return await self._dialect.respond(request, stream, answer, streamed=bool(asked.stream))

    async def _count_tokens(self, request: Request) -> Response:
        asked = await self._dialect.read(request, CountTokensRequest)
        self._model.check_name(asked.model)
        return json_response({"input_tokens": len(await self._dialect.prompt_ids(asked.for_chat()))})
