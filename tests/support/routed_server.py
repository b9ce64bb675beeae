"""A server of two models with a file of routes, over fake dispatchers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import yaml
from support.http_fakes import ADMIN_KEY, OPERATOR, FakeDispatcher

from splitserve.coordinator.batch.runner import BatchOptions
from splitserve.coordinator.dialects.responses_store import SqliteResponses
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.serving import Served
from splitserve.coordinator.text.served_model import ServedModel

LIMITS = HttpLimits(max_body_bytes=1 << 20, request_timeout_s=30)


@dataclass
class Routed:
    """``a`` and ``b`` are the models' names; ``chat`` is the route."""

    file: Path
    a: FakeDispatcher
    b: FakeDispatcher
    server: HttpServer
    http: httpx.AsyncClient

    def write(self, **route: object) -> str:
        """Replace the file by one route, and have it read."""
        write_routes(self.file, route)
        assert self.server.app.routes is not None
        return self.server.app.routes.refresh()

    def counts(self) -> tuple[int, int]:
        """Requests that reached each model."""
        return len(self.a.requests), len(self.b.requests)


def write_routes(file: Path, *routes: dict[str, object]) -> None:
    """Replace the file as operators should."""
    new = file.with_suffix(".new")
    new.write_text(yaml.safe_dump({"routes": [{"name": "chat", **route} for route in routes]}))
    new.replace(file)


@asynccontextmanager
async def routed_server(
    folder: Path, a: FakeDispatcher, model: ServedModel, other: ServedModel | None = None, **route: object
) -> AsyncIterator[Routed]:
    """``model``: served as ``a``; ``other``, or the same again, as ``b``."""
    b = FakeDispatcher(a.script)
    first, second = replace(model, name="a", aliases=("a-1",)), replace(other or model, name="b", aliases=())
    write_routes(file := folder / "routes.yaml", route or {"shares": {"a": 1, "b": 0}})
    parts = AppParts(
        LIMITS,
        a.system,
        Operators(ADMIN_KEY),
        batches=BatchOptions(folder / "batches"),
        ollama=True,
        responses=SqliteResponses(folder / "responses.sqlite", keep_s=3600),
        further=[Served(second, b, b.system)],
        routes_file=file,
    )
    server = HttpServer(HttpApp(a, first, parts))
    await server.start()
    url = f"http://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(base_url=url, verify=False, timeout=60, headers=OPERATOR) as http:
        yield Routed(file, a, b, server, http)
    await server.stop(grace_s=0)
    assert not a.running
    assert not b.running
    assert server.app.servings.num_open == 0
