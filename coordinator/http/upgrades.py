"""The part of uvicorn's HTTP protocol that reads a request's head strictly, and follows ``Upgrade``.

``Upgrade`` leads to a WebSocket on its own path, and is ignored everywhere else (RFC 9110, section 7.8).
llhttp, the parser below, ends a message at an ``Upgrade`` and leaves its body in the stream, where it would
be read as the next request: so such a head is parsed again without that header, and the rest of the stream
after it.
"""

from __future__ import annotations

from typing import Any, NoReturn, cast

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from .overload import Overload

WEBSOCKET_PATH = b"/v1/stream"
SINGLE = frozenset(
    [b"host", b"content-length", b"transfer-encoding", b"content-type", b"authorization", b"origin"]
)
"""Headers that two programs may understand differently if they come twice."""


class UpgradingProtocol(HttpToolsProtocol):
    """One connection, up to the end of a head."""

    _upgrades = False  # the parser stops behind this head
    _fault = ""  # our own finding about the message, in place of the parser's

    @property
    def overload(self) -> Overload:
        found: Overload = cast(Any, self.config.app).overload
        return found

    @property
    def _is_free(self) -> bool:
        """Whether all requests whose headers are here have been answered."""
        return self.cycle is None or self.cycle.response_complete

    def _parse_behind(self, data: memoryview) -> None:
        """Parse on. ``data``: the bytes behind a head with an ``Upgrade``. Raises HttpParserError."""
        while not self._should_upgrade():
            self._parse_without_upgrade()
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            else:
                return
        if data:
            self._refuse_message("A WebSocket client must wait for the answer to its handshake.")
        self._open_websocket()

    def _open_websocket(self) -> None:
        self._begin_scope()
        self.scope["method"] = "GET"
        self.handle_websocket_upgrade()

    def _parse_without_upgrade(self) -> None:
        """Parse the head again as that of an ordinary request. Raises HttpParserError."""
        method = self.parser.get_method()
        if method == b"CONNECT":
            self._refuse_message("This server is no proxy: it does not take CONNECT.")
        lines = [b"%b %b HTTP/%b\r\n" % (method, self.url, self.parser.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                value = b", ".join(
                    option for option in value.split(b",") if option.strip().lower() != b"upgrade"
                )
            if name != b"upgrade":
                lines.append(b"%b: %b\r\n" % (name, value))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        self.parser.feed_data(b"".join([*lines, b"\r\n"]))

    def _begin_scope(self) -> None:
        """Set up uvicorn's own state of a request."""
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects
        self.headers += headers  # the list that the scope holds

    def _should_upgrade(self) -> bool:
        """Whether this head opens a WebSocket: on its own path, without a body, after all earlier answers."""
        headers = dict(self.headers)
        return (
            self._is_free
            and self.url.partition(b"?")[0] == WEBSOCKET_PATH
            and self.parser.get_method() == b"GET"
            and headers.get(b"upgrade", b"").lower() == b"websocket"
            and b"host" in headers
            and self._doubled() is None
            and headers.get(b"content-length", b"0") == b"0"
            and b"transfer-encoding" not in headers
            and self.config.ws_protocol_class is not None
        )

    def _doubled(self) -> str | None:
        """Return a header of ``SINGLE`` that came twice."""
        names = [name for name, _ in self.headers]
        return next((name.decode().title() for name in SINGLE if names.count(name) > 1), None)

    def _refuse_message(self, fault: str) -> NoReturn:
        self._fault = fault
        raise httptools.HttpParserError(fault)
