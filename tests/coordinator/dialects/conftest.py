"""A server that stores responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.http_fakes import ADMIN_KEY, FakeDispatcher

from splitserve.coordinator.dialects.responses_store import SqliteResponses
from splitserve.coordinator.dialects.stored_response import ResponseStore
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel


@pytest.fixture
def store(tmp_path: Path) -> ResponseStore:
    return SqliteResponses(tmp_path / "responses.sqlite", keep_s=3600)


@pytest.fixture
async def server(
    dispatcher: FakeDispatcher, model: ServedModel, limits: HttpLimits, store: ResponseStore
) -> AsyncIterator[HttpServer]:
    app = HttpApp(
        dispatcher, model, AppParts(limits, dispatcher.system, Operators(ADMIN_KEY), responses=store)
    )
    server = HttpServer(app)
    await server.start()
    yield server
    await server.stop(grace_s=0)
    assert not dispatcher.running
    assert server.app.metrics.num_open == 0
