"""Reads a request's body within bounds."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any

from .channel import Receive
from .errors import BodyTooLarge, InvalidRequest


class ClientGone(Exception):
    """The client went away before its request was whole."""


async def read_body(headers: Iterable[tuple[bytes, bytes]], receive: Receive, max_bytes: int) -> bytes:
    """Raises BodyTooLarge as soon as the size is known, announced or not."""
    announced = next((value for name, value in headers if name == b"content-length"), None)
    if announced is not None and (not announced.isdigit() or int(announced) > max_bytes):
        raise BodyTooLarge(max_bytes) if announced.isdigit() else InvalidRequest("Content-Length must be a number.")
    message = await _next(receive)
    body: bytes = message.get("body", b"")
    if len(body) > max_bytes:
        raise BodyTooLarge(max_bytes)
    if not message.get("more_body"):  # the usual case: one part
        return body
    parts = bytearray(body)
    while message.get("more_body"):
        message = await _next(receive)
        parts += message.get("body", b"")
        if len(parts) > max_bytes:
            raise BodyTooLarge(max_bytes)
    return bytes(parts)


async def _next(receive: Receive) -> MutableMapping[str, Any]:
    message: MutableMapping[str, Any] = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message
