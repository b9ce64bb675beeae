"""Holds everything that comes as ASGI to ``Access``, and answers browsers' preflights. (A ``Call`` checks
requests for tokens itself.)"""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ApiError
from .access.access import Access, Headers, is_preflight
from .access.forwarded import TrustedProxies
from .answers import error_response
from .call import CallHandler
from .overload import Overload


class AccessGate:
    """An ASGI application around another one; before any key is asked for."""

    generation: CallHandler | None = None
    """Takes requests for tokens straight from the protocol; None: there are none on this port."""

    def __init__(self, inner: ASGIApp, access: Access, proxies: TrustedProxies) -> None:
        self._inner, self._access, self._proxies = inner, access, proxies
        self.overload = Overload()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._inner(scope, receive, send)
            return
        headers, method = dict(scope["headers"]), scope.get("method", "GET")
        if scope["client"] is not None:
            client, scheme = self._proxies.client_of(scope["client"][0], headers)
            scope["client"], scope["scheme"] = (client, scope["client"][1]), scheme or scope["scheme"]
        if cors := self._access.cors(headers):
            send = _with_headers(send, cors)
        try:
            self._access.check(method, headers)
            preflight = (
                self._access.preflight(headers) if method == "OPTIONS" and is_preflight(headers) else None
            )
        except ApiError as error:
            await refuse(error, scope, receive, send)
            return
        if preflight is None:
            await self._inner(scope, receive, send)
        else:
            answer = Response(status_code=204)
            answer.raw_headers = list(preflight)
            await answer(scope, receive, send)


async def refuse(error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answers a request or a WebSocket's opening with an error."""
    if scope["type"] == "websocket":
        await receive()  # its opening
    await error_response(error, scope["path"])(scope, receive, send)


def _with_headers(send: Send, more: Headers) -> Send:
    async def extended(message: Message) -> None:
        if message["type"] in ("http.response.start", "websocket.http.response.start"):
            message["headers"] = [*message.get("headers", ()), *more]
        await send(message)

    return extended
