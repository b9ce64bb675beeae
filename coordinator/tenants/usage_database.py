"""The database of usage records: SQLite, or PostgreSQL by URL. A record is added once, by its id."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

from ...transport.process.private_files import OpenToOthers, make_private
from ..full_disk import is_full
from .errors import TenantsFileError
from .settings import SQLITE
from .usage_record import FIELDS, SUMS, UsageRecord

By = Literal["tenant", "key", "model", "endpoint", "priority_class", "status", "day"]
CONNECT_TIMEOUT_S = 5
_log = logging.getLogger(__name__)
POSTGRES = ("postgresql://", "postgres://")
REAL = {"started", "kv_byte_seconds", *(name for name in FIELDS if name.endswith("_s"))}
INTEGER = {name for name in FIELDS if name.endswith("_tokens")}
_TYPES = {
    name: "DOUBLE PRECISION" if name in REAL else "BIGINT" if name in INTEGER else "TEXT" for name in FIELDS
}
SCHEMA = (
    (
        "CREATE TABLE IF NOT EXISTS usage "
        f"({', '.join(f'{name} {kind} NOT NULL' for name, kind in _TYPES.items())}, PRIMARY KEY (id))"
    ),
    "CREATE INDEX IF NOT EXISTS usage_by_tenant ON usage (tenant, started)",
    "CREATE INDEX IF NOT EXISTS usage_by_time ON usage (started)",
)


class UsageDatabase(Protocol):
    """One connection, of one thread."""

    def insert(self, records: Sequence[UsageRecord]) -> None:
        """All of them or none, durably. Raises what the database raises."""

    def totals(self, by: Sequence[By], since: float, until: float) -> list[dict[str, Any]]:
        """Numbers of requests and sums, of the requests that started in [since, until), by group."""

    def prune(self, before: float) -> int:
        """Deletes the records of requests that started before; how many."""

    def close(self) -> None: ...


class SqliteUsage:
    """One file, which several processes may write."""

    def __init__(self, path: Path) -> None:
        """Opened when it is first needed where its disk is full now. Raises TenantsFileError."""
        self._path = path
        self._opened: sqlite3.Connection | None = None
        try:
            _ = self._db
        except OpenToOthers as error:
            raise TenantsFileError(str(error)) from None
        except (OSError, sqlite3.Error) as error:
            if not is_full(error):
                raise TenantsFileError(f"cannot use the usage database {path}: {error}") from None
            _log.error(
                "there is no space for the usage database %s (%s); records wait until there is", path, error
            )

    @property
    def _db(self) -> sqlite3.Connection:
        if self._opened is None:
            make_private("the usage database", self._path)
            db = sqlite3.connect(self._path, timeout=10, check_same_thread=False)
            try:
                db.execute("PRAGMA journal_mode = WAL")
                for statement in SCHEMA:
                    db.execute(statement)
                db.commit()
            except sqlite3.Error:
                db.close()
                raise
            self._opened = db
        return self._opened

    def insert(self, records: Sequence[UsageRecord]) -> None:
        with self._db:
            self._db.executemany(
                f"INSERT OR IGNORE INTO usage VALUES ({', '.join('?' * len(FIELDS))})", records
            )

    def totals(self, by: Sequence[By], since: float, until: float) -> list[dict[str, Any]]:
        day = "strftime('%Y-%m-%d', started, 'unixepoch')"
        rows = self._db.execute(_totals(by, day, "?"), (since, until)).fetchall()
        return [_named(by, row) for row in rows]

    def prune(self, before: float) -> int:
        with self._db:
            return self._db.execute("DELETE FROM usage WHERE started < ?", (before,)).rowcount

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


class PostgresUsage:
    """A table named ``usage`` in the database that the URL names."""

    def __init__(self, url: str) -> None:
        """Connects when it is first needed, and again when a connection breaks. Raises TenantsFileError
        without psycopg."""
        try:
            import psycopg
        except ImportError:
            raise TenantsFileError(
                "--usage-url: PostgreSQL needs psycopg: pip install 'splitserve[postgres]'"
            ) from None
        self._url = url
        self._driver = psycopg
        self._db: psycopg.Connection[Any] | None = None

    def insert(self, records: Sequence[UsageRecord]) -> None:
        db = self._connected()
        with db.transaction(), db.cursor() as cursor:
            cursor.executemany(
                f"INSERT INTO usage VALUES ({', '.join(['%s'] * len(FIELDS))}) ON CONFLICT DO NOTHING",
                records,
            )

    def totals(self, by: Sequence[By], since: float, until: float) -> list[dict[str, Any]]:
        day = "to_char(to_timestamp(started) AT TIME ZONE 'UTC', 'YYYY-MM-DD')"
        query: Any = _totals(by, day, "%s")
        with self._connected().transaction():
            return [_named(by, row) for row in self._connected().execute(query, (since, until)).fetchall()]

    def prune(self, before: float) -> int:
        deleted: int = self._connected().execute("DELETE FROM usage WHERE started < %s", (before,)).rowcount
        return deleted

    def close(self) -> None:
        if self._db is not None:
            self._db.close()

    def _connected(self) -> Any:
        if self._db is None or self._db.closed:
            options = "-c statement_timeout=30000"
            try:
                self._db = self._driver.connect(
                    self._url, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S, options=options
                )
            except self._driver.Error as error:
                raise TenantsFileError(f"--usage-url: {error}") from None
            for statement in SCHEMA:
                self._db.execute(statement)
        return self._db


def open_database(url: str) -> UsageDatabase:
    """Of ``sqlite:///PATH`` or ``postgresql://...``. Raises TenantsFileError."""
    if url.startswith(SQLITE):
        return SqliteUsage(Path(url.removeprefix(SQLITE)))
    if url.startswith(POSTGRES):
        return PostgresUsage(url)
    raise TenantsFileError(
        f"--usage-url: {url.partition(':')[0]!r} is not known; give sqlite:///PATH or "
        "postgresql://USER@HOST/DATABASE"
    )


def _totals(by: Sequence[By], day: str, mark: str) -> str:
    assert set(by) <= set(get_args(By)), by
    groups = [day if name == "day" else name for name in by]
    columns = ", ".join([*groups, "count(*)", *(f"sum({name})" for name in SUMS)])
    where = f"FROM usage WHERE started >= {mark} AND started < {mark}"
    numbers = ", ".join(str(n + 1) for n in range(len(groups)))
    if by:
        return f"SELECT {columns} {where} GROUP BY {numbers} ORDER BY {numbers}"
    return f"SELECT {columns} {where}"


def _named(by: Sequence[By], row: Sequence[Any]) -> dict[str, Any]:
    named = dict(zip((*by, "requests", *SUMS), row, strict=True))
    return {n: float(v or 0) if n in REAL else int(v or 0) if n in INTEGER else v for n, v in named.items()}
