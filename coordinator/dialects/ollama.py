"""Ollama's API, behind --ollama: /api/chat and /api/generate over chat completions, and what names the model.

Their streams are lines of JSON. https://docs.ollama.com/api
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Annotated, Any

import orjson
from pydantic import Field, model_validator
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..generate.api import GenerationApi
from ..generate.bodies.fields import Body
from ..http.answers import json_response
from ..http.body import check_is_own
from ..http.call import Endpoint
from .ollama_answer import OllamaAnswer
from .ollama_body import LATEST, OllamaChatRequest, OllamaGenerateRequest, OllamaRequest
from .routes import CHAT, Dialect, Event, Framing

API_VERSION = "0.12.11"
"""The release of Ollama whose API this is: clients compare it to decide what they may send."""
COMPLETIONS: Endpoint = "/v1/completions"
NEVER = "9999-12-31T23:59:59Z"
CHAT_PARAMS = {"max_completion_tokens": "options.num_predict", "response_format": "format"}
"""A chat's fields that have another name here."""


class ShowRequest(Body):
    """POST /api/show."""

    model: Annotated[str, Field(max_length=512)]
    name: Annotated[str, Field(max_length=512)] | None = None
    """What older clients call ``model``."""
    verbose: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        return {"model": value["name"], **value} if isinstance(value, dict) and "name" in value else value


class OllamaRoutes:
    """Answers chats and prompts, and describes the one model there is."""

    def __init__(self, generation: GenerationApi) -> None:
        framing = Framing("application/x-ndjson", lines_of, check_is_own)
        self._dialect = Dialect(generation, CHAT_PARAMS, framing)
        self._model = generation.model

    def routes(self) -> list[Route]:
        return [
            Route("/api/chat", self._chat, methods=["POST"]),
            Route("/api/generate", self._generate, methods=["POST"]),
            Route("/api/show", self._show, methods=["POST"]),
            Route("/api/tags", self._tags),
            Route("/api/ps", self._loaded),
            Route("/api/version", self._version),
        ]

    async def _chat(self, request: Request) -> Response:
        asked = await self._dialect.read(request, OllamaChatRequest)
        answer = OllamaAnswer(asked.model, generates=False)
        if not asked.messages:
            return self._load(asked, answer)
        return await self._respond(request, asked, self._bounded(asked.for_chat()), answer)

    async def _generate(self, request: Request) -> Response:
        asked = await self._dialect.read(request, OllamaGenerateRequest)
        answer = OllamaAnswer(asked.model, generates=True)
        if not asked.prompt:
            return self._load(asked, answer)
        body = await self._raw(asked) if asked.raw else self._bounded(asked.for_chat())
        return await self._respond(request, asked, body, answer)

    async def _respond(
        self, request: Request, asked: OllamaRequest, body: dict[str, Any], answer: OllamaAnswer
    ) -> Response:
        stream = await self._dialect.begin(request, body, COMPLETIONS if "prompt" in body else CHAT)
        return await self._dialect.respond(request, stream, answer, streamed=asked.stream is not False)

    def _load(self, asked: OllamaRequest, answer: OllamaAnswer) -> Response:
        """Answer a request that only wants the model loaded."""
        self._check_name(asked.model)
        return json_response(answer.loaded())

    def _bounded(self, chat: dict[str, Any]) -> dict[str, Any]:
        """Drop a bound of new tokens that no answer reaches: Ollama takes any number."""
        if (chat["max_completion_tokens"] or 0) >= self._model.max_model_len:
            chat["max_completion_tokens"] = None
        return chat

    async def _raw(self, asked: OllamaGenerateRequest) -> dict[str, Any]:
        """Return a completion's body: up to the context's end where the client gives no bound."""
        body = asked.for_completion()
        token_ids = await self._dialect.prompt_ids(body, COMPLETIONS)
        room = self._model.max_model_len - len(token_ids)
        return {**body, "prompt": token_ids, "max_tokens": min(body["max_tokens"] or room, room)}

    async def _show(self, request: Request) -> Response:
        asked = await self._dialect.read(request, ShowRequest)
        self._check_name(asked.model)
        model, family, defaults = self._model, self._model.architecture, self._model.defaults
        sampling = {
            "temperature": defaults.temperature, "top_k": defaults.top_k, "top_p": defaults.top_p,
            "min_p": defaults.min_p, "repeat_penalty": defaults.repetition_penalty,
        }  # fmt: skip
        info = {
            "general.architecture": family,
            "general.basename": model.name,
            f"{family}.context_length": model.max_model_len,
            f"{family}.vocab_size": model.vocab_size,
        }
        return json_response(
            {
                "modelfile": "",
                "parameters": "\n".join(f"{name} {value}" for name, value in sampling.items()),
                "template": self._model.template_source,
                "details": self._details(),
                "model_info": info,
                "capabilities": ["completion", "tools", *(["thinking"] if model.chat_style.thinks else [])],
                "modified_at": self._card()["modified_at"],
            }
        )

    async def _tags(self, request: Request) -> Response:
        return json_response({"models": [self._card()]})

    async def _loaded(self, request: Request) -> Response:
        more = {"expires_at": NEVER, "size_vram": 0, "context_length": self._model.max_model_len}
        ready = self._dialect.generation.dispatcher.ready()
        return json_response({"models": [{**self._card(), **more}] if ready else []})

    async def _version(self, request: Request) -> Response:
        return json_response({"version": API_VERSION})

    def _check_name(self, name: str) -> None:
        self._model.check_name(name.removesuffix(LATEST))

    def _card(self) -> dict[str, Any]:
        """Return the model as lists have it. The coordinator has no weights: the size is 0, and the digest
        is that of the name, the context and the template."""
        model = self._model
        about = f"{model.name}\0{model.longest}\0{model.vocab_size}\0{self._model.template_source}"
        return {
            "name": model.name,
            "model": model.name,
            "modified_at": datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z"),
            "size": 0,
            "digest": hashlib.sha256(about.encode()).hexdigest(),
            "details": self._details(),
        }

    def _details(self) -> dict[str, Any]:
        family = self._model.architecture
        named = {"format": "safetensors", "family": family, "families": [family]}
        return {"parent_model": "", **named, "parameter_size": "", "quantization_level": ""}


async def lines_of(events: AsyncIterator[Event]) -> AsyncIterator[bytes]:
    """Yield the events as lines of JSON."""
    async for event in events:
        yield orjson.dumps(event) + b"\n"
