"""Bytes that each tenant has stored in an SQLite file. Triggers count them: any statement of any process that
adds or deletes a row does so in the same transaction."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

from prometheus_client import Metric
from prometheus_client.core import GaugeMetricFamily

from .errors import InvalidRequest

ROW_BYTES = 1024
"""What a row counts beside its content: names, and its place in indexes."""
LOOK_EVERY_S = 5.0
MAX_TENANTS = 100
"""Tenants in /metrics, those that store most."""
TABLE = "CREATE TABLE IF NOT EXISTS stored (tenant TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID"
_ADD = "ON CONFLICT DO UPDATE SET bytes = bytes + excluded.bytes"


class StorageLimitReached(InvalidRequest):
    """A tenant may store no more. Status and wording are those of OpenAI's file storage quota."""

    code = "storage_limit_exceeded"

    def __init__(self, what: str, max_bytes: int) -> None:
        super().__init__(
            f"You have exceeded your file storage quota. This tenant is limited to {max_bytes >> 20} MiB of "
            f"{what}. Please delete old ones, or store less."
        )


def count_rows(db: sqlite3.Connection, table: str, column: str) -> None:
    """Count a table's rows from now on, and those that are there. ``column``: bytes of a row's content."""
    of_row = f"{ROW_BYTES} + {{}}.{column}"
    counted = f"SELECT tenant, sum({ROW_BYTES} + {column}) FROM {table} WHERE true GROUP BY tenant"
    for statement in (
        TABLE,
        f"INSERT INTO stored {counted} {_ADD}",
        f"CREATE TRIGGER {table}_in AFTER INSERT ON {table} BEGIN "
        f"INSERT INTO stored VALUES (new.tenant, {of_row.format('new')}) {_ADD}; END",
        f"CREATE TRIGGER {table}_out AFTER DELETE ON {table} BEGIN "
        f"UPDATE stored SET bytes = bytes - ({of_row.format('old')}) WHERE tenant = old.tenant; END",
        f"CREATE TRIGGER {table}_changed AFTER UPDATE OF {column} ON {table} BEGIN "
        f"UPDATE stored SET bytes = bytes + new.{column} - old.{column} WHERE tenant = new.tenant; END",
    ):
        db.execute(statement)


def stored_by(db: sqlite3.Connection, tenant: str) -> int:
    """Return the bytes that a tenant has stored."""
    row = db.execute("SELECT bytes FROM stored WHERE tenant = ?", (tenant,)).fetchone()
    return 0 if row is None else int(row[0])


def check_room(db: sqlite3.Connection, tenant: str, more: int, max_bytes: int | None, what: str) -> None:
    """Raises StorageLimitReached. In the transaction that stores ``more`` bytes."""
    if max_bytes is not None and stored_by(db, tenant) + more > max_bytes:
        raise StorageLimitReached(what, max_bytes)


def stored_in(path: Path) -> dict[str, int]:
    """Return the bytes of every tenant in a file, the most first; none of a file that is not there yet."""
    query = "SELECT tenant, bytes FROM stored WHERE bytes > 0 ORDER BY bytes DESC"
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            found: dict[str, int] = dict(db.execute(query).fetchall())
            return found
    except (OSError, sqlite3.Error):
        return {}  # its disk was full when it was to be made, or is gone


class StoredBytes:
    """A collector for /metrics of each tenant's bytes in SQLite files, named by their contents."""

    def __init__(self, files: Mapping[str, Path] | None = None) -> None:
        self._files = files or {}
        self._found: dict[str, dict[str, int]] = {}

    async def follow(self) -> None:
        """Look every few seconds, on a thread, until cancelled."""
        while True:
            for what, path in self._files.items():
                self._found[what] = await asyncio.to_thread(stored_in, path)
            await asyncio.sleep(LOOK_EVERY_S)

    def collect(self) -> Iterator[Metric]:
        """Yield the bytes of the tenants that have stored most."""
        stored = GaugeMetricFamily(
            "splitserve_tenant_stored_bytes", "What a tenant has stored.", labels=["tenant", "what"]
        )
        for what, found in self._found.items():
            for tenant, num_bytes in list(found.items())[:MAX_TENANTS]:
                stored.add_metric([tenant, what], num_bytes)
        yield stored

    def describe(self) -> list[Metric]:
        return []


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit all of it or nothing, within another one with that. (SQLite itself may have rolled it back on a
    full disk.)"""
    if db.in_transaction:
        yield
        return
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise
