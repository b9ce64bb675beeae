"""Operators' requests: POST /admin/drain/{worker}, /admin/flip/{worker}?to=ROLE, /admin/log-level/{level},
GET /admin/flips. The gate (``routes/gate.py``) checks their key."""

from __future__ import annotations

import logging
from typing import Protocol, cast, get_args

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...transport.messages.messages import Role
from ...transport.process.settings import LogLevel
from ..errors import InvalidRequest, NotFound, WrongField
from ..http.answers import json_response
from ..lifecycle.request import Dispatcher

_log = logging.getLogger(__name__)


class Fleet(Dispatcher, Protocol):
    """The serving system, and what an operator may do with its workers."""

    def flip(self, worker_id: str, role: Role, timeout_s: float | None) -> dict[str, object] | str | None:
        """Has a worker change its role in place. Returns the change as it stands, JSON-ready; a sentence
        where it cannot; None: no such worker."""

    def flips(self) -> list[dict[str, object]]:
        """The latest changes of roles, JSON-ready, oldest first."""


class AdminRoutes:
    """For an application behind the gate."""

    def __init__(self, dispatcher: Fleet) -> None:
        self._dispatcher = dispatcher

    def routes(self) -> list[Route]:
        return [
            Route("/admin/drain/{worker:path}", self._drain, methods=["POST"]),
            Route("/admin/flip/{worker:path}", self._flip, methods=["POST"]),
            Route("/admin/flips", self._flips, methods=["GET"]),
            Route("/admin/log-level/{level}", self._set_log_level, methods=["POST"]),
        ]

    async def _drain(self, request: Request) -> Response:
        worker_id = request.path_params["worker"]
        held = self._dispatcher.drain(worker_id, _timeout_s(request))
        if held is None:
            raise self._unknown(worker_id)
        return json_response(held, 202)

    async def _flip(self, request: Request) -> Response:
        worker_id, role = request.path_params["worker"], request.query_params.get("to", "")
        if role not in get_args(Role):
            raise WrongField("to", f"{role[:40]!r} is none of {', '.join(get_args(Role))}")
        ordered = self._dispatcher.flip(worker_id, cast(Role, role), _timeout_s(request))
        if ordered is None:
            raise self._unknown(worker_id)
        if isinstance(ordered, str):
            raise InvalidRequest(ordered, param="worker")
        return json_response(ordered, 202)

    async def _flips(self, request: Request) -> Response:
        return json_response({"flips": self._dispatcher.flips()})

    def _unknown(self, worker_id: str) -> NotFound:
        known = ", ".join(sorted(_worker_ids(self._dispatcher.snapshot()))) or "none"
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
