"""What handlers of Starlette's requests share: whose the request is, and answers of JSON."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response

from ..errors import ApiError, WrongField
from ..tenants.limits import ANONYMOUS, Account


def account_of(request: Request) -> Account:
    """Return the account that the gate has found for a request."""
    account: Account = request.scope.get("account", ANONYMOUS)
    return account


def json_response(value: Any, status: int = 200) -> Response:
    return Response(orjson.dumps(value), status, media_type="application/json")


def error_response(error: ApiError, path: str) -> Response:
    """Return an error in the form that clients of this path know."""
    headers = {name.decode(): value.decode() for name, value in error.headers()}
    return Response(error.body_for(path), error.status, headers, media_type="application/json")


def limit_of(request: Request, default: int, most: int) -> int:
    """Return the length of the page that is asked for. Raises InvalidRequest."""
    text = request.query_params.get("limit", str(default))
    if not text.isascii() or not text.isdigit() or len(text) > 6 or not 1 <= int(text) <= most:
        raise WrongField("limit", f"must be a number from 1 to {most}")
    return int(text)


def page_of(items: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """Return a page of a list, as OpenAI's API has them."""
    ends = {"first_id": items[0]["id"] if items else None, "last_id": items[-1]["id"] if items else None}
    return {"object": "list", "data": items, **ends, "has_more": more}


def page_response(items: list[dict[str, Any]], *, more: bool) -> Response:
    return json_response(page_of(items, more=more))
