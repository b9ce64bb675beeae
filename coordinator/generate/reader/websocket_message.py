"""A WebSocket message of a client: the envelope, and in it the body of a request."""

from __future__ import annotations

from typing import Any

import orjson

from ...errors import InvalidRequest, WrongField

MAX_ID_CHARS = 256


def with_stream(body: Any) -> bytes:
    """A message's body as a request's. Raises InvalidRequest."""
    if not isinstance(body, dict):
        raise WrongField("body", "must be an object")
    return orjson.dumps({"stream": True, **body})


def parsed_message(text: str | bytes | bytearray | None) -> dict[str, Any]:
    """Raises InvalidRequest. None: it was no text."""
    if text is None:
        raise InvalidRequest("A message must be text, not binary: one JSON object.", code="invalid_json")
    try:
        message = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"A message must be valid JSON: {error}.", code="invalid_json") from error
    if (
        not isinstance(message, dict)
        or not isinstance(message.get("id"), str)
        or not 1 <= len(message["id"]) <= MAX_ID_CHARS
    ):
        raise WrongField(
            "id", f"a message must be an object with an id, a string of 1 to {MAX_ID_CHARS} characters"
        )
    if not isinstance(message.get("endpoint", ""), str):
        raise WrongField("endpoint", "must be a string")
    return message
