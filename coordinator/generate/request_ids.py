"""Names of requests: the server's own, which are unique, and those that clients give."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # it imports the HTTP server, which the reader's process starts without
    from ..http.call import Endpoint


HEADER = b"x-request-id"
CLIENT_ID = re.compile(r"[A-Za-z0-9_.:+/=@-]{1,128}")
STEMS: dict[Endpoint, str] = {
    "/v1/chat/completions": "chatcmpl", "/v1/completions": "cmpl", "/invocations": "inv",
    "/v1/embeddings": "embd", "/v1/rerank": "rerank", "/v1/score": "score",
}  # fmt: skip
"""How ids begin."""


class RequestIds:
    """Makes the ids of one process."""

    def __init__(self) -> None:
        self._stem = secrets.token_hex(10)
        self._count = 0

    def new(self, endpoint: Endpoint, client_id: str = "") -> str:
        """Return an id that no other request has. It holds the client's, so that a log can be searched for
        it."""
        self._count += 1
        own = f"{self._stem}{self._count:012x}"
        return f"{STEMS[endpoint]}-{client_id}-{own}" if client_id else f"{STEMS[endpoint]}-{own}"


def client_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the id of the request's ``X-Request-Id``; empty if it has none, or not the form of one."""
    value = headers.get(HEADER, b"").decode("latin-1")
    return value if CLIENT_ID.fullmatch(value) else ""
