"""Pushes bytes to one client through ASGI's ``send`` without a task per stream.

``send`` is a coroutine, but one that does not suspend while the client reads as fast as we write; so it is stepped by hand, which
costs no wake-up of a task per token. Where it does suspend (the socket is full), a task waits for it, what is written meanwhile is
joined in a buffer, and a client that lets the buffer grow beyond its bound is cut off.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, MutableMapping
from typing import Any

Send = Callable[[MutableMapping[str, Any]], Coroutine[Any, Any, None]]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Scope = MutableMapping[str, Any]
Headers = list[tuple[bytes, bytes]]


class PushChannel:
    """The response side of one HTTP exchange. Methods neither block nor await."""

    __slots__ = ("_buffer", "_cut_off", "_draining", "_last", "_max_buffered_bytes", "_message", "_send", "completed")

    def __init__(self, send: Send, *, max_buffered_bytes: int, cut_off: Callable[[], None]) -> None:
        """``cut_off`` is called once if the client is too slow, and ends the connection."""
        self._send = send
        self._max_buffered_bytes = max_buffered_bytes
        self._cut_off = cut_off
        self._message = _body(b"")
        self._buffer = bytearray()
        self._last = False
        self._draining: asyncio.Task[None] | None = None
        self.completed = False  # nothing more may be written

    @property
    def num_buffered_bytes(self) -> int:
        """Bytes that wait for the client beyond what the socket holds."""
        return len(self._buffer)

    def start(self, status: int, headers: Headers) -> None:
        """Status and headers; once, before the first write."""
        self._step({"type": "http.response.start", "status": status, "headers": headers})

    def write(self, data: bytes) -> None:
        """Part of the body."""
        if self._draining is not None or self.completed:
            self._buffer_up(data)
            return
        message = self._message
        message["body"] = data
        step = self._send(message)
        try:
            waiting = step.send(None)
        except StopIteration:
            return
        self._drain(step, waiting)

    def finish(self, data: bytes) -> None:
        """The last part of the body."""
        if self.completed:
            return
        if self._draining is not None:
            self._buffer_up(data)
            self._last = True
        else:
            self._step(_body(data, more=False))
        self.completed = True

    def close(self) -> None:
        """The client is gone: what is still written is dropped."""
        self.completed = True
        self._buffer.clear()

    def _step(self, message: dict[str, Any]) -> None:
        step = self._send(message)
        try:
            waiting = step.send(None)
        except StopIteration:
            return
        self._drain(step, waiting)

    def _buffer_up(self, data: bytes) -> None:
        if self.completed:
            return
        self._buffer += data
        if len(self._buffer) > self._max_buffered_bytes:
            self.close()
            self._cut_off()

    def _drain(self, step: Coroutine[Any, Any, None], waiting: asyncio.Future[Any] | None) -> None:
        self._message = _body(b"")  # the suspended send still owns the old one
        self._draining = asyncio.get_running_loop().create_task(self._finish_step(step, waiting))

    async def _finish_step(self, step: Coroutine[Any, Any, None], waiting: asyncio.Future[Any] | None) -> None:
        try:
            while True:
                await (asyncio.sleep(0) if waiting is None else asyncio.wait([waiting]))
                try:
                    waiting = step.send(None)
                except StopIteration:
                    break
            while self._buffer or self._last:
                data, more = bytes(self._buffer), not self._last
                self._buffer.clear()
                self._last = False
                await self._send(_body(data, more=more))
        finally:
            self._draining = None


def _body(data: bytes, *, more: bool = True) -> dict[str, Any]:
    return {"type": "http.response.body", "body": data, "more_body": more}
