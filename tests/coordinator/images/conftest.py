"""A server of a model that takes images, which stores responses and speaks Ollama's API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.http_fakes import ADMIN_KEY, FakeDispatcher
from support.image_models import write_image_model

from splitserve.coordinator.dialects.responses_store import SqliteResponses
from splitserve.coordinator.http.access.operators import Operators
from splitserve.coordinator.http.limits import HttpLimits
from splitserve.coordinator.server import AppParts, HttpApp, HttpServer
from splitserve.coordinator.text.served_model import ServedModel


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder: Path = tmp_path_factory.mktemp("vision")
    write_image_model(folder, "qwen3_vl")
    return ServedModel.load(folder, "tiny")


@pytest.fixture
async def server(dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path) -> AsyncIterator[HttpServer]:
    store = SqliteResponses(tmp_path / "responses.sqlite", keep_s=3600)
    operators = Operators(ADMIN_KEY)
    parts = AppParts(HttpLimits(), dispatcher.system, operators, responses=store, ollama=True)
    server = HttpServer(HttpApp(dispatcher, model, parts))
    await server.start()
    yield server
    await server.stop(grace_s=0)
    assert not dispatcher.running
    assert server.app.overload.used["prompt_bytes"] == 0
