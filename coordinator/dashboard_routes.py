"""The dashboard: its files, as they lie in ``dashboard/``, and the one feed that they ask once a second.

The files say nothing of anybody and are for everyone; the feed is an operators' page (see ``tenants/gate.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.resources import files
from time import monotonic

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from .errors import InvalidRequest, NotFound
from .live_view import LiveView
from .system_snapshot import SystemSnapshot

FEED = "/dashboard/feed"
TYPES = {"html": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Dashboard:
    """Keeps the history and serves the page. ``system`` is asked once for each second that somebody looks."""

    def __init__(self, model_name: str, system: Callable[[], SystemSnapshot]) -> None:
        self.view = LiveView(monotonic(), time.time())
        self._model_name, self._system = model_name, system
        self._boot = time.time_ns()
        self._files = {path: (body, TYPES[path.rpartition(".")[2]]) for path, body in _read_files().items()}

    def routes(self) -> list[Route]:
        return [
            Route("/", self._page),
            Route(FEED, self._feed),
            Route("/dashboard/{path:path}", self._file),
        ]

    async def _page(self, request: Request) -> Response:
        return self._answer("index.html")

    async def _file(self, request: Request) -> Response:
        return self._answer(request.path_params["path"])

    async def _feed(self, request: Request) -> Response:
        after_point, after_request = _number(request, "after_point"), _number(request, "after_request")
        state = self.view.state(monotonic(), self._system(), after_point, after_request)
        body = orjson.dumps({"boot": str(self._boot), "model": self._model_name, **state})
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    def _answer(self, path: str) -> Response:
        if path not in self._files:
            raise NotFound(f"There is no /dashboard/{path[:200]}.", code="unknown_url")
        body, kind = self._files[path]
        return Response(body, headers={**HEADERS, "content-type": kind})


def is_open(path: str) -> bool:
    """Whether everyone may have this page: the dashboard's files."""
    return path == "/" or (path.startswith("/dashboard/") and path != FEED)


def _read_files() -> dict[str, bytes]:
    """By path below ``dashboard/``: what has a type that is served."""
    root = files(__package__).joinpath("dashboard")
    found = {}
    for folder, prefix in ((root, ""), (root.joinpath("vendor"), "vendor/")):
        for entry in folder.iterdir():
            if entry.is_file() and entry.name.rpartition(".")[2] in TYPES:
                found[prefix + entry.name] = entry.read_bytes()
    return found


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise InvalidRequest(f"{name}: {text[:40]!r} is no number", param=name)
    return int(text)
