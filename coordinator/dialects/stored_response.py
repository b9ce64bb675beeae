"""The interface of the two stores of responses, one stored response, and bounds on reading them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple, Protocol

import orjson

from ..errors import NotFound
from .responses_items import Item

RUNNING = ("queued", "in_progress")
MAX_PAGE_BYTES = 16 << 20
"""Bytes of a list of responses; a single larger response is a list, too."""
MAX_TURNS, MAX_INPUT_BYTES = 1000, 16 << 20
"""Responses of one conversation that are read back, and bytes of their input: more fits no context."""
GRACE_S = 10.0
"""Seconds after the deadline of a response that runs in the background: then its process has died."""


class Stored(NamedTuple):
    """One stored response."""

    id: str
    response: dict[str, Any]
    input: list[Item]
    previous: str | None
    running: bool
    input_bytes: int = 0


class ResponseStore(Protocol):
    """All methods raise StorageFull, or Unavailable where the store does not answer."""

    async def close(self) -> None:
        """Release it; nothing is asked of it any more."""

    async def save(
        self,
        tenant: str,
        response: dict[str, Any],
        input: Sequence[Item],
        *,
        deadline: float = 0.0,
        events: Iterable[dict[str, Any]] = (),
        max_bytes: int | None = None,
    ) -> bool:
        """Write a response as it stands. Return False if it was deleted or cancelled meanwhile.

        ``deadline``: unix seconds by which a running one has ended. ``events``: new ones, to be kept.
        ``max_bytes``: above which the tenant's oldest are deleted. Raises StorageLimitReached where this one
        alone is larger.
        """

    async def found(self, tenant: str, id: str) -> Stored:
        """Return a response. Raises NotFound."""

    async def conversation(self, tenant: str, id: str) -> list[Item]:
        """Return the items of a conversation, up to the output of this response. Raises NotFound."""

    async def items(self, tenant: str, ids: Sequence[str]) -> dict[str, Item]:
        """Return those items of stored responses that there are, by id: of MAX_INPUT_BYTES at most."""

    async def newest(self, tenant: str, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        """Return stored responses, newest first: MAX_PAGE_BYTES or one; and whether there are more. Raises
        NotFound."""

    async def events(self, id: str, after: int) -> list[bytes]:
        """Return the kept events of a response with higher numbers, as JSON."""

    async def delete(self, tenant: str, id: str) -> None:
        """Delete a response. Raises NotFound."""

    async def cancel(self, tenant: str, id: str) -> Stored:
        """Cancel a response that runs in the background, on whichever process. Raises NotFound."""


def page_of(found: Sequence[str | bytes], limit: int) -> tuple[list[dict[str, Any]], bool]:
    """Return the page's responses, and whether there are more. ``found``: up to one more than fit."""
    most = next((i for i, size in enumerate(accumulate(map(len, found))) if size > MAX_PAGE_BYTES), limit)
    page = found[: min(limit, max(1, most))]
    return [orjson.loads(response) for response in page], len(found) > len(page)


def stored_of(
    id: str, response: str | bytes, input: str | bytes, previous: str | None, status: str, deadline: float
) -> Stored:
    """Return a response as it lies in a store. One that has not ended in time has failed."""
    found = orjson.loads(response)
    if status in RUNNING and time.time() > deadline + GRACE_S:
        status = "failed"
        message = "The server was stopped before the response was complete."
        found |= {"status": status, "error": {"code": "server_error", "message": message}}
    return Stored(id, found, orjson.loads(input), previous, status in RUNNING, len(input))


def item_key(tenant: str, id: str) -> str:
    """Return the key of an item: its id may be a client's own, and another tenant's, too."""
    return f"{len(id)}:{id}:{tenant}"


def not_found(id: str, param: str) -> NotFound:
    """Return the error where a tenant has no such response."""
    message = f"{param}: there is no stored response {id!r}; it may have expired, or was not to be stored"
    return NotFound(message, param=param)
