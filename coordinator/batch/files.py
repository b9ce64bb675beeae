"""Files in SQLite, in parts: no file is whole in memory, and none holds up the store for longer than one
part."""

from __future__ import annotations

import logging
import secrets
import sqlite3
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ...transport.process.private_files import make_private
from ..full_disk import is_full
from ..stored_bytes import check_room, count_rows, stored_by, transaction

PART_BYTES = 1 << 20
WHAT = "files and batches"
LEFT_BEHIND_S = 3600.0
"""Age at which a file that is still not whole is one of a process that has ended."""
SCHEMA = """
CREATE TABLE IF NOT EXISTS files (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, filename TEXT NOT NULL,
    purpose TEXT NOT NULL, num_bytes INTEGER NOT NULL, content BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS files_of_tenant ON files (tenant, created, id);
CREATE TABLE IF NOT EXISTS parts (
    file TEXT NOT NULL, at INTEGER NOT NULL, content BLOB NOT NULL, PRIMARY KEY (file, at)
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
DROP INDEX IF EXISTS open_lines;
CREATE INDEX IF NOT EXISTS line_statuses ON lines (batch, status);
"""
BATCH_INDEXES = (
    "CREATE INDEX IF NOT EXISTS batches_of_tenant ON batches (tenant, created, id)",
    "CREATE INDEX IF NOT EXISTS batches_by_status ON batches (status, tenant, key_id, id)",
    "CREATE INDEX IF NOT EXISTS batches_by_end ON batches (status, json_extract(details, '$.expires_at'))",
)
_log = logging.getLogger(__name__)


class StoredFile(NamedTuple):
    """A file without its content."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created: float  # unix seconds


class FileStore:
    """All methods block for a disk's time: they are called on one thread of their own.

    ``max_bytes``: what the tenant may store in all; None: no bound."""

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
                _count_bytes(db)
                for index in BATCH_INDEXES:
                    db.execute(index)
            except sqlite3.Error:
                db.close()
                raise
            self._opened = db
        return self._opened

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()

    def begin_file(self, tenant: str, filename: str, now: float, max_bytes: int | None = None) -> str:
        """Return the id of a new file, which no client sees before ``end_file``. Raises
        StorageLimitReached."""
        id = f"file-{secrets.token_hex(12)}"
        with transaction(self._db):
            self._db.execute("INSERT INTO files VALUES (?, ?, ?, ?, '', 0, '')", (id, tenant, now, filename))
            check_room(self._db, tenant, 0, max_bytes, WHAT)
        return id

    def add_part(self, tenant: str, id: str, content: bytes, max_bytes: int | None = None) -> None:
        """Append to a file that is not whole. Raises StorageLimitReached."""
        with transaction(self._db):
            check_room(self._db, tenant, len(content), max_bytes, WHAT)
            self._append(id, content)

    def _append(self, id: str, content: bytes) -> None:
        self._db.execute("INSERT INTO parts SELECT id, num_bytes, ? FROM files WHERE id = ?", (content, id))
        self._db.execute("UPDATE files SET num_bytes = num_bytes + ? WHERE id = ?", (len(content), id))

    def end_file(self, tenant: str, id: str, purpose: str) -> StoredFile:
        """Let clients see a file, which is whole."""
        self._db.execute("UPDATE files SET purpose = ? WHERE id = ?", (purpose, id))
        file = self.file(tenant, id)
        assert file is not None, "it is pruned an hour after its last part"
        return file

    def file(self, tenant: str, id: str) -> StoredFile | None:
        row = self._db.execute(f"{_FILE} AND id = ? AND tenant = ?", (id, tenant)).fetchone()
        return None if row is None else StoredFile(*row)

    def content(self, tenant: str, id: str, at: int = 0) -> bytes | None:
        """Return the part of a file that begins at this byte, empty at its end; None: there is no such
        file."""
        query = """SELECT rowid, length(content) > ? FROM files
            WHERE id = ? AND tenant = ? AND purpose <> ''"""
        if (file := self._db.execute(query, (at, id, tenant)).fetchone()) is None:
            return None
        if file[1]:  # an earlier version stored it in one piece
            with self._db.blobopen("files", "content", file[0], readonly=True) as blob:
                blob.seek(at)
                return blob.read(PART_BYTES)
        part = self._db.execute("SELECT content FROM parts WHERE file = ? AND at = ?", (id, at)).fetchone()
        return b"" if part is None else bytes(part[0])

    def files(
        self, tenant: str, purpose: str | None, after: str | None, limit: int, *, newest_first: bool
    ) -> list[StoredFile]:
        """Return one more than ``limit``, where there is more."""
        query = f"{_FILE} AND purpose = coalesce(?, purpose)"
        rows = page_of(self._db, "files", query, (purpose,), tenant, after, limit, newest_first=newest_first)
        return [StoredFile(*row) for row in rows]

    def hide_file(self, tenant: str, id: str) -> None:
        """Begin to delete a file: no client sees it from now on."""
        self._db.execute("UPDATE files SET purpose = '' WHERE id = ? AND tenant = ?", (id, tenant))

    def drop_part(self, id: str) -> bool:
        """Go on deleting a file. Return whether some of it is left."""
        query = "SELECT at FROM parts WHERE file = ? ORDER BY at DESC LIMIT 1"
        with transaction(self._db):
            if (last := self._db.execute(query, (id,)).fetchone()) is None:
                self._db.execute("DELETE FROM files WHERE id = ?", (id,))
                return False
            self._db.execute("DELETE FROM parts WHERE file = ? AND at = ?", (id, *last))
            self._db.execute("UPDATE files SET num_bytes = ? WHERE id = ?", (*last, id))
            return True

    def stored(self, tenant: str) -> int:
        """Return the bytes of a tenant's files and batches."""
        return stored_by(self._db, tenant)


