"""uvicorn's HTTP protocol, in which a request for tokens becomes a ``Call`` straight from the parser.

ASGI costs such a request a scope, a task, an event and a future: a fifth of the coordinator's time for it.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from ..errors import ApiError, Headers, HeadersTooLarge, InvalidRequest, RequestTimeout, Unavailable
from .access.access import is_preflight
from .call import JSON, Call, CallHandler, Endpoint
from .fair_reads import FairReads
from .limits import LARGE_BODY_BYTES, MIN_BYTES_PER_S
from .upgrades import UpgradingProtocol

MAX_HEADER_BYTES = 64 << 10
TOO_LARGE = "the request's headers are too large"
MAX_PIPELINED = 16  # requests that a client may send ahead on one connection
MAX_CHUNK_OVERHEAD = 64 << 10
"""Bytes of chunk sizes and chunk extensions that a body may have, beside 8 for each byte of it."""
HEALTH = (b"/health", b"/v1/health", b"/ready", b"/ping", b"/metrics")
"""Answered also where there are too many connections."""
ENDPOINTS: Final[dict[bytes, Endpoint]] = {
    b"/v1/completions": "/v1/completions",
    b"/v1/chat/completions": "/v1/chat/completions",
    b"/v1/embeddings": "/v1/embeddings",
    **dict.fromkeys((b"/v1/rerank", b"/v2/rerank", b"/rerank"), "/v1/rerank"),
    **dict.fromkeys((b"/v1/score", b"/score"), "/v1/score"),
    b"/invocations": "/invocations",
}


class HttpProtocol(UpgradingProtocol):
    """One connection. The application must have a ``generation``, which takes the calls (None: there are
    none), and an ``overload``."""

    _answering: Call | None = None
    _since: float | None = None  # when a request began to come in, or the first was awaited: loop's clock
    _has_head = False  # of that request all headers are here, and it is the ``cycle``
    _num_body_bytes = 0
    _num_header_bytes = 0
    _num_messages = 0
    _num_wire_bytes = 0  # of a body with its chunks' framing, from reads that hold nothing else
    _is_crowded = False  # one connection too many: only its health checks are answered

    @property
    def default_headers(self) -> Headers:
        return self.server_state.default_headers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._reads = FairReads(self.loop, transport, lambda: self.flow.read_paused)
        self._since = self.loop.time()
        self._is_crowded = not self.overload.opened(self)

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        in_body, message = self._has_head and self._since is not None, self._num_messages
        try:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._parse_behind(memoryview(data)[upgrade.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response(self._fault or "This is not a valid HTTP/1.1 request.")
            return
        if in_body and message == self._num_messages and self._since is not None:
            self._num_wire_bytes += len(data)
            if self._num_wire_bytes > MAX_CHUNK_OVERHEAD + 9 * self._num_body_bytes:
                wrong = (
                    "The body's chunks are mostly chunk extensions; send larger chunks, and no extensions."
                )
                self._break_off(InvalidRequest(wrong))
        self._reads.received(len(data))

    def on_message_begin(self) -> None:
        if self._is_free:
            self.overload.sending(self)
        self.url, self.headers, self.expect_100_continue, self._num_header_bytes = b"", [], False, 0
        self._since, self._has_head, self._num_body_bytes = self.loop.time(), False, 0
        self._num_messages += 1
        self._num_wire_bytes, self._upgrades = 0, False

    def on_url(self, url: bytes) -> None:
        self._num_header_bytes += len(url)
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError(TOO_LARGE)
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_header_bytes += len(name) + len(value) + 4  # ": " and the end of the line
        if self._num_header_bytes > MAX_HEADER_BYTES:
            raise ValueError(TOO_LARGE)
        if self._has_head:
            # trailers are counted and dropped: nothing after the body is trusted (RFC 9110, 6.5.1)
            return
        name = name.lower()
        if name == b"expect" and value.lower() == b"100-continue":
            self.expect_100_continue = True
        self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        if self._is_crowded and self.url.partition(b"?")[0] not in HEALTH:
            raise ValueError("too many connections")
        if self.parser.should_upgrade():
            self._upgrades = True  # the parser stops with the end of this head
            return
        headers = dict(self.headers)
        if len(headers) != len(self.headers) and (doubled := self._doubled()) is not None:
            self._refuse_message(f"A request must have only one {doubled} header.")
        if b"host" not in headers and self.parser.get_http_version() != "1.0":
            self._refuse_message("A request must have a Host header.")
        self._has_head = True
        endpoint = ENDPOINTS.get(self.url) or _endpoint_of(self.url)
        handler: CallHandler | None = cast(Any, self.config.app).generation
        method = self.parser.get_method().decode("ascii")
        if endpoint is None or handler is None or (method == "OPTIONS" and is_preflight(headers)):
            self._begin_scope()
            super().on_headers_complete()
            return
        version = self.parser.get_http_version()
        call = Call(
            self,
            handler,
            endpoint,
            method,
            headers,
            http_version=version,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            wants_continue=self.expect_100_continue,
        )
        earlier, self.cycle = self.cycle, cast(Any, call)
        if earlier is None or earlier.response_complete:
            self._begin(call)
        else:
            if len(self.pipeline) >= MAX_PIPELINED:
                # not sooner: a client's departure shows only in reading
                self.flow.pause_reading()
            self.pipeline.appendleft((cast(Any, call), self.app))

    def on_body(self, body: bytes) -> None:
        self._num_body_bytes += len(body)
        cycle: object = self.cycle
        if not isinstance(cycle, Call):
            super().on_body(body)
        elif not cycle.response_complete:
            cycle.feed(body)
            if self.pipeline and self._num_body_bytes > LARGE_BODY_BYTES:
                self.flow.pause_reading()  # until its turn comes

    def on_message_complete(self) -> None:
        if self._upgrades:
            return  # it is parsed again
        self._since = None
        if self._is_free:
            self.overload.idle(self)
        else:
            self.overload.at_work(self)
        cycle: object = self.cycle
        if not isinstance(cycle, Call):
            super().on_message_complete()
        elif not cycle.response_complete:
            cycle.end_of_body()

    def on_response_complete(self) -> None:
        if self.flow.write_paused:
            self.overload.unread(self, self.transport.get_write_buffer_size())
        super().on_response_complete()
        if self._is_crowded:
            self.transport.close()
        elif self._since is None and not self.pipeline:
            self.overload.idle(self)

    def handle_websocket_upgrade(self) -> None:
        self.overload.closed(self)  # the other protocol counts it
        super().handle_websocket_upgrade()

    def shed(self, error: ApiError | None) -> None:
        """See ``Connection`` in overload.py."""
        if error is None:
            self.transport.abort()
        else:
            self._break_off(error)

    def hurry(self, now: float, timeout_s: float) -> None:
        """Refuse a client that takes longer than this to send a request. Called now and then."""
        if self._since is None:
            if self._is_free and self.timeout_keep_alive_task is None:
                self._since = now  # it has sent something else than a request, such as an empty line
        elif self.pipeline or not (self._has_head or self._is_free):
            self._since = now  # reading may have paused here: an earlier request is being answered
        elif now > self._since + timeout_s + self._num_body_bytes / MIN_BYTES_PER_S:
            self._break_off(RequestTimeout(timeout_s))

    def send_400_response(self, msg: str) -> None:
        """Answer with an error; uvicorn calls it for what it cannot parse."""
        if self._num_header_bytes > MAX_HEADER_BYTES:
            self._break_off(HeadersTooLarge(MAX_HEADER_BYTES))
        elif self._is_crowded:
            full = "The server has as many connections as it may have; try again soon."
            self._break_off(Unavailable(full, retry_after_s=1))
        else:
            self._break_off(InvalidRequest(msg))

    def _break_off(self, error: ApiError) -> None:
        """End the connection, with an error as the answer if none has begun."""
        cycle: Any = self.cycle
        # requests: ``cycle`` is complete, as far as its client goes
        between = not self._has_head or self._since is None
        if self.pipeline or self.transport.is_closing() or between != self._is_free:
            # an earlier answer is not to be mixed up with this one; or this request has been answered already
            pass
        elif between or not (isinstance(cycle, Call) or cycle.response_started):
            self._answer(error)
        elif (call := self._answering) is not None and call is cycle:
            call.keep_alive = False
            call.refuse(error)
        self.transport.close()

    def _answer(self, error: ApiError) -> None:
        body = error.body()
        headers = [
            *self.default_headers,
            JSON,
            *error.headers(),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
        ]
        lines = [b"%b: %b\r\n" % header for header in headers]
        self.transport.write(b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body]))

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Begin a request; uvicorn calls it for those that waited for earlier ones, too."""
        if isinstance(cycle, Call):
            self.loop.call_soon(self._begin, cycle)  # not within the end of the last one: hundreds may wait
        else:
            super()._start_asgi_task(cycle, app)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.overload.read(self)
        if self._answering is not None:
            self._answering.writable()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.overload.closed(self)
        if self._answering is not None:
            self._answering.lost()
            self._answering = None

    def _begin(self, call: Call) -> None:
        if not self.transport.is_closing():
            self._answering = call
            call.begin()


def _endpoint_of(url: bytes) -> Endpoint | None:
    """Return the endpoint of a request line that is more than a path, or ends with a slash."""
    try:
        return ENDPOINTS.get(httptools.parse_url(url).path.rstrip(b"/"))
    except httptools.HttpParserInvalidURLError:
        return None
