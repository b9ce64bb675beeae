"""Reads a request's body within bounds."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive

from ..errors import BodyTooLarge, Forbidden, InvalidRequest, UnsupportedMediaType
from .overload import Overload


class ClientGone(Exception):
    """The client went away before its request was whole."""


def check_headers(headers: Mapping[bytes, bytes], max_bytes: int) -> None:
    """Raises BodyTooLarge as soon as the size is announced, UnsupportedMediaType where the body is
    compressed."""
    announced = headers.get(b"content-length", b"0")
    if not announced.isdigit():
        raise InvalidRequest("Content-Length must be a number.")
    if int(announced) > max_bytes:
        raise BodyTooLarge(max_bytes)
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


def check_is_own(headers: Mapping[bytes, bytes]) -> None:
    """Raises Forbidden where a browser states that another site's page sends this, and hides which. (The
    access gate checks an ``Origin``.)"""
    if b"origin" not in headers and headers.get(b"sec-fetch-site") in (b"cross-site", b"same-site"):
        message = "Web pages of other origins need an Origin header here: fetch with mode 'cors'."
        raise Forbidden(message, code="origin_not_allowed")


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, max_bytes: int) -> bytes:
    """A small one, of JSON. Raises what ``check_headers`` and ``check_is_json`` raise, and BodyTooLarge as
    soon as more has come."""
    async with held_body(headers, receive, max_bytes, None) as body:
        return bytes(body)


@asynccontextmanager
async def held_body(
    headers: Mapping[bytes, bytes],
    receive: Receive,
    max_bytes: int,
    overload: Overload | None,
    check_source: Callable[[Mapping[bytes, bytes]], None] = check_is_json,
) -> AsyncIterator[bytearray]:
    """One that ``overload`` counts for as long as it is needed. Raises as ``read_body`` does.

    ``check_source`` keeps other sites' pages from sending it: ``check_is_json``, or ``check_is_own`` for
    clients that name no content type."""
    check_headers(headers, max_bytes)
    check_source(headers)
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
