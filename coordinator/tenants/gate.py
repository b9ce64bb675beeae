"""Who may reach which page: stands before everything that comes as ASGI. (Requests for tokens are let in by ``generate.py``.)

/v1/..., /tokenize, /detokenize      whoever has an API key, where keys are configured; the account is in ``scope["account"]``
/health, /ping, /version, /ready, /openapi.json       everyone
/, /dashboard/...                    everyone: files that say nothing of anybody; not the feed
all other pages                      operators': where keys are configured, this host, or whoever has the admin key
"""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..admin import AdminCheck
from ..dashboard_routes import is_open
from ..errors import ApiError
from .directory import Directory, Everyone
from .limits import ANONYMOUS

OPEN = {"/health", "/ping", "/version", "/ready", "/openapi.json"}
KEY_SUBPROTOCOL = "openai-insecure-api-key."
CLIENTS = {"/tokenize", "/detokenize"}


class Gate:
    """An ASGI application around another one."""

    def __init__(self, inner: ASGIApp, directory: Directory, admin: AdminCheck) -> None:
        self._inner, self._directory, self._admin = inner, directory, admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                self._let_in(scope)
            except ApiError as error:
                await _refuse(error, scope, receive, send)
                return
        await self._inner(scope, receive, send)

    def _let_in(self, scope: Scope) -> None:
        """Raises Unauthorized or Forbidden."""
        path: str = scope["path"]
        if path.startswith("/v1/") or path in CLIENTS:
            authorization = Headers(scope=scope).get("authorization") or _key_in_subprotocols(scope)
            scope["account"] = self._directory.account(authorization.encode("latin-1"))
        elif path not in OPEN and not is_open(path) and not isinstance(self._directory, Everyone):
            self._admin.check(HTTPConnection(scope), browsers=True)


def _key_in_subprotocols(scope: Scope) -> str:
    """Browsers cannot give a WebSocket other headers: OpenAI's clients put the key there."""
    offered: list[str] = scope.get("subprotocols", [])
    return next((f"Bearer {name.removeprefix(KEY_SUBPROTOCOL)}" for name in offered if name.startswith(KEY_SUBPROTOCOL)), "")


class OperatorsOnly:
    """An ASGI application around another one: this host, or whoever has the admin key. What lies under /admin looks closer itself."""

    def __init__(self, inner: ASGIApp, admin: AdminCheck) -> None:
        self._inner, self._admin = inner, admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            try:
                self._admin.check(HTTPConnection(scope), browsers=True)
            except ApiError as error:
                await _refuse(error, scope, receive, send)
                return
            scope["account"] = ANONYMOUS
        await self._inner(scope, receive, send)


async def _refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    if scope["type"] == "websocket":
        await receive()  # its opening
    await Response(error.body(), error.status, headers, media_type="application/json")(scope, receive, send)
