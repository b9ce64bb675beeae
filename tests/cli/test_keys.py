"""``splitserve keys``."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitserve.cli.key_settings import KeysListSettings
from splitserve.cli.keys import show
from splitserve.coordinator.tenants.store import TenantStore


def test_names_are_listed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those in brackets were taken for markup, and vanished."""
    store, name = TenantStore(tmp_path / "tenants.sqlite", create=True), "[acme]"
    store.set_tenant(name, tier="standard")
    store.create_key(name)
    store.close()
    show(KeysListSettings(tenants_file=tmp_path / "tenants.sqlite"))
    assert capsys.readouterr().out.count(name) == 2, "as a tenant, and of its key"
