"""How long a request may take: the server's limit, or less if its client says so."""

from __future__ import annotations

from collections.abc import Mapping

from .errors import InvalidRequest

HEADER = b"x-request-timeout"


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
