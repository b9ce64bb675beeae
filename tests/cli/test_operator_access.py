"""`top`, `flip` and our own scripts reach a coordinator of this host without its admin port or its
key."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from splitserve.bench.operator_auth import OperatorAuth
from splitserve.cli.config import ConfigError
from splitserve.cli.server_access import operator_access
from splitserve.coordinator.run_folder import Door, RunFolder, announce

URL, ADMIN_URL = "http://127.0.0.1:8000", "http://127.0.0.1:8001"
KEY = {"authorization": "Bearer " + "k" * 32}


@pytest.fixture(autouse=True)
def coordinator(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Has announced itself."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = RunFolder()
    (tmp_path / "admin.key").write_text("k" * 32 + "\n")
    announce(
        folder.path,
        0,
        Door(
            url=URL, admin_url=ADMIN_URL, control_address="tcp://x:1", admin_key_file=tmp_path / "admin.key"
        ),
    )
    yield
    folder.close()


def test_flip_is_led_to_the_admin_port() -> None:
    assert operator_access("http://localhost:8000", None, admin_port=True) == (ADMIN_URL, KEY)
    assert operator_access("http://localhost:8000", None) == (URL, KEY)


def test_what_is_elsewhere_gets_no_key_but_the_one_that_is_given(tmp_path: Path) -> None:
    assert operator_access("http://far:8000", None, admin_port=True) == ("http://far:8000", {})
    (tmp_path / "far.key").write_text("f" * 32)
    (tmp_path / "far.key").chmod(0o600)
    assert operator_access("http://far:8000", tmp_path / "far.key") == (
        "http://far:8000",
        {"authorization": "Bearer " + "f" * 32},
    )
    (tmp_path / "far.key").chmod(0o644)
    with pytest.raises(
        ConfigError, match=r"--admin-key-file: .*far.key is open to other users \(mode 0644\); run: chmod 600"
    ):
        operator_access("http://far:8000", tmp_path / "far.key")


def test_scripts_show_the_key_once_they_are_asked_for_it() -> None:
    seen = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.headers.get("authorization"))
        return httpx.Response(200 if request.headers.get("authorization") else 401)

    with httpx.Client(transport=httpx.MockTransport(answer), auth=OperatorAuth()) as http:
        assert [http.get(f"{URL}/metrics").status_code for _ in range(2)] == [200, 200]
        assert http.get(f"{URL}/v1/models", headers={"authorization": "Bearer mine"}).status_code == 200
    assert seen == [None, KEY["authorization"], KEY["authorization"], "Bearer mine"]
