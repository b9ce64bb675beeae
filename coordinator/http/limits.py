"""Bounds on what one HTTP client may ask for."""

from __future__ import annotations

from dataclasses import dataclass

LARGE_BODY_BYTES = 64 << 10
"""A larger body is read in another process. Measured: the loop parses one of this size in 2 to 17 ms,
whatever it holds."""
MIN_BYTES_PER_S = 16 << 10
"""Least rate of a body or WebSocket message, beyond the time that every request has."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes in bytes, times in seconds."""

    max_body_bytes: int = 16 << 20
    request_timeout_s: float = 600.0
    receive_timeout_s: float = 30.0
    """A request or WebSocket message must be here whole within it, and one second more for each 16 KiB of its
    body."""
    max_buffered_bytes: int = 1 << 20
    """Text that may wait for a client that reads too slowly; beyond it the connection is cut."""
    max_choices: int = 4096
    """Prompts times ``n`` of one request."""
