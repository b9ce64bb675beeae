"""Ollama's /api/embed and the older /api/embeddings, over /v1/embeddings. https://docs.ollama.com/api"""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Mapping
from typing import Annotated, Any

import numpy as np
import orjson
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..batch.asking import Asking
from ..generate.bodies.completion import MAX_PROMPTS
from ..generate.bodies.fields import MAX_TOKENS, Body
from ..http.answers import account_of, json_response
from .chat_stream import ASKED_WITH, Refused, passed_on, while_connected
from .ollama_body import LATEST
from .routes import Dialect

ENDPOINT = "/v1/embeddings"


class _EmbedFields(Body):
    """``options`` and ``keep_alive`` are about how the model runs, and ignored."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    options: dict[str, Any] | None = None
    keep_alive: float | str | None = None


class OllamaEmbedRequest(_EmbedFields):
    """POST /api/embed."""

    input: str | Annotated[list[str], Field(max_length=MAX_PROMPTS)]
    truncate: bool | None = None
    """Unless false, a text that does not fit loses its end."""
    dimensions: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    """0: all."""


class OllamaEmbeddingsRequest(_EmbedFields):
    """POST /api/embeddings."""

    prompt: Annotated[str, Field(min_length=1)]


class EmbedRoutes:
    """Answers with vectors."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect, self._asking = dialect, Asking(dialect.generation, {})

    def routes(self) -> list[Route]:
        return [
            Route("/api/embed", self._embed, methods=["POST"]),
            Route("/api/embeddings", self._embeddings, methods=["POST"]),
        ]

    async def _embed(self, request: Request) -> Response:
        asked = await self._dialect.read(request, OllamaEmbedRequest)
        name = asked.model.removesuffix(LATEST)
        if not asked.input:  # only wants the model loaded
            self._dialect.generation.models.of(name)
            return json_response({"model": asked.model, "embeddings": []})
        body: dict[str, Any] = {"input": asked.input, "dimensions": asked.dimensions or None}
        if asked.truncate is not False:
            body["truncate_prompt_tokens"] = -1
        found, headers = await self._ask(request, asked.model, body)
        vectors, usage, answered = await asyncio.to_thread(_vectors, found)
        times = {name: seconds for name, seconds in usage["splitserve"].items() if name.endswith("_s")}
        answer = {
            "model": answered if name in self._dialect.generation.models.routes else asked.model,
            "embeddings": vectors,
            "total_duration": round(sum(times.values()) * 1e9),
            "load_duration": 0,  # the model is loaded before it is served
            "prompt_eval_count": usage["prompt_tokens"],
        }
        return Response(orjson.dumps(answer), 200, headers, "application/json")

    async def _embeddings(self, request: Request) -> Response:
        asked = await self._dialect.read(request, OllamaEmbeddingsRequest)
        body = {"input": asked.prompt, "truncate_prompt_tokens": -1}
        found, headers = await self._ask(request, asked.model, body)
        answer = {"embedding": _vectors(found)[0][0]}
        return Response(orjson.dumps(answer), 200, headers, "application/json")

    async def _ask(
        self, request: Request, model: str, body: dict[str, Any]
    ) -> tuple[bytes, Mapping[str, str]]:
        """Return the answer of /v1/embeddings, and the headers that ours repeats. Raises Refused or
        ClientGone."""
        given = dict(request.scope["headers"])
        kept = {name: given[name] for name in ASKED_WITH if name in given}
        body |= {"model": model.removesuffix(LATEST), "encoding_format": "base64"}
        data = orjson.dumps(body)
        asking = self._asking.ask(ENDPOINT, data, account_of(request), kept)
        answer = await while_connected(request, asking)
        headers = passed_on(answer.headers)
        if answer.status != 200:
            raise Refused(answer.status, orjson.loads(answer.body)["error"], headers)
        return answer.body, {name.decode(): value.decode() for name, value in headers}


def _vectors(body: bytes) -> tuple[list[orjson.Fragment], dict[str, Any], str]:
    """Return the vectors of an answer of /v1/embeddings as JSON, its usage and its model. Blocks, mostly
    between two vectors: 2,048 of 4,096 numbers take 1 s; as Python's numbers they took 2.5 s at a stretch,
    and 500 MB."""
    found = orjson.loads(body)
    vectors = [np.frombuffer(b64decode(each["embedding"]), "<f4") for each in found["data"]]
    texts = [orjson.dumps(vector, option=orjson.OPT_SERIALIZE_NUMPY) for vector in vectors]
    return [orjson.Fragment(text) for text in texts], found["usage"], found["model"]
