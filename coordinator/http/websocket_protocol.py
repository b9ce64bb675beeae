"""uvicorn's WebSocket protocol, with bounds: on how long a message may take to arrive, and on the bytes of
all that are held.

It writes no traceback into the log for a client that sends invalid text.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from ..errors import ApiError
from .fair_reads import FairReads
from .limits import LARGE_BODY_BYTES, MIN_BYTES_PER_S
from .overload import Overload

INVALID_DATA = 1007  # RFC 6455, section 7.4.1
POLICY_VIOLATION = 1008
TRY_AGAIN_LATER = 1013


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection after its upgrade."""

    _since: float | None = None  # part of a message is here, and not all of it: seconds of the loop's clock
    _num_unfinished = 0  # bytes of such a message
    _has_ended = False
    _num_queued = 0  # bytes of messages that are whole and were not received by the application

    @property
    def overload(self) -> Overload:
        found: Overload = cast(Any, self.config.app).overload
        return found

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._reads = FairReads(self.loop, self.transport, lambda: self.read_paused)
        self.overload.opened(self)
        self.overload.at_work(self)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._forget()
        self.overload.closed(self)

    def data_received(self, data: bytes) -> None:
        if self.handshake_initiated and not self.handshake_complete:
            # frames before the handshake's answer: no WebSocket client does so, and uvicorn cannot take it
            self.transport.close()
            return
        if self._has_ended:
            return
        super().data_received(data)
        if self.disconnected or self.close_sent:
            return
        unfinished = len(self.conn.reader.buffer) + sum(map(len, self.frames))
        if not unfinished:
            self._since = None
            self.overload.at_work(self)
        elif self._since is None:
            self._since = self.loop.time()
            self.overload.sending(self)
        self._hold(unfinished, self._num_queued)
        self._reads.received(len(data))

    def hurry(self, now: float, timeout_s: float) -> None:
        """Called now and then: a client that takes longer than this to send a message is cut off."""
        if self._since is not None and now > self._since + timeout_s + self._num_unfinished / MIN_BYTES_PER_S:
            self._end(POLICY_VIOLATION, f"a message did not arrive within {timeout_s:g} s")

    def shed(self, error: ApiError | None) -> None:
        """See ``Connection`` in overload.py."""
        self._end(TRY_AGAIN_LATER, "" if error is None else error.message)

    def send_receive_event_to_app(self) -> None:
        """Called with each whole message. A large one stays bytes: it is read in another process."""
        size = sum(map(len, self.frames))
        if self.curr_msg_data_type == "text" and not self.close_sent:
            data = b"".join(self.frames)
            if size > LARGE_BODY_BYTES:
                self.queue.put_nowait(cast(Any, {"type": "websocket.receive", "text": data}))
                self._pause_reading()
            elif _is_text(data):
                super().send_receive_event_to_app()
            else:
                self.conn.send_close(INVALID_DATA)
                self.handle_parser_exception()
            self.frames = []
        else:
            super().send_receive_event_to_app()
        self._hold(0, self._num_queued + size)

    async def receive(self) -> Any:
        """Called by the application."""
        message = await super().receive()
        if self.queue.empty():
            self._hold(self._num_unfinished, 0)
        return message

    def _hold(self, unfinished: int, queued: int) -> None:
        if (change := unfinished + queued - self._num_unfinished - self._num_queued) > 0:
            self.overload.hold("websocket_bytes", change)
        elif change:
            self.overload.give_back("websocket_bytes", -change)
        self._num_unfinished, self._num_queued = unfinished, queued

    def _pause_reading(self) -> None:
        if not self.read_paused:
            self.read_paused = True
            self.transport.pause_reading()

    def _end(self, code: int, reason: str) -> None:
        """At once: it is in the middle of a message."""
        self._has_ended = True
        if not self.close_sent and self.handshake_complete:
            self.conn.send_close(code, reason[:100])
            self.transport.write(b"".join(self.conn.data_to_send()))
        self.transport.close()
        self._forget()

    def _forget(self) -> None:
        """Frees what has come of a message: the connection's objects refer to each other, and stay until the
        collector finds them."""
        self.frames = []
        self.conn.reader.buffer.clear()
        self._hold(0, 0)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True
