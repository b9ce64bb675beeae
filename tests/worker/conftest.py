"""What tests of the KV store in an object store share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.kv_store_rig import Rig, in_bucket
from support.played_bucket import PlayedBucket, played_bucket


@pytest.fixture
def bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PlayedBucket]:
    with played_bucket(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = in_bucket("s3://blocks/team/kv")
    yield made
    made.close()
