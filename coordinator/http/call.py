"""One request for tokens on its HTTP connection: its body, and the response to its client.

Each token of each stream is written here, and thousands of requests a second pass, so nothing lies between
this and the connection: neither ASGI nor a task for each request. The text for a client that reads too slowly
is joined in a buffer; the connection is cut when the buffer exceeds its bound.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import ClassVar, Literal, Protocol

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ..errors import ApiError, BodyTooLarge, Headers
from ..tenants.limits import ANONYMOUS, Account
from .access.access import Access
from .access.forwarded import TrustedProxies
from .body import check_headers, check_is_json
from .limits import HttpLimits
from .overload import Overload

Endpoint = Literal[
    "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/rerank", "/v1/score", "/invocations"
]  # fmt: skip
"""/invocations is SageMaker's: its body decides which of the first two it is."""
JSON = (b"content-type", b"application/json")


class Responder(Protocol):
    """Answers a call that was planned."""

    def client_gone(self, *, too_slow: bool = False) -> None:
        """End: the connection has ended before the response was complete.

        ``too_slow``: it is about to be cut off, from within a write.
        """


class Answering(Protocol):
    """A call's response."""

    account: Account

    @property
    def client(self) -> str:
        """The client's address; see ``Call``."""

    def respond(self, status: int, headers: Headers, body: bytes) -> None: ...
    def start(self, status: int, headers: Headers) -> None: ...
    def write(self, data: bytes) -> None: ...
    def finish(self, data: bytes) -> None: ...


class CallHandler(Protocol):
    """Receives calls."""

    limits: HttpLimits
    access: Access
    proxies: TrustedProxies
    overload: Overload

    def opened(self, call: Call) -> None:
        """Take note of a call that is the next on its connection; its body may be incomplete."""

    def account_of(self, call: Call) -> Account:
        """Return its account by its headers, before its body is read. Raises Unauthorized."""

    def handle(self, call: Call) -> None:
        """Handle the complete call."""

    def refuse(self, call: Call, error: ApiError) -> None:
        """Answer with an error."""

    def closed(self, call: Call) -> None:
        """Forget it: its response was written, or its client has gone. Once for every opened call."""


class Connection(Protocol):
    """The HTTP connection of a call."""

    transport: asyncio.Transport
    flow: FlowControl
    client: tuple[str, int] | None  # the other end: address and port

    @property
    def default_headers(self) -> Headers:
        """Headers of every response."""

    def on_response_complete(self) -> None:
        """Answer the next request on this connection."""


class _IgnoredEvent:
    """An event that nothing waits for."""

    def set(self) -> None: ...


