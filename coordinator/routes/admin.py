"""Operators' requests: POST /admin/drain/{worker}, /admin/flip/{worker}?to=ROLE, /admin/log-level/{level},
GET /admin/flips. The gate (``routes/gate.py``) checks their key."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import cast, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...transport.messages.messages import Role
from ...transport.process.settings import LogLevel
from ..errors import InvalidRequest, NotFound, WrongField
from ..http.answers import json_response
from ..lifecycle.request import Fleet

_log = logging.getLogger(__name__)


class AdminRoutes:
    """For an application behind the gate. A worker is one of the model that ``?model=`` names, or else the
    first of this name. ``fleets``: by each name of their models."""

    def __init__(self, fleets: Mapping[str, Fleet]) -> None:
        self._all = fleets

    def routes(self) -> list[Route]:
        return [
            Route("/admin/drain/{worker:path}", self._drain, methods=["POST"]),
            Route("/admin/flip/{worker:path}", self._flip, methods=["POST"]),
            Route("/admin/flips", self._flips, methods=["GET"]),
            Route("/admin/log-level/{level}", self._set_log_level, methods=["POST"]),
        ]

    async def _drain(self, request: Request) -> Response:
        worker_id = request.path_params["worker"]
        timeout_s = _timeout_s(request)
        for fleet in self._fleets(request):
            if (held := fleet.drain(worker_id, timeout_s)) is not None:
                return json_response(held, 202)
        raise self._unknown(request)

    async def _flip(self, request: Request) -> Response:
        worker_id, role = request.path_params["worker"], request.query_params.get("to", "")
        if role not in get_args(Role):
            raise WrongField("to", f"{role[:40]!r} is none of {', '.join(get_args(Role))}")
        timeout_s = _timeout_s(request)
        for fleet in self._fleets(request):
            ordered = fleet.flip(worker_id, cast(Role, role), timeout_s)
            if isinstance(ordered, str):
                raise InvalidRequest(ordered, param="worker")
            if ordered is not None:
                return json_response(ordered, 202)
        raise self._unknown(request)

    async def _flips(self, request: Request) -> Response:
        return json_response({"flips": [flip for fleet in self._fleets(request) for flip in fleet.flips()]})

    def _fleets(self, request: Request) -> list[Fleet]:
        asked = request.query_params.get("model")
        if asked is None:
            return [*{id(fleet): fleet for fleet in self._all.values()}.values()]
        if asked not in self._all:
            raise NotFound(
                f"There is no model {asked[:200]!r}; there are: {', '.join(self._all)}.", param="model"
            )
        return [self._all[asked]]

    def _unknown(self, request: Request) -> NotFound:
        ids = [id for fleet in self._fleets(request) for id in _worker_ids(fleet.snapshot())]
        worker_id, known = request.path_params["worker"], ", ".join(sorted(ids)) or "none"
        return NotFound(f"There is no worker {worker_id!r} here; there are: {known}.", param="worker")

    async def _set_log_level(self, request: Request) -> Response:
        level = request.path_params["level"]
        if level not in get_args(LogLevel):
            raise WrongField("level", f"{level[:40]!r} is none of {', '.join(get_args(LogLevel))}")
        logging.getLogger().setLevel(level.upper())
        _log.warning("log level is now %s", level)
        return json_response({"level": level})


def _timeout_s(request: Request) -> float | None:
    text = request.query_params.get("timeout_s")
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = -1.0
    if not 0 <= timeout_s <= 3600:
        raise WrongField("timeout_s", f"{text[:40]!r} is no number of seconds from 0 to 3600")
    return timeout_s


def _worker_ids(snapshot: dict[str, object]) -> list[str]:
    workers = snapshot.get("workers")
    return [str(worker["worker_id"]) for worker in workers] if isinstance(workers, list) else []
