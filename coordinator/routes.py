"""The ordinary routes: small, rare, answered at once."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Sequence
from time import monotonic
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from .. import __version__
from .bodies import fields
from .bodies.tokens import DetokenizeRequest, TokenizeRequest
from .body import ClientGone, read_body
from .errors import ApiError, InternalError, InvalidRequest, MethodNotAllowed, NotFound, StorageFull, Unavailable, from_validation
from .full_disk import is_full
from .generate import check_model
from .http.health import Health
from .limits import HttpLimits
from .metrics import CONTENT_TYPE, Metrics
from .openapi import document
from .prompts import chat_prompt
from .request import Dispatcher
from .served_model import ServedModel
from .unknown_fields import UnknownFields

Body = TypeVar("Body", bound=fields.Body)


class OrdinaryRoutes:
    """Everything but generation."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        model: ServedModel,
        limits: HttpLimits,
        metrics: Metrics,
        health: Health,
        more: Sequence[BaseRoute] = (),
    ) -> None:
        self._dispatcher = dispatcher
        self._model = model
        self._limits = limits
        self._metrics = metrics
        self._health_checks = health
        self._more = more
        self._unknown = UnknownFields()

    def application(self) -> Starlette:
        """As an ASGI application whose every error has OpenAI's shape."""
        routes = [
            Route("/v1/models", self._models),
            Route("/v1/models/", self._models),
            Route("/v1/models/{name:path}", self._one_model),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
            Route("/health", self._health),
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
        return _json({"object": "list", "data": [self._model_card()]})

    async def _one_model(self, request: Request) -> Response:
        check_model(request.path_params["name"], self._model)
        return _json(self._model_card())

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeRequest)
        check_model(body.model, self._model)
        tokenizer = self._model.tokenizer
        if (messages := body.messages) is not None:
            add = body.add_generation_prompt is not False
            prompt = await tokenizer.aside(lambda: chat_prompt(messages, self._model, add_generation_prompt=add))
            ids = prompt.token_ids
        else:
            text, special = body.prompt or "", body.add_special_tokens is not False
            (ids,) = await tokenizer.aside(lambda: tokenizer.encode([text], add_special_tokens=special))
        answer: dict[str, Any] = {"count": len(ids), "max_model_len": self._model.max_model_len, "tokens": ids, "token_strs": None}
        if body.return_token_strs:
            answer["token_strs"] = [tokenizer.fast.id_to_token(token_id) for token_id in ids]
        return _json(answer)

    async def _detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeRequest)
        check_model(body.model, self._model)
        if body.tokens and max(body.tokens) >= self._model.vocab_size:
            message = f"tokens: token id {max(body.tokens)} is outside the vocabulary of {self._model.vocab_size} tokens"
            raise InvalidRequest(message, param="tokens")
        return _json({"prompt": await self._model.tokenizer.aside(lambda: self._model.tokenizer.decode(body.tokens))})

    async def _health(self, request: Request) -> Response:
        return _json(await self._health_checks.report(monotonic()))

    async def _ping(self, request: Request) -> Response:
        return Response(status_code=200)

    async def _version(self, request: Request) -> Response:
        return _json({"version": __version__})

    async def _ready(self, request: Request) -> Response:
        if reason := self._health_checks.why_not_ready():
            raise Unavailable(f"Not ready: {reason}.", retry_after_s=1)
        return _json({"status": "ready"})

    async def _render_metrics(self, request: Request) -> Response:
        return Response(self._metrics.render(monotonic()), headers={"content-type": CONTENT_TYPE})

    async def _debug_state(self, request: Request) -> Response:
        http = {"open_requests": self._metrics.num_open}
        return _json({**self._dispatcher.snapshot(), "http": http})

    async def _openapi(self, request: Request) -> Response:
        return _json(document(batches=any(getattr(route, "path", "") == "/v1/batches" for route in self._more)))

    def _model_card(self) -> dict[str, Any]:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "splitserve",
            "max_model_len": model.max_model_len,
        }

    async def _body(self, request: Request, kind: type[Body]) -> Body:
        body = await read_body(dict(request.scope["headers"]), request.receive, self._limits.max_body_bytes)
        try:
            found = kind.model_validate_json(body)
        except ValidationError as error:
            raise from_validation(error) from error
        self._unknown.note(found.unknown_fields())
        return found


def error_handlers() -> Any:
    """For starlette: every error in OpenAI's shape."""
    full = {OSError: _no_space, sqlite3.Error: _no_space}
    return {**full, ApiError: _api_error, HTTPException: _http_error, ClientGone: _client_gone, Exception: _unexpected}


def _json(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def _error(error: ApiError) -> Response:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body(), error.status, headers, media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _error(error)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, or not with this method."""
    assert isinstance(error, HTTPException)
    if error.status_code == 405:
        allow = (error.headers or {}).get("Allow", "")
        return _error(MethodNotAllowed(f"{request.url.path} takes {allow}, not {request.method}.", allow))
    path, why = request.url.path, ""
    if path.startswith(("/v1/files", "/v1/batches")):
        why = " on this server: it was started without --batch-file"
    elif path.startswith("/admin/") and not any(getattr(route, "path", "").startswith("/admin/") for route in request.app.routes):
        why = " here: this server's admin API has a port of its own (--admin-port)"
    return _error(NotFound(f"There is no {request.method} {path}{why}.", code="unknown_url"))


async def _no_space(request: Request, error: Exception) -> Response:
    """Of a disk that is full; other errors of files stay what they are."""
    if not is_full(error):
        raise error
    where = getattr(error, "filename", None) or f"temporary files, {tempfile.gettempdir()}"
    return _error(StorageFull(where if isinstance(error, OSError) else f"what {request.url.path} stores"))


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _unexpected(request: Request, error: Exception) -> Response:
    """Starlette raises the error again once this is sent, and so it is logged."""
    return _error(InternalError("Internal error; the server's log says more."))
