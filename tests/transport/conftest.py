from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from splitserve.transport.movers import parcel


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(autouse=True)
def small_parcels(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that puts into the tests' small pools (support/kv_pools.py) take several."""
    monkeypatch.setattr(parcel, "PARCEL_BYTES", 2 << 20)
