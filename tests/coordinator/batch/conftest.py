"""Fixtures of this folder."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from openai import AsyncOpenAI
from support.batch_server import serving
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.text.served_model import ServedModel


@pytest.fixture
async def client(
    dispatcher: FakeDispatcher, model: ServedModel, tmp_path: Path
) -> AsyncIterator[AsyncOpenAI]:
    async with serving(dispatcher, model, tmp_path / "batches.db") as client:
        yield client
