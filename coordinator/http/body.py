"""Reads a request's body within bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive

from ..errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType
from .overload import Overload


class ClientGone(Exception):
    """The client went away before its request was whole."""


def check_headers(headers: Mapping[bytes, bytes], max_bytes: int) -> None:
    """Raises BodyTooLarge as soon as the size is announced, UnsupportedMediaType where the body is
    compressed."""
    announced = headers.get(b"content-length")
    if announced is not None and (not announced.isdigit() or int(announced) > max_bytes):
        raise (
            BodyTooLarge(max_bytes)
            if announced.isdigit()
            else InvalidRequest("Content-Length must be a number.")
        )
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.lower() != b"identity":
        raise UnsupportedMediaType(
            f"Content-Encoding {encoding.decode('latin-1')[:40]!r} is not supported; send the body as it is."
        )


def check_is_json(headers: Mapping[bytes, bytes]) -> None:
    """Raises UnsupportedMediaType. (A form or plain text is what web pages of other sites may send without
    asking.)"""
    kind = headers.get(b"content-type", b"")
    if kind != b"application/json" and kind.partition(b";")[0].strip().lower() != b"application/json":
        given = f"not {kind.decode('latin-1')[:60]}" if kind else "and the request has none"
        raise UnsupportedMediaType(
            f"The Content-Type of this body must be application/json, {given}. With curl: -H "
            "'Content-Type: application/json'."
        )


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int) -> bytes:
    """A small one, of JSON. Raises what ``check_headers`` and ``check_is_json`` raise, and BodyTooLarge as
    soon as more has come."""
    async with held_body(headers, receive, max_bytes, None) as body:
        return bytes(body)


@asynccontextmanager
async def held_body(
    headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int, overload: Overload | None
) -> AsyncIterator[bytearray]:
    """One that ``overload`` counts for as long as it is needed. Raises as ``read_body`` does."""
    check_headers(headers, max_bytes)
    check_is_json(headers)
    parts, held, more = bytearray(), 0, True
    try:
        while more:
            message = await _next(receive)
            part = message.get("body", b"")
            if overload is not None:
                overload.hold("body_bytes", len(part))
                held += len(part)
            parts += part
            more = message.get("more_body", False)
            if len(parts) > max_bytes:
                raise BodyTooLarge(max_bytes)
        yield parts
    finally:
        if overload is not None:
            overload.give_back("body_bytes", held)


async def _next(receive: Receive) -> MutableMapping[str, Any]:
    message: MutableMapping[str, Any] = await receive()
    if message["type"] == "http.disconnect":
        raise ClientGone
    return message
