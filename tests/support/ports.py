"""A port that a test leaves and comes back to."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_port() -> Iterator[str]:
    """Return tcp://127.0.0.1:PORT, to be bound by number again and again: the system gives it to no other
    process meanwhile."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("127.0.0.1", 0))  # and does not listen
        yield f"tcp://127.0.0.1:{kept.getsockname()[1]}"
