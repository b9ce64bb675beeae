"""GET /admin/usage: totals of the metered usage.

?by=tenant,day         one row for each; of tenant, key, model, endpoint, priority_class, status, day
?since=2026-11-01      from this day on (or unix seconds), by default the beginning of this month
?until=2026-12-01      up to this day, by default now
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast, get_args

import anyio.to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..errors import InvalidRequest, WrongField
from ..http.answers import json_response
from ..tenants.errors import TenantsFileError
from ..tenants.settings import SQLITE
from ..tenants.usage_database import By, open_database


def usage_routes(url: str | None) -> list[Route]:
    """Empty where nothing is metered."""
    if url is None:
        return []

    async def usage(request: Request) -> Response:
        query = request.query_params
        by = groups(query.get("by", "tenant"))
        since, until = (
            moment(query.get("since", ""), month_start()),
            moment(query.get("until", ""), time.time()),
        )
        rows = await anyio.to_thread.run_sync(lambda: totals(url, by, since, until))
        return json_response({"since": since, "until": until, "usage": rows})

    return [Route("/admin/usage", usage)]


def totals(url: str, by: Sequence[By], since: float, until: float) -> list[dict[str, Any]]:
    """Opens the database for this once. Raises TenantsFileError."""
    path = url.removeprefix(SQLITE)
    if url.startswith(SQLITE) and not Path(path).exists():
        raise TenantsFileError(
            f"there is no usage database {path}; a coordinator with --tenants-file or --usage-url makes it"
        )
    database = open_database(url)
    try:
        return database.totals(by, since, until)
    finally:
        database.close()


def groups(text: str) -> list[By]:
    """Return the groups of a list with commas. Raises InvalidRequest."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in get_args(By):
            raise WrongField("by", f"{name[:40]!r} is none of {', '.join(get_args(By))}")
    return cast(list[By], names)


def moment(text: str, default: float) -> float:
    """Return the unix seconds of a date, a date and time (UTC by default), or unix seconds.

    Raises InvalidRequest.
    """
    if not text:
        return default
    try:
        return float(text)
    except ValueError:
        pass
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidRequest(
            f"{text[:40]!r} is no time; write 2026-11-30, 2026-11-30T12:00 or unix seconds", param="since"
        ) from None
    return (date if date.tzinfo else date.replace(tzinfo=UTC)).timestamp()


def month_start() -> float:
    """Return the begin of the current month, by UTC."""
    return datetime.now(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0).timestamp()
