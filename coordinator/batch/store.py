"""Files and batches in SQLite. One file serves all coordinators of a host; each answered request is there for
good at once."""

from __future__ import annotations

import logging
import secrets
import sqlite3
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import orjson

from ...transport.process.private_files import make_private
from ..full_disk import is_full
from .lines import Line, Used

_log = logging.getLogger(__name__)

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
NOTHING = Used()
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, num_bytes INTEGER NOT NULL, content BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS batches (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, key_id INTEGER NOT NULL,
    status TEXT NOT NULL, details BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS lines (
    batch TEXT NOT NULL, number INTEGER NOT NULL, custom_id TEXT NOT NULL, body BLOB NOT NULL,
    status INTEGER, output BLOB, PRIMARY KEY (batch, number)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS used (
    batch TEXT PRIMARY KEY, prompt INTEGER NOT NULL, cached INTEGER NOT NULL,
    completion INTEGER NOT NULL, reasoning INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS open_lines ON lines (number, batch) WHERE status IS NULL;
"""


class StoredFile(NamedTuple):
    """A file without its content."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created: float  # unix seconds


class StoredBatch(NamedTuple):
    """``details``: what OpenAI's object has beside id, status and counts. ``key_id``: of the key that pays;
    0: none was asked for."""

    id: str
    status: Status
    details: dict[str, Any]
    key_id: int
    tenant: str


class Counts(NamedTuple):
    total: int
    completed: int
    failed: int


class BatchStore:
    """All methods block for a disk's time: they are called on one thread of their own."""

    def __init__(self, path: Path) -> None:
        """Opened when it is first needed where its disk is full now. Raises OpenToOthers where other users
        may read it, OSError or sqlite3.Error where it cannot be used."""
        self._path = path
        self._opened: sqlite3.Connection | None = None
        try:
            _ = self._db
        except (OSError, sqlite3.Error) as error:
            if not is_full(error):
                raise
            _log.error(
                "--batch-file: there is no space for %s (%s); batches and files are refused until there is",
                path,
                error,
            )

    @property
    def _db(self) -> sqlite3.Connection:
        if self._opened is None:
            make_private("the batch file", self._path)
            db = sqlite3.connect(self._path, timeout=30, isolation_level=None, check_same_thread=False)
            try:
                db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;" + SCHEMA)
                _forget_accounts(db)
            except sqlite3.Error:
                db.close()
                raise
            self._opened = db
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    # --- files -----------------------------------------------------------------------------------

    def add_file(self, tenant: str, filename: str, purpose: str, content: bytes, now: float) -> StoredFile:
        file = StoredFile(f"file-{secrets.token_hex(12)}", filename, purpose, len(content), now)
        self._db.execute(
            "INSERT INTO files VALUES (?, ?, ?, ?, ?, ?, ?)",
            (file.id, tenant, now, filename, purpose, len(content), content),
        )
        return file

    def file(self, tenant: str, id: str) -> StoredFile | None:
        row = self._db.execute(f"{_FILE} WHERE id = ? AND tenant = ?", (id, tenant)).fetchone()
        return None if row is None else StoredFile(*row)

    def content(self, tenant: str, id: str, at: int = 0, size: int = -1) -> bytes | None:
        query = "SELECT rowid FROM files WHERE id = ? AND tenant = ?"
        if (row := self._db.execute(query, (id, tenant)).fetchone()) is None:
            return None
        with self._db.blobopen("files", "content", row[0], readonly=True) as blob:
            blob.seek(at)
            return blob.read(size)

    def files(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, *, newest_first: bool
    ) -> list[StoredFile]:
        order = "DESC" if newest_first else "ASC"
        rows = self._db.execute(f"{_FILE} WHERE tenant = ? ORDER BY created {order}, id {order}", (tenant,))
        found = [StoredFile(*row) for row in rows if purpose is None or row[2] == purpose]
        return _page(found, after, limit)

    def delete_file(self, tenant: str, id: str) -> bool:
        return self._db.execute("DELETE FROM files WHERE id = ? AND tenant = ?", (id, tenant)).rowcount > 0

    # --- batches ---------------------------------------------------------------------------------

    def add_batch(self, tenant: str, key_id: int, details: dict[str, Any], now: float) -> StoredBatch:
        batch = StoredBatch(f"batch_{secrets.token_hex(12)}", "validating", details, key_id, tenant)
        row = (batch.id, tenant, now, key_id, batch.status, orjson.dumps(details))
        self._db.execute(
            "INSERT INTO batches (id, tenant, created, key_id, status, details) VALUES (?, ?, ?, ?, ?, ?)",
            row,
        )
        return batch

    def batch(self, tenant: str | None, id: str) -> StoredBatch | None:
        """Return a batch; ``tenant`` None: of any tenant."""
        query = f"{_BATCH} WHERE id = ? AND tenant = coalesce(?, tenant)"
        row = self._db.execute(query, (id, tenant)).fetchone()
        return None if row is None else _batch(row)

    def batches(self, tenant: str, after: str | None, limit: int) -> list[StoredBatch]:
        rows = self._db.execute(f"{_BATCH} WHERE tenant = ? ORDER BY created DESC, id DESC", (tenant,))
        return _page([_batch(row) for row in rows], after, limit)

    def open_batches(self) -> list[StoredBatch]:
        """Those that are not over, oldest first."""
        marks = ", ".join("?" * len(OPEN))
        rows = self._db.execute(f"{_BATCH} WHERE status IN ({marks}) ORDER BY created", OPEN)
        return [_batch(row) for row in rows]

    def change(
        self, id: str, status: Status, details: dict[str, Any], only_from: Collection[str] = OPEN
    ) -> StoredBatch | None:
        """A new status and new details; None, and nothing happens, where the batch is in none of
        ``only_from``."""
        with _transaction(self._db):
            batch = self.batch(None, id)
            if batch is None or batch.status not in only_from:
                return None
            changed = batch._replace(status=status, details={**batch.details, **details})
            self._db.execute(
                "UPDATE batches SET status = ?, details = ? WHERE id = ?",
                (status, orjson.dumps(changed.details), id),
            )
            return changed

    def prune(self, before: float) -> int:
        """Delete ended batches made before ``before``, and older files that no open batch needs. Return the
        number."""
        marks = ", ".join("?" * len(OPEN))
        with _transaction(self._db):
            over = f"SELECT id FROM batches WHERE created < ? AND status NOT IN ({marks})"
            for table in ("lines", "used"):
                self._db.execute(f"DELETE FROM {table} WHERE batch IN ({over})", (before, *OPEN))
            batches = self._db.execute(f"DELETE FROM batches WHERE id IN ({over})", (before, *OPEN)).rowcount
            used = [batch.details["input_file_id"] for batch in self.open_batches()]
            unused = f"created < ? AND id NOT IN ({', '.join('?' * len(used))})"
            return batches + self._db.execute(f"DELETE FROM files WHERE {unused}", (before, *used)).rowcount

    # --- their requests --------------------------------------------------------------------------

    def add_lines(self, batch: str, lines: Sequence[Line]) -> None:
        """Again after a restart: those that are there stay as they are."""
        rows = [(batch, line.number, line.custom_id, line.body) for line in lines]
        with _transaction(self._db):
            self._db.executemany(
                "INSERT OR IGNORE INTO lines (batch, number, custom_id, body) VALUES (?, ?, ?, ?)", rows
            )

    def open_lines(self, batch: str | None, limit: int) -> list[tuple[str, Line]]:
        """Requests without an answer, of this batch or of all in progress: the first of each, then the
        second."""
        rows = self._db.execute(
            "SELECT batch, number, custom_id, body FROM lines WHERE status IS NULL AND batch = "
            "coalesce(?1, batch)"
            " AND (?1 IS NOT NULL OR batch IN (SELECT id FROM batches WHERE status = "
            "'in_progress')) ORDER BY number, batch LIMIT ?2",
            (batch, limit),
        )
        return [(row[0], Line(row[1], row[2], bytes(row[3]))) for row in rows]

    def answer(self, batch: str, number: int, status: int, output: bytes, used: Used = NOTHING) -> None:
        """For good. A second answer changes nothing."""
        query = "UPDATE lines SET status = ?, output = ? WHERE batch = ? AND number = ? AND status IS NULL"
        with _transaction(self._db):
            if self._db.execute(query, (status, output, batch, number)).rowcount and used != NOTHING:
                self._db.execute(_ADD_USED, (batch, *used))

    def outputs(self, batch: str, *, good: bool) -> bytes:
        """The content of the output file, or of the error file."""
        query = """SELECT output FROM lines
            WHERE batch = ? AND status IS NOT NULL AND (status = 200) = ? ORDER BY number"""
        return b"".join(bytes(row[0]) + b"\n" for row in self._db.execute(query, (batch, good)))

    def counts(self, batch: str) -> Counts:
        query = """SELECT count(*), coalesce(sum(status = 200), 0), coalesce(sum(status <> 200), 0)
            FROM lines WHERE batch = ?"""
        return Counts(*self._db.execute(query, (batch,)).fetchone())

    def used(self, batch: str) -> Used:
        """By all of its requests that are answered."""
        query = "SELECT prompt, cached, completion, reasoning FROM used WHERE batch = ?"
        row = self._db.execute(query, (batch,)).fetchone()
        return Used(*row) if row is not None else NOTHING


@contextmanager
def _transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit all of it or nothing. (SQLite itself may have rolled it back on a full disk.)"""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:
            db.execute("ROLLBACK")
        raise


def _forget_accounts(db: sqlite3.Connection) -> None:
    """Files of version 0.1 held each batch's whole account, with the key's digest and the cache's salt."""

    def columns() -> list[str]:
        return [row[1] for row in db.execute("PRAGMA table_info(batches)")]

    if "account" not in columns():
        return
    db.execute("PRAGMA secure_delete = ON")
    db.execute("BEGIN IMMEDIATE")
    if "account" in columns():  # another process may have been first
        db.execute("ALTER TABLE batches ADD COLUMN key_id INTEGER NOT NULL DEFAULT 0")
        for id, account in db.execute("SELECT id, account FROM batches").fetchall():
            db.execute(
                "UPDATE batches SET key_id = ? WHERE id = ?", (msgspec.msgpack.decode(account)["key_id"], id)
            )
        db.execute("ALTER TABLE batches DROP COLUMN account")
    db.execute("COMMIT")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


_ADD_USED = """INSERT INTO used VALUES (?, ?, ?, ?, ?) ON CONFLICT (batch) DO UPDATE SET
    prompt = prompt + excluded.prompt, cached = cached + excluded.cached,
    completion = completion + excluded.completion, reasoning = reasoning + excluded.reasoning"""
_FILE = "SELECT id, filename, purpose, num_bytes, created FROM files"
_BATCH = "SELECT id, status, details, key_id, tenant FROM batches"


def _batch(row: Any) -> StoredBatch:
    return StoredBatch(row[0], row[1], orjson.loads(row[2]), row[3], row[4])


def _page(found: list[Any], after: str | None, limit: int) -> list[Any]:
    """One more than ``limit``, where there is more."""
    ids = [item.id for item in found]
    start = ids.index(after) + 1 if after in ids else 0
    return found[start : start + limit + 1]
