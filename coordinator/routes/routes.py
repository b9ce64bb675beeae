"""The ordinary routes: small, rare, answered at once."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, get_args

import orjson
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ... import __version__
from ..errors import (
    ApiError,
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    StorageFull,
    Unavailable,
)
from ..full_disk import is_full
from ..generate.api import GenerationApi
from ..generate.bodies.fields import UnknownFields
from ..generate.conversation import page_model
from ..generate.token_pages import DetokenizeRequest, TextRequest, TokenizeRequest, detokenized, tokenized
from ..http.answers import error_response, json_response
from ..http.body import ClientGone, held_body
from ..http.call import Endpoint
from ..http.limits import LARGE_BODY_BYTES
from ..metrics.metrics import CONTENT_TYPE, Scrape
from ..serving import Serving
from ..text.served_model import ServedModel, ServedModels
from ..validation import validated
from .health import Health
from .openapi import document


class OrdinaryRoutes:
    """Everything but generation."""

    def __init__(
        self, generation: GenerationApi, scrape: Scrape, health: Health, more: Sequence[BaseRoute] = ()
    ) -> None:
        self._servings = generation.servings
        self._generation = generation
        self._scrape = scrape
        self._health_checks = health
        self._more = more
        self._unknown = UnknownFields()

    def application(self) -> Starlette:
        """Return an ASGI application whose every error has OpenAI's shape."""
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            *(Route(path, self._tokenize, methods=["POST"]) for path in ("/tokenize", "/v1/tokenize")),
            *(Route(path, self._detokenize, methods=["POST"]) for path in ("/detokenize", "/v1/detokenize")),
            *(Route(path, self._health) for path in ("/health", "/v1/health")),
            Route("/ping", self._ping, methods=["GET", "POST"]),
            Route("/version", self._version),
            Route("/ready", self._ready),
            Route("/metrics", self._render_metrics),
            Route("/debug/state", self._debug_state),
            Route("/openapi.json", self._openapi),
            *self._more,
        ]
        app = Starlette(routes=routes, exception_handlers=error_handlers())
        app.router.redirect_slashes = False
        return app

    async def _models(self, request: Request) -> Response:
        models = self._servings.models
        cards = [_model_card(models, model, name) for name, model in models.listed()]
        return json_response({"object": "list", "data": cards})

    async def _one_model(self, request: Request) -> Response:
        name = request.path_params["name"]
        models = self._servings.models
        return json_response(_model_card(models, models.of(name), name))

    async def _tokenize(self, request: Request) -> Response:
        return await self._page(request, "tokenize", TokenizeRequest, tokenized)

    async def _detokenize(self, request: Request) -> Response:
        return await self._page(request, "detokenize", DetokenizeRequest, detokenized)

    async def _page(
        self,
        request: Request,
        work: str,
        kind: type[TextRequest],
        answer: Callable[[TextRequest, ServedModel], bytes],
    ) -> Response:
        limits, headers = self._generation.limits, dict(request.scope["headers"])
        async with held_body(
            headers, request.receive, limits.max_body_bytes, self._generation.overload
        ) as body:
            if len(body) > LARGE_BODY_BYTES:
                text: bytes = await self._generation.reader.read(work, body)
            else:
                asked = validated(kind, body)
                self._unknown.note(asked.unknown_fields())
                model = page_model(self._servings.models, asked)
                if isinstance(asked, TokenizeRequest) and asked.has_images:
                    text = await self._generation.reader.read(work, body)
                else:
                    text = await model.tokenizer.aside(lambda: answer(asked, model))
        return Response(text, media_type="application/json")

    async def _health(self, request: Request) -> Response:
        return json_response(await self._health_checks.report(monotonic()))

    async def _ping(self, request: Request) -> Response:
        return Response(status_code=200)

    async def _version(self, request: Request) -> Response:
        return json_response({"version": __version__})

    async def _ready(self, request: Request) -> Response:
        """Without a name any model will do; with a route's name any that it may choose."""
        name = request.query_params.get("model")
        if (route := self._servings.models.routes.get(name or "")) is not None:
            models = route.targets
        else:
            models = [""] if name is None else [self._servings.asked(request).model.name]
        reasons = [self._health_checks.why_not_ready(model) for model in models]
        if all(reasons):
            raise Unavailable(f"Not ready: {reasons[0]}.", retry_after_s=1)
        return json_response({"status": "ready"})

    async def _render_metrics(self, request: Request) -> Response:
        return Response(self._scrape.render(monotonic()), headers={"content-type": CONTENT_TYPE})

    async def _debug_state(self, request: Request) -> Response:
        """One model's state, with that of the others in ``models`` where none is named."""
        asked = self._servings.asked(request)
        others = [] if "model" in request.query_params else self._servings.all[1:]
        models = {"models": {each.model.name: _state(each) for each in others}} if others else {}
        return json_response({**_state(asked), "http": {"open_requests": self._servings.num_open}, **models})

    async def _openapi(self, request: Request) -> Response:
        paths = {getattr(route, "path", "") for route in self._more}
        return json_response(document(batches="/v1/batches" in paths, ollama="/api/chat" in paths))


