"""``splitserve keys ...``: tenants, tiers and keys in the tenants file. Running coordinators notice within a
second."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from ..coordinator.tenants.errors import TenantsFileError
from ..coordinator.tenants.limits import TIER_LIMIT_NAMES
from ..coordinator.tenants.store import NewKey, TenantStore
from ..traces.console import figures_table, result_console
from .key_settings import (
    KeysCreateSettings,
    KeysListSettings,
    KeysRevokeSettings,
    KeysRotateSettings,
    KeysTenantSettings,
    KeysTierSettings,
)


def create(settings: KeysCreateSettings) -> None:
    expires = time.time() + settings.expires_in_s if settings.expires_in_s is not None else None
    with _open(settings.tenants_file, create=True) as store:
        store.set_tenant(settings.tenant, tier=settings.tier)
        _show_key(store.create_key(settings.tenant, settings.name, settings.limits(), expires))


def rotate(settings: KeysRotateSettings) -> None:
    with _open(settings.tenants_file) as store:
        _show_key(store.rotate_key(settings.key, settings.grace_s))


def revoke(settings: KeysRevokeSettings) -> None:
    with _open(settings.tenants_file) as store:
        store.revoke_key(settings.key)
    click.echo(f"{settings.key} opens nothing any more", err=True)


def tenant(settings: KeysTenantSettings) -> None:
    with _open(settings.tenants_file, create=True) as store:
        store.set_tenant(settings.tenant, tier=settings.tier, shared_cache=settings.shared_cache)


def tier(settings: KeysTierSettings) -> None:
    with _open(settings.tenants_file, create=True) as store:
        store.set_tier(settings.tier, settings.priority_class, settings.limits())


def show(settings: KeysListSettings) -> None:
    """``splitserve keys list``."""
    with _open(settings.tenants_file) as store:
        for title, rows in (("Tiers", store.tiers()), ("Tenants", store.tenants()), ("Keys", store.keys())):
            _show(title, rows)


@contextmanager
def _open(path: Path, create: bool = False) -> Iterator[TenantStore]:
    store = TenantStore(path, create=create)
    try:
        yield store
    except sqlite3.Error as error:
        raise TenantsFileError(f"cannot use the tenants file {path}: {error}") from None
    finally:
        store.close()


def _show_key(new: NewKey) -> None:
    """The key alone goes to standard output, so that it can be piped."""
    click.echo(f"{new.id} of {new.tenant}; keep it, it is not shown again:", err=True)
    click.echo(new.key)


def _show(title: str, rows: list[dict[str, Any]]) -> None:
    columns = [name for name in (rows[0] if rows else {}) if name not in TIER_LIMIT_NAMES]
    table = figures_table(*columns, "limits", words=len(columns) + 1)
    for row in rows:
        limits = ", ".join(f"{name} {row[name]:,}" for name in TIER_LIMIT_NAMES if row.get(name))
        table.add_row(*(_text(name, row) for name in columns), limits)
    result_console().print(title, table, "", sep="\n", markup=False)


def _text(name: str, row: Mapping[str, Any]) -> str:
    value = row[name]
    if value is None:
        return ""
    if name in ("created", "expires"):
        return datetime.fromtimestamp(value, UTC).isoformat(" ", "seconds")
    return str(value)
