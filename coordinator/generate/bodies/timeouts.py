"""How long a request may take: the server's limit, or less if its client says so; and what becomes of one that takes longer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, cast, get_args

from ...errors import InvalidRequest

HEADER = b"x-request-timeout"
ON_TIMEOUT_HEADER = b"x-on-timeout"
OnTimeout = Literal["timeout", "length", "error"]
"""timeout, length: the answer so far, with this finish reason; error: 504."""


def timeout_of(field: float | None, headers: Mapping[bytes, bytes], longest_s: float) -> float:
    """Seconds, from the body's ``timeout`` or else the header's. Raises InvalidRequest where it is no number or more than is allowed."""
    param, asked = "timeout", field
    if asked is None:
        param = HEADER.decode()
        asked = _number(headers.get(HEADER))
    if asked is None:
        return longest_s
    if asked > longest_s:
        raise InvalidRequest(f"{param}: at most {longest_s:g} seconds are allowed here, not {asked:g}", param=param)
    return asked


def on_timeout_of(field: OnTimeout | None, headers: Mapping[bytes, bytes], *, has_timeout: bool, deadline_error: bool) -> OnTimeout:
    """From the body's ``on_timeout`` or else the header's. Without either: ``timeout`` for a request that has set a timeout, and so knows
    more than OpenAI's words, and ``length`` for others, whose SDK may refuse a word it does not know. Raises InvalidRequest."""
    name = ON_TIMEOUT_HEADER.decode()
    asked = field or headers.get(ON_TIMEOUT_HEADER, b"").decode("latin-1")
    if not asked:
        return "error" if deadline_error else "timeout" if has_timeout else "length"
    if asked not in get_args(OnTimeout):
        raise InvalidRequest(f"{name}: {asked[:40]!r} is none of {', '.join(get_args(OnTimeout))}", param=name)
    return cast(OnTimeout, asked)


def _number(value: bytes | None) -> float | None:
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise InvalidRequest(f"{HEADER.decode()}: {value[:40]!r} is no number of seconds above 0", param=HEADER.decode())
    return seconds
