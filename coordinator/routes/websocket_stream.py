"""/v1/stream: requests for tokens over one WebSocket, for clients that cannot read server-sent events.
Several may run at a time.

client   {"id": "a", "endpoint": "/v1/chat/completions", "body": {...}}    streamed unless "stream" is false
         {"id": "a", "cancel": true}
server   {"id": "a", "event": {...}}                                       each chunk, or the whole answer
         {"id": "a", "error": {...}, "status": 400}                        the endpoint's error
         {"id": "a", "done": true}                                         the end of this one
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

import orjson
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from ..errors import ApiError, Headers, InvalidRequest, Unauthorized, WrongField
from ..generate.api import GenerationApi
from ..generate.formats import DONE
from ..generate.reader.websocket_message import parsed_message, with_stream
from ..http.answers import error_response
from ..http.call import Endpoint
from ..http.inner_call import InnerCall
from ..tenants.limits import ANONYMOUS, Account

PATH = "/v1/stream"
SUBPROTOCOL = "splitserve"
MAX_RUNNING = 64
"""Requests of one connection."""
TOO_SLOW = 1008
ENDPOINTS: dict[str, Endpoint] = {
    "/v1/chat/completions": "/v1/chat/completions",
    "/v1/completions": "/v1/completions",
}


class WebSocketStreams:
    """Takes connections in."""

    def __init__(self, generation: GenerationApi) -> None:
        self._generation = generation

    def routes(self) -> list[WebSocketRoute]:
        return [WebSocketRoute(PATH, self._connection)]

    async def _connection(self, socket: WebSocket) -> None:
        # nothing else keeps other sites' pages from the model
        if socket.scope.get("account", ANONYMOUS) is ANONYMOUS:
            try:
                self._generation.access.check_origin(dict(socket.scope["headers"]))
            except ApiError as error:
                await socket.send_denial_response(error_response(error, PATH))
                return
        await socket.accept(SUBPROTOCOL if SUBPROTOCOL in socket.scope.get("subprotocols", ()) else None)
        await _Connection(socket, self._generation, socket.scope.get("account", ANONYMOUS)).run()


class _Connection:
    """One client's. What it does not read in time waits here, up to a bound, beyond which
    it must become less with each message."""

    def __init__(self, socket: WebSocket, generation: GenerationApi, account: Account) -> None:
        self._socket, self._generation, self._account = socket, generation, account
        self._calls: dict[str, InnerCall] = {}
        self._outbox: deque[bytes] = deque()
        self._num_waiting_bytes = 0
        self._ready = asyncio.Event()

    async def run(self) -> None:
        """Until the client goes, or reads too slowly."""
        writing = asyncio.create_task(self._write())
        reading = asyncio.create_task(self._read())
        try:
            await asyncio.wait({writing, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (writing, reading):
                task.cancel()
            for call in list(self._calls.values()):
                call.abandon()
            await asyncio.gather(writing, reading, return_exceptions=True)

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the client."""
        data = orjson.dumps(message)
        self._outbox.append(data)
        self._num_waiting_bytes += len(data)
        self._ready.set()

    def over(self, id: str) -> None:
        """Nothing more of this one."""
        self._calls.pop(id, None)
        self.send({"id": id, "done": True})

    async def _write(self) -> None:
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):  # starlette's, once the client has gone
            while True:
                await self._ready.wait()
                self._ready.clear()
                while self._outbox:
                    before, data = self._num_waiting_bytes, self._outbox.popleft()
                    self._num_waiting_bytes -= len(data)
                    await self._socket.send_text(data.decode())
                    if self._generation.limits.max_buffered_bytes < self._num_waiting_bytes > before:
                        await self._socket.close(TOO_SLOW, "too slow a reader")
                        return

    async def _read(self) -> None:
        while (received := await self._socket.receive())["type"] != "websocket.disconnect":
            id = ""
            try:
                text, body = received.get("text"), None
                if isinstance(text, bytes):  # a large one
                    message, body = await self._generation.reader.read("envelope", text)
                else:
                    message = parsed_message(text)
                id = message["id"]
                self._take(id, message, body)
            except ApiError as error:
                self.send({"id": id, "error": orjson.loads(error.body())["error"], "status": error.status})

    def _take(self, id: str, message: dict[str, Any], body: bytes | None) -> None:
        """``body``: the request's, where it is not in the message. Raises InvalidRequest."""
        if message.get("cancel") is True:
            if (call := self._calls.get(id)) is not None:
                call.abandon()
                self.over(id)
            return
        endpoint = ENDPOINTS.get(message.get("endpoint", "/v1/chat/completions"))
        if endpoint is None:
            raise WrongField("endpoint", f"must be one of {', '.join(ENDPOINTS)}")
        if id in self._calls:
            raise WrongField("id", f"a request {id!r} is running; give each another id")
        if len(self._calls) >= MAX_RUNNING:
            raise InvalidRequest(f"At most {MAX_RUNNING} requests may run on one connection; open another.")
        listener = _Listener(self, id)
        body = with_stream(message.get("body")) if body is None else body
        if (account := self._generation.directory.account_of_key(self._account.key_id)) is None:
            raise Unauthorized("This connection's API key was revoked or has expired; connect with another.")
        call = InnerCall(self._generation, endpoint, body, account, listener, {})
        self._calls[id] = call
        call.begin()


class _Listener:
    """One request's answer, as messages."""

    def __init__(self, connection: _Connection, id: str) -> None:
        self._connection, self._id = connection, id

    def answered(self, status: int, headers: Headers, body: bytes) -> None:
        if status == 200:
            self._connection.send({"id": self._id, "event": orjson.Fragment(body)})
        else:
            self._connection.send({"id": self._id, "error": orjson.loads(body)["error"], "status": status})
        self._connection.over(self._id)

    def started(self, headers: Headers) -> None: ...

    def streamed(self, data: bytes, *, last: bool) -> None:
        for event in data.split(b"\n\n"):
            if event.startswith(b"data: ") and event + b"\n\n" != DONE:
                self._connection.send({"id": self._id, "event": orjson.Fragment(event[6:])})
        if last:
            self._connection.over(self._id)