class Call:
    """Methods neither block nor await. uvicorn's protocol keeps it as its ``cycle`` and sets the first three
    of its public fields."""

    __slots__ = (
        "_begun", "_buffer", "_chunked", "_completed", "_connection", "_cors", "_flow", "_handler", "_held",
        "_last", "_parts", "_transport", "_wants_continue", "_whole", "account", "disconnected", "endpoint",
        "gone", "headers", "keep_alive", "method", "prefers", "responder", "response_complete",
    )  # fmt: skip

    message_event: ClassVar[_IgnoredEvent] = _IgnoredEvent()

    def __init__(
        self,
        connection: Connection,
        handler: CallHandler,
        endpoint: Endpoint,
        method: str,
        headers: Mapping[bytes, bytes],
        *,
        http_version: str,
        keep_alive: bool,
        wants_continue: bool,
    ) -> None:
        self.keep_alive = keep_alive
        self.disconnected = False  # uvicorn's to set; ours is ``gone``
        self.gone = False
        self.response_complete = False
        self.endpoint: Endpoint = endpoint
        self.method = method
        self.headers = headers
        self.account: Account = ANONYMOUS
        self.prefers = ""  # the model that has answered this conversation before; empty: not known
        self.responder: Responder | None = None
        self._connection = connection
        self._handler = handler
        self._transport = connection.transport
        self._flow = connection.flow
        self._wants_continue = wants_continue
        self._chunked = http_version != "1.0"  # a stream; else the end of the connection ends the body
        self._cors = handler.access.cors(headers)
        self._begun = False
        self._whole = False  # all of the body is here
        self._parts = bytearray()
        self._held = 0  # bytes of it that count as held
        self._buffer = bytearray()
        self._last = False  # the response ends with what is in the buffer
        self._completed = False  # nothing more may be written

    # --- the request -----------------------------------------------------------------------------

    @property
    def body(self) -> bytearray:
        """The request's body, once it is complete."""
        return self._parts

    def drop_body(self) -> None:
        """Free the body's memory: it has been read, or is not needed."""
        self._parts = bytearray()
        if self._held:
            self._handler.overload.give_back("body_bytes", self._held)
            self._held = 0

    @property
    def client(self) -> str:
        """The client's address, by trusted proxies if there are any; empty if it is unknown."""
        peer = self._connection.client
        return "" if peer is None else self._handler.proxies.client_of(peer[0], self.headers)[0]

    def begin(self) -> None:
        """Begin to answer: all earlier requests of this connection have been answered."""
        self._begun = True
        self._handler.opened(self)
        try:
            self._handler.access.check(self.method, self.headers)
            self.account = self._handler.account_of(self)
            check_headers(self.headers, self._handler.limits.max_body_bytes)
            if self.method == "POST":
                check_is_json(self.headers)
        except ApiError as error:
            self._handler.refuse(self, error)
            return
        if self._wants_continue and not self._parts:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._advance()

    def feed(self, data: bytes) -> None:
        """Take more of the body."""
        if len(self._parts) <= self._handler.limits.max_body_bytes:
            self._parts += data
            self._held += len(data)
            self._handler.overload.hold("body_bytes", len(data))
            self._advance()

    def end_of_body(self) -> None:
        self._whole = True
        self._advance()

    def refuse(self, error: ApiError) -> None:
        """Answer with an error: the body is invalid, or incomplete."""
        self._handler.refuse(self, error)

    def _advance(self) -> None:
        if not self._begun or self._completed:
            return
        if len(self._parts) > self._handler.limits.max_body_bytes:
            self._handler.refuse(self, BodyTooLarge(self._handler.limits.max_body_bytes))
        elif self._whole:
            self._handler.handle(self)

    # --- the response ----------------------------------------------------------------------------

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        """Write a whole response."""
        if self._completed:
            return
        length = b"content-length: %d\r\n" % len(body)
        self._transport.write(self._head(status, headers, length) + (body if self.method != "HEAD" else b""))
        self._completed = True
        self._finished()

    def start(self, status: int, headers: Headers) -> None:
        """Write status and headers of a stream; once, before the first write."""
        if not self._completed:
            framing = b"transfer-encoding: chunked\r\n" if self._chunked else b""
            self._transport.write(self._head(status, headers, framing))

    def write(self, data: bytes) -> None:
        """Write part of a stream's body; not empty."""
        if self._flow.write_paused or self._completed:
            self._buffer_up(data)
        else:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)

    def finish(self, data: bytes) -> None:
        """Write the last part of a stream's body; not empty."""
        if self._completed:
            return
        self._last = True
        if self._flow.write_paused:
            self._buffer_up(data)
            self._completed = True
        else:
            self._completed = True
            self._put(data)

    def writable(self) -> None:
        """Write the buffered text: the client has read on."""
        if self._buffer:
            data = bytes(self._buffer)
            self._buffer.clear()
            self._put(data)

    def close(self) -> None:
        """Drop everything that is written from now on."""
        self._completed = True
        self._buffer.clear()

    def lost(self) -> None:
        """End: the connection has ended."""
        self.drop_body()
        if not self._begun or self.response_complete or self.gone:
            return
        self.gone = True
        self.close()
        if self.responder is not None:
            self.responder.client_gone()
        self._handler.closed(self)

    def _put(self, data: bytes) -> None:
        end = b"0\r\n\r\n" if self._last else b""
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(data), data, end) if self._chunked else data)
        if self._last:
            self._finished()

    def _finished(self) -> None:
        self.response_complete = True
        self.drop_body()
        if not self.keep_alive:
            self._transport.close()
        self._handler.closed(self)
        self._connection.on_response_complete()

    def _buffer_up(self, data: bytes) -> None:
        if self._completed:
            return
        self._buffer += data
        if len(self._buffer) > self._handler.limits.max_buffered_bytes:
            self.close()
            if self.responder is not None:
                self.responder.client_gone(too_slow=True)
            self._transport.abort()

    def _head(self, status: int, headers: Headers, framing: bytes) -> bytes:
        all_headers = (*self._connection.default_headers, *self._cors, *headers)
        lines = [b"%b: %b\r\n" % header for header in all_headers]
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        return b"".join([STATUS_LINE[status], *lines, framing, end])