def page_of(
    db: sqlite3.Connection,
    table: str,
    query: str,
    values: tuple[Any, ...],
    tenant: str,
    after: str | None,
    limit: int,
    *,
    newest_first: bool = True,
) -> list[Any]:
    """Return a tenant's rows after the one with that id, by age: one more than ``limit``, where there are
    more."""
    begin = db.execute(f"SELECT created, id FROM {table} WHERE id = ? AND tenant = ?", (after, tenant))
    place: tuple[Any, ...] = begin.fetchone() or ()
    order, beyond = ("DESC", "<") if newest_first else ("ASC", ">")
    query += " AND tenant = ?" + (f" AND (created, id) {beyond} (?, ?)" if place else "")
    query += f" ORDER BY created {order}, id {order} LIMIT ?"
    return db.execute(query, (*values, tenant, *place, limit + 1)).fetchall()


def _forget_accounts(db: sqlite3.Connection) -> None:
    """Files of version 0.1 held each batch's whole account, with the key's digest and the cache's salt."""
    if "account" not in _columns(db):
        return
    db.execute("PRAGMA secure_delete = ON")
    with transaction(db):
        if "account" in _columns(db):  # another process may have been first
            db.execute("ALTER TABLE batches ADD COLUMN key_id INTEGER NOT NULL DEFAULT 0")
            for id, account in db.execute("SELECT id, account FROM batches").fetchall():
                key_id = msgspec.msgpack.decode(account)["key_id"]
                db.execute("UPDATE batches SET key_id = ? WHERE id = ?", (key_id, id))
            db.execute("ALTER TABLE batches DROP COLUMN account")
    db.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _count_bytes(db: sqlite3.Connection) -> None:
    """Once: files of earlier versions counted nothing. ``bytes``: of an open batch's lines and their
    answers."""
    with transaction(db):
        if "bytes" not in _columns(db):
            db.execute("ALTER TABLE batches ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0")
            db.execute(
                "UPDATE batches SET bytes = coalesce((SELECT sum(length(body) + coalesce(length(output), 0))"
                " FROM lines WHERE batch = id), 0) WHERE status = 'in_progress'"
            )
            count_rows(db, "files", "num_bytes")
            count_rows(db, "batches", "bytes")


def _columns(db: sqlite3.Connection) -> list[str]:
    return [row[1] for row in db.execute("PRAGMA table_info(batches)")]


_FILE = "SELECT id, filename, purpose, num_bytes, created FROM files WHERE purpose <> ''"
