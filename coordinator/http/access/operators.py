"""Operators: clients that send the admin key, and browsers with a session that was opened by it.

    Authorization: Bearer KEY           any request
    the session's cookie                GET and HEAD only: nothing changes by it
    POST /dashboard/login {"key": KEY}  gives a browser its session
    GET  /dashboard/login?token=TOKEN   the same, once, for a link that `splitserve up` prints

A client's address is never asked: behind a proxy, and to a page in somebody's browser, everything seems
local. Sessions and tokens are signed with the admin key, so that every coordinator process accepts them and a
new key ends them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import Route

from ....transport.process.private_files import require_private, write_private
from ...errors import Forbidden, Unauthorized
from ...tenants.api_key import bearer
from ...validation import validated
from ..body import read_body

LOGIN = "/dashboard/login"
MIN_KEY_CHARS = 16
USED = "../#link-used"
SESSION_S = 7 * 86_400
TOKEN_S = 3600
MAX_BODY_BYTES = 4096
HEADERS = {"cache-control": "no-store", "referrer-policy": "no-referrer"}
WHERE = "It is in the coordinator's --admin-key-file, else in the file that its log or `splitserve up` names."
MISSING = (
    "This is for operators: send the admin key as `Authorization: Bearer KEY`, or give the command its file "
    f"by --admin-key-file. {WHERE}"
)
WRONG = f"This is not the admin key. {WHERE}"


class LoginBody(BaseModel):
    """POST /dashboard/login."""

    model_config = ConfigDict(extra="forbid", defer_build=True)

    key: Annotated[str, Field(max_length=1024)]


class Operators:
    """Checks requests against one admin key."""

    def __init__(self, key: str, clock: Callable[[], float] = time.time, file: Path | None = None) -> None:
        """``clock``: unix seconds; ``file``: of the key, for ``refresh``."""
        self._clock, self._file = clock, file
        self._used: dict[str, float] = {}  # tokens, until they would expire anyway
        self._go_by(key)

    def refresh(self) -> str:
        """Go by the key's file where it has changed, and return its name. Raises as ``admin_key`` does."""
        if self._file is None or (key := admin_key(self._file)).encode() == self._key:
            return ""
        self._go_by(key)
        return str(self._file)

    def _go_by(self, key: str) -> None:
        self._key = key.encode()
        self._cookie = f"splitserve-{hashlib.sha256(self._key).hexdigest()[:8]}"

    def check(self, request: HTTPConnection) -> None:
        """Raises Unauthorized or Forbidden."""
        safe = request.scope.get("method") in ("GET", "HEAD")
        if "origin" in request.headers and not safe:
            raise Forbidden("This does not answer to web pages; use the command line.")
        given = bearer(request.headers.get("authorization", "").encode("latin-1"))
        if given:
            if not hmac.compare_digest(given, self._key):
                raise Unauthorized(WRONG)
        elif not safe or not self._is_valid("session", request.cookies.get(self._cookie, "")):
            raise Unauthorized(MISSING)

    def routes(self) -> list[Route]:
        """The login; open to everyone."""
        return [Route(LOGIN, self._by_token, methods=["GET"]), Route(LOGIN, self._by_key, methods=["POST"])]

    def token(self) -> str:
        """Opens one session, within TOKEN_S."""
        return self._sign("token", f"{self._clock() + TOKEN_S:.0f}-{secrets.token_hex(8)}")

    async def _by_key(self, request: Request) -> Response:
        body = await read_body(dict(request.scope["headers"]), request.receive, MAX_BODY_BYTES)
        key = validated(LoginBody, body).key
        if not hmac.compare_digest(key.strip().encode(), self._key):
            raise Unauthorized(WRONG)
        return self._with_session(request, Response(status_code=204, headers=HEADERS))

    async def _by_token(self, request: Request) -> Response:
        """Open a session by a token. A used or expired one leads to the dashboard, which asks for the key."""
        token, now = request.query_params.get("token", ""), self._clock()
        self._used = {used: expires for used, expires in self._used.items() if expires > now}
        if not self._is_valid("token", token) or token in self._used:
            return Response(status_code=303, headers={**HEADERS, "location": USED})
        self._used[token] = now + TOKEN_S
        return self._with_session(request, Response(status_code=303, headers={**HEADERS, "location": "../"}))

    def _with_session(self, request: Request, answer: Response) -> Response:
        session = self._sign("session", f"{self._clock() + SESSION_S:.0f}")
        secure = request.url.scheme == "https"
        answer.set_cookie(
            self._cookie, session, max_age=SESSION_S, httponly=True, samesite="strict", secure=secure
        )
        return answer

    def _sign(self, kind: str, text: str) -> str:
        """``text`` begins with when it expires."""
        return f"{text}.{hmac.new(self._key, f'{kind} {text}'.encode(), hashlib.sha256).hexdigest()}"

    def _is_valid(self, kind: str, signed: str) -> bool:
        text = signed.rpartition(".")[0]
        return (
            hmac.compare_digest(self._sign(kind, text).encode(), signed.encode())
            and float(text.partition("-")[0]) > self._clock()
        )


def make_admin_key(path: Path) -> Path:
    """Writes a new key."""
    write_private(path, secrets.token_hex(32) + "\n")
    return path


def admin_key(path: Path) -> str:
    """The key in this file. Raises OSError, also where other users may open it, and ValueError where it is no
    good."""
    require_private("the admin key", [path])
    key = path.read_text(encoding="utf-8").strip()
    if len(key) < MIN_KEY_CHARS or not key.isascii():
        raise ValueError(
            f"{path}: an admin key has at least {MIN_KEY_CHARS} ASCII characters; `openssl rand "
            "-hex 32` makes one"
        )
    return key
