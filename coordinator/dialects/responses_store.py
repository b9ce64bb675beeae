"""Stored responses: what later requests continue from, and what runs in the background. An SQLite file
serves all coordinator processes of a host; ``redis_responses.py`` those of several hosts."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import orjson

from ...transport.process.private_files import make_private
from ..errors import StorageFull
from ..full_disk import is_full
from ..stored_bytes import StorageLimitReached, count_rows, stored_by, transaction
from .responses_items import Item
from .stored_response import (
    MAX_INPUT_BYTES,
    MAX_PAGE_BYTES,
    MAX_TURNS,
    RUNNING,
    Stored,
    item_key,
    not_found,
    page_of,
    stored_of,
)

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, previous TEXT, deadline REAL NOT NULL,
    status TEXT NOT NULL, response BLOB NOT NULL, input BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
CREATE INDEX IF NOT EXISTS responses_of_tenant ON responses (tenant, created, id);
CREATE TABLE IF NOT EXISTS items (
    id TEXT PRIMARY KEY, response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE, item BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_response ON items (response);
CREATE TABLE IF NOT EXISTS events (
    response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE, number INTEGER NOT NULL,
    event BLOB NOT NULL, PRIMARY KEY (response, number)
) WITHOUT ROWID;
"""
INSERT = """INSERT INTO responses (response, status, deadline, id, tenant, created, previous, input, bytes)
    VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, length(?1) + length(?8))"""
UPDATE = """UPDATE responses SET response = ?1, status = ?2, deadline = ?3,
    bytes = bytes + length(?1) - length(response) WHERE id = ?4 AND status IN (?5, ?6)"""
ADD_ITEM = "INSERT OR IGNORE INTO items VALUES (?, ?, ?)"
ADD_EVENT = ADD_ITEM.replace("items", "events")
DELETE_OLDEST = """DELETE FROM responses WHERE id IN
    (SELECT id FROM responses WHERE {} ORDER BY created LIMIT {})"""
PRUNE_EVERY_S = 600.0
MAX_BYTES = 4 << 30
"""Bytes of all responses above which the oldest of the tenant with most are deleted before their time."""
MAX_DELETED = 100
"""At a time to make room, in 0.1 s."""
T = TypeVar("T")


