"""The dashboard: its files, as they lie in ``page/``, and the feed that they ask once a second; and /docs.

The files hold no data and are for everyone; the feed is an operators' page (see
``routes/gate.py``).
"""

from __future__ import annotations

import re
import time
from importlib.resources import files
from time import monotonic

import orjson
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from ...transport.latency_bounds import attainment, notation, parse_bounds
from ..errors import NotFound, WrongField
from ..metrics.efficiency import Efficiency
from ..metrics.objectives import Objectives
from ..serving import Servings
from .live_view import LiveView

FEED = "/dashboard/feed"
MAX_SLO = 100
TYPES = {
    "html": "text/html; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "css": "text/css; charset=utf-8",
}
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src "
    "'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Dashboard:
    """Keeps the history and serves the page, which shows one model (``?model=NAME``)."""

    def __init__(self, servings: Servings, objectives: Objectives | None = None) -> None:
        now, wall = monotonic(), time.time()
        self.views = {
            serving.model.name: LiveView(now, wall, serving.metrics.counts.requests, objectives)
            for serving in servings.all
        }
        self._servings = servings
        self._boot = time.time_ns()
        self._files = {path: (body, TYPES[path.rpartition(".")[2]]) for path, body in _read_files().items()}

    def routes(self) -> list[Route]:
        return [
            Route("/", self._page),
            Route("/docs", self._docs),
            Route(FEED, self._feed),
            Route("/dashboard/{path:path}", self._file),
        ]

    async def _page(self, request: Request) -> Response:
        return self._answer("index.html")

    async def _docs(self, request: Request) -> Response:
        if request.scope.get("raw_path", b"").endswith(b"/"):  # the page's links are relative
            return RedirectResponse("../docs", 308)
        return self._answer("docs.html")

    async def _file(self, request: Request) -> Response:
        return self._answer(request.path_params["path"])

    async def _feed(self, request: Request) -> Response:
        serving = self._servings.asked(request)
        after_point, after_request = _number(request, "after_point"), _number(request, "after_request")
        state = self.views[serving.model.name].state(
            monotonic(), serving.system(), after_point, after_request, _objectives(request)
        )
        about = {
            "boot": f"{self._boot}-{serving.model.name}",
            "model": serving.model.name,
            "models": list(self.views),
            "cost": _cost(serving.metrics.efficiency),
            "refusals": dict(serving.metrics.counts.refusals),
        }
        body = orjson.dumps({**about, **state})
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})

    def _answer(self, path: str) -> Response:
        if path not in self._files:
            raise NotFound(f"There is no /dashboard/{path[:200]}.", code="unknown_url")
        body, kind = self._files[path]
        return Response(body, headers={**HEADERS, "content-type": kind})


def _cost(efficiency: Efficiency) -> dict[str, float]:
    """What is known of it: over the last minute, and ``total`` since the start."""
    return {**efficiency.gauges(), **({"total": efficiency.cost} if efficiency.has_price else {})}


def is_open(path: str) -> bool:
    """Whether everyone may have this page: the dashboard's files, /docs. (FEED + "\\n" is the feed, too.)"""
    return path in ("/", "/docs") or (path.startswith("/dashboard/") and path.rstrip("\n") != FEED)


def _read_files() -> dict[str, bytes]:
    """By path below ``dashboard/``: what has a type that is served."""
    root = files(__package__).joinpath("page")
    found = {}
    for folder, prefix in ((root, ""), (root.joinpath("vendor"), "vendor/")):
        for entry in folder.iterdir():
            if entry.is_file() and entry.name.rpartition(".")[2] in TYPES:
                found[prefix + entry.name] = entry.read_bytes()
    return found


def _objectives(request: Request) -> Objectives | None:
    """The viewer's own, in the notation of --steer-slo; an empty one has no bound. None: the operator's."""
    text = request.query_params.get("slo")
    if text is None:
        return None
    try:
        if len(text) > MAX_SLO or not re.match(notation("ttft", "tpot"), text):
            raise ValueError("write it as ttft=2,tpot=0.05@p90, in seconds")
        bounds = parse_bounds(text)
    except ValueError as error:
        raise WrongField("slo", error) from None
    seconds = {name: bound.seconds for name, bound in bounds.items()}
    return Objectives(seconds.get("ttft"), seconds.get("tpot"), attainment(bounds))


def _number(request: Request, name: str) -> int:
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 16):
        raise WrongField(name, f"{text[:40]!r} is no number")
    return int(text)
