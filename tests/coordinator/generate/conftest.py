"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from support.asked_fields import Asked
from support.http_fakes import FakeDispatcher
from support.routed_server import Routed, routed_server

from splitserve.coordinator.text.embeddings import EmbeddingRules
from splitserve.coordinator.text.served_model import ServedModel


@pytest.fixture
def asked(http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel) -> Asked:
    return Asked(http, dispatcher, model)


@pytest.fixture
async def routed(dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path) -> AsyncIterator[Routed]:
    served = replace(model, embeddings=EmbeddingRules(size=4))
    async with routed_server(tmp_path, dispatcher, served, replace(served, longest=300)) as server:
        yield server
