"""A request for tokens from a batch or a WebSocket, which is answered like one by HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from ..errors import Headers
from ..tenants.limits import Account
from .call import Call, CallHandler, Endpoint


class Listener(Protocol):
    """Receives the answer, on the event loop's thread. Must not block or raise."""

    def answered(self, status: int, headers: Headers, body: bytes) -> None:
        """Take the whole answer, not streamed."""

    def started(self, headers: Headers) -> None:
        """Take the headers of a stream, before its first events."""

    def streamed(self, data: bytes, *, last: bool) -> None:
        """Take more of a stream: whole server-sent events."""


class InnerCall(Call):
    """A ``Call`` without a connection."""

    __slots__ = ("_listener",)

    def __init__(
        self,
        handler: CallHandler,
        endpoint: Endpoint,
        body: bytes,
        account: Account,
        listener: Listener,
        headers: Mapping[bytes, bytes],
        prefers: str = "",
    ) -> None:
        self.endpoint, self.method, self.headers, self.account = endpoint, "POST", headers, account
        self.gone = self.response_complete = False
        self.responder = None
        self._handler, self._listener, self.prefers = handler, listener, prefers
        self._parts, self._held = bytearray(body), len(body)
        self._completed = False

    @property
    def client(self) -> str:
        """See ``Call``: none."""
        return ""

    def begin(self) -> None:
        """Pass it to the handler; once."""
        self._handler.overload.hold("body_bytes", self._held)
        self._handler.opened(self)
        self._handler.handle(self)

    def respond(self, status: int, headers: Headers, body: bytes) -> None:
        if not self._completed:
            self._completed = True
            self._listener.answered(status, headers, body)
            self._close()

    def start(self, status: int, headers: Headers) -> None:
        self._listener.started(headers)

    def write(self, data: bytes) -> None:
        if not self._completed and data:
            self._listener.streamed(data, last=False)

    def finish(self, data: bytes) -> None:
        if not self._completed:
            self._completed = True
            self._listener.streamed(data, last=True)
            self._close()

    def abandon(self) -> None:
        """End: the answer is not needed any more."""
        if not self.response_complete and not self.gone:
            self.gone = self._completed = True
            self.drop_body()
            if self.responder is not None:
                self.responder.client_gone()
            self._handler.closed(self)

    def _close(self) -> None:
        self.response_complete = True
        self.drop_body()
        self._handler.closed(self)
