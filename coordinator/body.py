"""Reads a request's body within bounds."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.types import Receive

from .errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType


class ClientGone(Exception):
    """The client went away before its request was whole."""


def check_headers(headers: Mapping[bytes, bytes], max_bytes: int) -> None:
    """Raises BodyTooLarge as soon as the size is announced, UnsupportedMediaType where the body is compressed."""
    announced = headers.get(b"content-length")
    if announced is not None and (not announced.isdigit() or int(announced) > max_bytes):
        raise BodyTooLarge(max_bytes) if announced.isdigit() else InvalidRequest("Content-Length must be a number.")
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.lower() != b"identity":
        raise UnsupportedMediaType(f"Content-Encoding {encoding.decode('latin-1')[:40]!r} is not supported; send the body as it is.")


def check_is_json(headers: Mapping[bytes, bytes]) -> None:
    """Raises UnsupportedMediaType. (A form or plain text is what web pages of other sites may send without asking.)"""
    kind = headers.get(b"content-type", b"")
    if kind != b"application/json" and kind.partition(b";")[0].strip().lower() != b"application/json":
        given = f"not {kind.decode('latin-1')[:60]}" if kind else "and the request has none"
        raise UnsupportedMediaType(
            f"The Content-Type of this body must be application/json, {given}. With curl: -H 'Content-Type: application/json'."
        )


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int) -> bytes:
    """A JSON body. Raises what ``check_headers`` and ``check_is_json`` raise, and BodyTooLarge as soon as more has come."""
    check_headers(headers, max_bytes)
    check_is_json(headers)
    parts, more = bytearray(), True
    while more:
        message = await _next(receive)
        parts += message.get("body", b"")
        more = message.get("more_body", False)
        if len(parts) > max_bytes:
            raise BodyTooLarge(max_bytes)
    return bytes(parts)


async def _next(receive: Receive) -> MutableMapping[str, Any]:
    message: MutableMapping[str, Any] = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message
