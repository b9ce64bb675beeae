from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from splitserve.transport.channels import channels
from splitserve.transport.movers import lease_book
from splitserve.transport.movers.tcp import source, target


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def small_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that puts into the tests' small pools (support/kv_pools.py) take several."""
    monkeypatch.setattr(lease_book, "PARCEL_BYTES", 2 << 20)


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """No peer is given up because the machine stood still for some seconds. (Tests of how peers are given up
    set their own limits.)"""
    monkeypatch.setattr(channels, "HANDSHAKE_TIMEOUT_MS", 60_000)
    monkeypatch.setattr(channels, "HEARTBEAT_TIMEOUT_MS", 60_000)
    monkeypatch.setattr(source, "CONNECT_TIMEOUT_S", 60.0)
    monkeypatch.setattr(source, "RETRY_S", 60.0)
    monkeypatch.setattr(target, "HANDSHAKE_TIMEOUT_S", 60.0)
