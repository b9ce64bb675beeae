"""Fixtures of this folder."""

from __future__ import annotations

import httpx
import pytest
from support.asked_fields import Asked
from support.http_fakes import FakeDispatcher

from splitserve.coordinator.text.served_model import ServedModel


@pytest.fixture
def asked(http: httpx.AsyncClient, dispatcher: FakeDispatcher, model: ServedModel) -> Asked:
    return Asked(http, dispatcher, model)