def _state(serving: Serving) -> dict[str, Any]:
    return {**serving.dispatcher.snapshot(), "steering": serving.system().steering}


def _model_card(models: ServedModels, model: ServedModel, name: str) -> dict[str, Any]:
    """A route has the longest context that all its models have."""
    route = models.routes.get(name)
    own = name in model.names or route is not None
    may_answer = [model] if route is None else [models.own[target] for target in route.targets]
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "splitserve",
        "max_model_len": min(each.max_model_len for each in may_answer),
        "root": model.name if own else name,
        "parent": None if own else model.name,
    }


def error_handlers() -> Any:
    """For starlette: every error in OpenAI's shape."""
    full = {OSError: _no_space, sqlite3.Error: _no_space}
    return {
        **full,
        ApiError: _api_error,
        HTTPException: _http_error,
        ClientGone: _client_gone,
        orjson.JSONEncodeError: _no_json,
        Exception: _unexpected,
    }


def _error(error: ApiError, request: Request) -> Response:
    return error_response(error, request.url.path)


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error, request)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return _error(
            MethodNotAllowed(f"{request.url.path} takes {allow}, not {request.method}.", allow), request
        )
    path, why = request.url.path, ""
    paths = [getattr(route, "path", "") for route in request.app.routes]
    if "/v1/models" in paths:  # the HTTP port, whose protocol answers these before any route
        paths += get_args(Endpoint)
    if path.startswith(("/v1/files", "/v1/batches")) and "/v1/batches" not in paths:
        why = " on this server: it was started without --batch-file"
    elif path.startswith("/api/") and "/api/chat" not in paths:
        why = " on this server: it was started without --ollama"
    elif path.startswith("/admin/") and not any(each.startswith("/admin/") for each in paths):
        why = " here: this server's admin API has a port of its own (--admin-port)"
    elif near := next(
        (
            each
            for each in (path.rstrip("/"), f"/v1{path.rstrip('/')}", path.removeprefix("/v1"))
            if each in paths
        ),
        "",
    ):
        why = f": use {near}"  # a base URL without /v1, or with two
    elif "/docs" in paths:
        why = "; /docs lists what there is"
    return _error(NotFound(f"There is no {request.method} {path}{why}.", code="unknown_url"), request)


async def _no_space(request: Request, error: Exception) -> Response:
    """Answer for a full disk; other errors of files are raised again."""
    if not is_full(error):
        raise error
    where = getattr(error, "filename", None) or f"temporary files, {tempfile.gettempdir()}"
    return _error(
        StorageFull(where if isinstance(error, OSError) else f"what {request.url.path} stores"), request
    )


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _no_json(request: Request, error: Exception) -> Response:
    """Answer for a free-form field's number that cannot be written again; other errors are raised again."""
    if "64-bit" not in str(error):
        raise error
    return _error(
        InvalidRequest("The body has a whole number beyond 64 bits; write it as a string."), request
    )


async def _unexpected(request: Request, error: Exception) -> Response:
    """Starlette raises the error again once this is sent, and so it is logged."""
    return _error(InternalError("Internal error; the server's log says more."), request)
