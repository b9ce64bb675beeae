"""A chat completion that another API's endpoint asks for: the body of that API becomes a chat's, and the
chat's chunks become that API's events.

Limits, metering, grammars, traces and the survival of a worker's death are thus those of chat completions.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Mapping
from typing import Any, TypeVar

import orjson
from starlette.requests import Request
from starlette.types import Receive

from ..errors import ApiError, DeadlineExceeded, Headers, InternalError, Overloaded, Unavailable
from ..generate.api import GenerationApi
from ..generate.plan import PLAN_HEADERS
from ..generate.request_ids import HEADER
from ..generate.resumption import KEY_HEADER
from ..http.body import ClientGone
from ..http.call import Endpoint
from ..http.inner_call import InnerCall
from ..metrics.request_trace import CONTEXT_HEADERS
from ..tenants.limits import Account

ASKED_WITH = (*PLAN_HEADERS, HEADER, KEY_HEADER, *CONTEXT_HEADERS)
"""Headers of the asker's request that the chat completion has, too."""
PASSED_ON = frozenset(("retry-after", "x-request-id"))
"""Headers of the chat completion that its asker's answer repeats, beside those of the rate limits."""
EVENT_DATA = b"data: "
NO_MORE = b"[DONE]"
LATE = {kind.code: kind.status for kind in (DeadlineExceeded, Overloaded, Unavailable)}
"""Status of an error that ends a stream, by its code."""
T = TypeVar("T")


class Refused(ApiError):
    """The chat completion's error, as it came. ``headers`` are the answer's."""

    def __init__(self, status: int, error: Mapping[str, Any], headers: Headers) -> None:
        super().__init__(error["message"], param=error.get("param"), code=error.get("code"))
        self.status, self.kind, self._headers = status, error.get("type", self.kind), headers

    def headers(self) -> Headers:
        return self._headers


class ChatStream:
    """One streamed chat completion, for one reader. It is its call's ``Listener``."""

    def __init__(
        self,
        generation: GenerationApi,
        account: Account,
        headers: Mapping[bytes, bytes],
        body: dict[str, Any],
        endpoint: Endpoint = "/v1/chat/completions",
        prefers: str = "",
    ) -> None:
        """``headers``: of the request that asks for it. ``body``: the endpoint's; how it streams is set
        here. ``prefers``: see ``Call``."""
        options = {"include_usage": True, "continuous_usage_stats": True}
        data = orjson.dumps({**body, "stream": True, "stream_options": options})
        kept = {name: headers[name] for name in ASKED_WITH if name in headers}
        self.headers: dict[str, str] = {}  # that the asker's answer repeats
        self._call = InnerCall(generation, endpoint, data, account, self, kept, prefers)
        self._most = generation.limits.max_buffered_bytes
        self._chunks: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._ready = asyncio.Event()
        self._over = False
        self._refusal: Refused | None = None

    async def begin(self) -> None:
        """Ask for it, and wait for its first chunk. Raises Refused."""
        self._call.begin()
        await self._ready.wait()
        if self._refusal is not None:
            raise self._refusal

    async def chunks(self) -> AsyncIterator[dict[str, Any] | None]:
        """Yield each chunk; None where nothing has come for a while. Raises Refused where it breaks off."""
        while True:
            while self._chunks:
                data = self._chunks.popleft()
                self._num_waiting_bytes -= len(data)
                for event in data.split(b"\n\n"):
                    if event.startswith(b"id: "):
                        event = event.partition(b"\n")[2]
                    if event.startswith(b":"):
                        yield None
                    elif event.startswith(EVENT_DATA) and (chunk := event[len(EVENT_DATA) :]) != NO_MORE:
                        yield _checked(orjson.loads(chunk))
            if self._over:
                return
            self._ready.clear()
            await self._ready.wait()

    def abandon(self) -> None:
        """Cancel it, unless it is complete."""
        self._call.abandon()

    # --- as a listener -----------------------------------------------------------------------------

    def started(self, headers: Headers) -> None:
        self.headers = {name.decode(): value.decode() for name, value in passed_on(headers)}

    def answered(self, status: int, headers: Headers, body: bytes) -> None:
        """See ``Listener``: it was refused."""
        self._refusal = Refused(status, orjson.loads(body)["error"], passed_on(headers))
        self._ready.set()

    def streamed(self, data: bytes, *, last: bool) -> None:
        too_slow = self._num_waiting_bytes > self._most and not last  # a kept answer comes in one piece
        self._chunks.append(data)
        self._num_waiting_bytes += len(data)
        self._over = last or too_slow
        self._ready.set()
        if too_slow:
            self._chunks.append(EVENT_DATA + InternalError("The answer was read too slowly: cut off.").body())
            asyncio.get_running_loop().call_soon(self.abandon)  # not from within a write


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns. Raises ClientGone, and cancels it, if the client goes before."""
    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(_gone(request.receive))
    try:
        await asyncio.wait({working, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, gone):
            task.cancel()
        await asyncio.wait({working, gone})


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def object_of(text: str) -> dict[str, Any]:
    """Return a call's arguments; the text itself where a limit of tokens has cut it."""
    try:
        found = orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        found = None
    return found if isinstance(found, dict) else {"_partial": text}


def _checked(chunk: dict[str, Any]) -> dict[str, Any]:
    if "error" in chunk:
        raise Refused(LATE.get(chunk["error"].get("code"), 500), chunk["error"], [])
    return chunk


def passed_on(headers: Headers) -> Headers:
    """Return those that the asker's answer repeats."""
    return [
        (name, value)
        for name, value in headers
        if name.decode() in PASSED_ON or name.startswith(b"x-ratelimit-")
    ]