class SqliteResponses:
    """A ``ResponseStore``. All methods run on one thread of its own."""

    def __init__(self, path: Path, keep_s: float) -> None:
        """Raises OpenToOthers where other users may read it, OSError or sqlite3.Error where it cannot be
        used."""
        self._path, self._keep_s = path, keep_s
        make_private("the responses file", path)
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        pragmas = "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON;"
        self._db.executescript(f"{pragmas} {SCHEMA}")
        _count_bytes(self._db)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")
        self._prune_at = 0.0

    async def close(self) -> None:
        self._thread.shutdown()
        self._db.close()

    async def save(
        self,
        tenant: str,
        response: dict[str, Any],
        input: Sequence[Item],
        *,
        deadline: float = 0.0,
        events: Iterable[dict[str, Any]] = (),
        max_bytes: int | None = None,
    ) -> bool:
        row = (orjson.dumps(response), response["status"], deadline)
        new = (
            response["id"],
            tenant,
            time.time(),
            response["previous_response_id"],
            orjson.dumps(list(input)),
        )
        ended = response["status"] not in RUNNING
        items = [
            (item_key(tenant, item["id"]), response["id"], orjson.dumps(item))
            for item in (*input, *response["output"])
            if ended
        ]
        kept = [(response["id"], event["sequence_number"], orjson.dumps(event)) for event in events]

        def write(db: sqlite3.Connection) -> bool:
            if response["status"] == "queued" or not deadline:
                db.execute(INSERT, (*row, *new))
            elif not db.execute(UPDATE, (*row, response["id"], *RUNNING)).rowcount:
                return False
            more = sum([len(row[2]) * db.execute(ADD_ITEM, row).rowcount for row in items])
            more += sum([len(row[2]) * db.execute(ADD_EVENT, row).rowcount for row in kept])
            db.execute("UPDATE responses SET bytes = bytes + ? WHERE id = ?", (more, response["id"]))
            if max_bytes is not None:
                _make_room(db, tenant, response["id"], max_bytes)
            return True

        return await self._call(write)

    async def found(self, tenant: str, id: str) -> Stored:
        return await self._call(lambda db: _found(db, tenant, id, "response_id"))

    async def conversation(self, tenant: str, id: str) -> list[Item]:
        def read(db: sqlite3.Connection) -> list[Item]:
            turns, num_bytes = list[list[Item]](), 0
            next_id: str | None = id
            while next_id is not None and len(turns) < MAX_TURNS and num_bytes < MAX_INPUT_BYTES:
                stored = _found(db, tenant, next_id, "previous_response_id")
                num_bytes += stored.input_bytes
                turns.append([*stored.input, *stored.response["output"]])
                next_id = stored.previous
            return [item for turn in reversed(turns) for item in turn]

        return await self._call(read)

    async def items(self, tenant: str, ids: Sequence[str]) -> dict[str, Item]:
        query = (
            "SELECT item FROM items JOIN responses ON responses.id = items.response "
            "WHERE tenant = ? AND items.id IN (SELECT value FROM json_each(?))"
        )
        own = orjson.dumps([item_key(tenant, id) for id in ids]).decode()
        found = await self._call(lambda db: _some(db.execute(query, (tenant, own)), MAX_INPUT_BYTES))
        return {item["id"]: item for item in map(orjson.loads, found)}

    async def newest(self, tenant: str, after: str | None, limit: int) -> tuple[list[dict[str, Any]], bool]:
        query = """SELECT response FROM responses WHERE tenant = ?1 AND (?2 IS NULL OR (created, id) <
            (SELECT created, id FROM responses WHERE id = ?2)) ORDER BY created DESC, id DESC LIMIT ?3"""

        def read(db: sqlite3.Connection) -> list[bytes]:
            if after is not None:
                _found(db, tenant, after, "after")
            return _some(db.execute(query, (tenant, after, limit + 1)), MAX_PAGE_BYTES)

        return page_of(await self._call(read), limit)

    async def events(self, id: str, after: int) -> list[bytes]:
        query = "SELECT event FROM events WHERE response = ? AND number > ? ORDER BY number"
        return [row[0] for row in await self._call(lambda db: db.execute(query, (id, after)).fetchall())]

    async def delete(self, tenant: str, id: str) -> None:
        def write(db: sqlite3.Connection) -> None:
            _found(db, tenant, id, "response_id")
            db.execute("DELETE FROM responses WHERE id = ?", (id,))

        await self._call(write)

    async def cancel(self, tenant: str, id: str) -> Stored:
        def write(db: sqlite3.Connection) -> Stored:
            stored = _found(db, tenant, id, "response_id")
            if not stored.running:
                return stored
            response = {**stored.response, "status": "cancelled"}
            db.execute(UPDATE, (orjson.dumps(response), "cancelled", 0.0, id, *RUNNING))
            return _found(db, tenant, id, "response_id")

        return await self._call(write)

    async def _call(self, work: Callable[[sqlite3.Connection], T]) -> T:
        """Raises StorageFull."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._transact, work)
        except sqlite3.Error as error:
            if is_full(error):
                raise StorageFull(f"the responses file {self._path}") from error
            raise

    def _transact(self, work: Callable[[sqlite3.Connection], T]) -> T:
        with transaction(self._db):
            if time.monotonic() > self._prune_at:
                self._prune()
            return work(self._db)

    def _prune(self) -> None:
        """Delete a few that are too old, or too many: the rest with the next calls."""
        deleted = self._db.execute(
            DELETE_OLDEST.format("created < ?", 20), (time.time() - self._keep_s,)
        ).rowcount
        query = "SELECT sum(bytes) OVER (), tenant FROM stored ORDER BY bytes DESC LIMIT 1"
        total, tenant = self._db.execute(query).fetchone() or (0, "")
        if total > MAX_BYTES:
            deleted += self._db.execute(DELETE_OLDEST.format("tenant = ?", 5), (tenant,)).rowcount
        if not deleted:
            self._prune_at = time.monotonic() + PRUNE_EVERY_S


def _some(rows: Iterable[tuple[bytes]], max_bytes: int) -> list[bytes]:
    """Return the rows' values: one more than fits into these bytes, or two where the first does not."""
    found, num_bytes = list[bytes](), 0
    for (value,) in rows:
        found.append(value)
        if num_bytes > max_bytes:
            break
        num_bytes += len(value)
    return found


def _make_room(db: sqlite3.Connection, tenant: str, id: str, max_bytes: int) -> None:
    """Delete a tenant's oldest responses, except this one and those that run, until the rest fits: after a
    limit was lowered, with the next ones. Raises StorageLimitReached."""
    others = DELETE_OLDEST.format("tenant = ? AND id <> ? AND status NOT IN (?, ?)", 1)
    for _ in range(MAX_DELETED):
        if stored_by(db, tenant) <= max_bytes:
            return
        if not db.execute(others, (tenant, id, *RUNNING)).rowcount:
            raise StorageLimitReached("stored responses", max_bytes)


def _count_bytes(db: sqlite3.Connection) -> None:
    """Once: files of earlier versions counted nothing, and what they hold counts as rows alone: its bytes
    would be written anew. ``bytes``: with its items and events."""
    with transaction(db):
        if "bytes" not in [row[1] for row in db.execute("PRAGMA table_info(responses)")]:
            db.execute("ALTER TABLE responses ADD COLUMN bytes INTEGER NOT NULL DEFAULT 0")
            count_rows(db, "responses", "bytes")


def _found(db: sqlite3.Connection, tenant: str, id: str, param: str) -> Stored:
    """Return a tenant's response. Raises NotFound."""
    query = "SELECT response, input, previous, status, deadline FROM responses WHERE id = ? AND tenant = ?"
    row = db.execute(query, (id, tenant)).fetchone()
    if row is None:
        raise not_found(id, param)
    return stored_of(id, *row)
