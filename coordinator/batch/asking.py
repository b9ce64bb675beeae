"""Answers one line of a batch, as the line's endpoint answers a client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from ..errors import ApiError, BodyTooLarge, Headers
from ..http.call import JSON, CallHandler, Endpoint
from ..http.inner_call import InnerCall
from ..tenants.limits import Account

Create = Callable[[Request], Awaitable[Response]]
ENDPOINTS: tuple[Endpoint, ...] = get_args(Endpoint)


class Answer(NamedTuple):
    status: int
    headers: Headers
    body: bytes


class Asking:
    """``dialects``: the handlers of endpoints that are not ``generation``'s own."""

    def __init__(self, generation: CallHandler, dialects: Mapping[str, Create]) -> None:
        self._generation, self._dialects = generation, dialects

    async def ask(self, path: str, body: bytes, account: Account, headers: Mapping[bytes, bytes]) -> Answer:
        """Return the endpoint's whole answer; cancelled, end the request."""
        for endpoint in ENDPOINTS:
            if endpoint == path:
                if len(body) > (most := self._generation.limits.max_body_bytes):
                    return Answer(413, [], BodyTooLarge(most).body())
                return await self._ask_generation(endpoint, body, account, headers)
        return await self._ask_dialect(path, body, account, headers)

    async def _ask_generation(
        self, endpoint: Endpoint, body: bytes, account: Account, headers: Mapping[bytes, bytes]
    ) -> Answer:
        listener = _Waiting()
        call = InnerCall(self._generation, endpoint, body, account, listener, headers)
        call.begin()
        try:
            return await listener.answer
        finally:
            call.abandon()

    async def _ask_dialect(
        self, path: str, body: bytes, account: Account, headers: Mapping[bytes, bytes]
    ) -> Answer:
        coming = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if not coming:
                await asyncio.Event().wait()  # this client does not go
            return coming.pop()

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "account": account}
        try:
            response = await self._dialects[path](
                Request({**scope, "headers": [JSON, *headers.items()]}, receive)
            )
        except ApiError as error:
            return Answer(error.status, error.headers(), error.body_for(path))
        return Answer(response.status_code, list(response.raw_headers), bytes(response.body))


class _Waiting:
    """A ``Listener`` for one whole answer."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def answered(self, status: int, headers: Headers, body: bytes) -> None:
        if not self.answer.done():
            self.answer.set_result(Answer(status, headers, body))

    def started(self, headers: Headers) -> None:
        raise AssertionError("batches are not streamed")

    def streamed(self, data: bytes, *, last: bool) -> None: ...
