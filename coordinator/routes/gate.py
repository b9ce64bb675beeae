"""Access to pages, before everything that comes as ASGI. (``GenerationApi`` checks requests for tokens.)

/v1/..., /api/..., /invocations, /tokenize,
/detokenize, /tokenizer_info, /props     an API key, if there are any; the account is in scope["account"]
/health, /v1/health, /ping, /version,
/ready, /docs, /openapi.json,
dashboard files, login                   everyone
all other pages, and all other pages
of the admin port                        operators (``http/access/operators.py``)
"""

from __future__ import annotations

import secrets

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.routing import Match
from starlette.types import Message, Receive, Scope, Send

from ..dashboard.routes import is_open
from ..errors import ApiError
from ..generate.request_ids import client_id
from ..http.access.operators import Operators
from ..http.access_gate import refuse
from ..tenants.limits import ANONYMOUS
from ..tenants.tenancy import Directory

OPEN = {"/health", "/v1/health", "/ping", "/version", "/ready", "/openapi.json"}
KEY_SUBPROTOCOL = "openai-insecure-api-key."
CLIENTS = {"/tokenize", "/detokenize", "/tokenizer_info", "/props"}


class Gate:
    """An ASGI application around another one."""

    def __init__(self, inner: Starlette, operators: Operators, directory: Directory | None) -> None:
        """``directory``: None on the admin port, where clients' pages are operators' too."""
        self._inner, self._operators, self._directory = inner, operators, directory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            scope["path"] = scope["path"].rstrip("/") or "/"
            send = _naming(scope, send)
            try:
                self._let_in(scope)
            except ApiError as error:
                await refuse(error, scope, receive, send)
                return
        await self._inner(scope, receive, send)

    def _let_in(self, scope: Scope) -> None:
        """Raises Unauthorized or Forbidden."""
        path: str = scope["path"]
        if path in OPEN or is_open(path):
            return
        scope["account"] = ANONYMOUS
        if self._directory is not None and (path.startswith(("/v1/", "/api/")) or path in CLIENTS):
            authorization = _authorization(Headers(scope=scope)) or _key_in_subprotocols(scope)
            scope["account"] = self._directory.account(authorization.encode("latin-1"))
        elif any(
            route.matches(scope)[0] != Match.NONE for route in self._inner.routes
        ):  # else 404, for everyone
            self._operators.check(HTTPConnection(scope))


def _naming(scope: Scope, send: Send) -> Send:
    """Return a ``send`` that adds the client's id to answers without an id, and where Anthropic's clients
    look for it."""
    named, anthropic = client_id(dict(scope["headers"])), scope["path"].startswith("/v1/messages")
    if not named and not anthropic:
        return send

    async def send_named(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            id = headers.setdefault("x-request-id", named or f"req_{secrets.token_hex(16)}")
            if anthropic:
                headers["request-id"] = id
        await send(message)

    return send_named


def _authorization(headers: Headers) -> str:
    """Anthropic's clients send the key in a header of its own."""
    key = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {key}" if key else "")


def _key_in_subprotocols(scope: Scope) -> str:
    """Browsers cannot give a WebSocket other headers: OpenAI's clients put the key there."""
    offered: list[str] = scope.get("subprotocols", [])
    return next(
        (
            f"Bearer {name.removeprefix(KEY_SUBPROTOCOL)}"
            for name in offered
            if name.startswith(KEY_SUBPROTOCOL)
        ),
        "",
    )
