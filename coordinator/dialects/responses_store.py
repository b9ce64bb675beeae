"""Stored responses: what later requests continue from, and what runs in the background. An SQLite file
serves all coordinator processes of a host; ``redis_responses.py`` those of several hosts."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import orjson

from ...transport.process.private_files import make_private
from ..errors import NotFound, StorageFull
from ..full_disk import is_full
from .responses_items import Item

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, previous TEXT, deadline REAL NOT NULL,
    status TEXT NOT NULL, response BLOB NOT NULL, input BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_age ON responses (created);
CREATE TABLE IF NOT EXISTS items (
    id TEXT PRIMARY KEY, response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE, item BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS of_response ON items (response);
CREATE TABLE IF NOT EXISTS events (
    response TEXT NOT NULL REFERENCES responses ON DELETE CASCADE, number INTEGER NOT NULL,
    event BLOB NOT NULL, PRIMARY KEY (response, number)
) WITHOUT ROWID;
"""
INSERT = """INSERT INTO responses (response, status, deadline, id, tenant, created, previous, input)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)"""
UPDATE = """UPDATE responses SET response = ?, status = ?, deadline = ?
    WHERE id = ? AND status IN (?, ?)"""
RUNNING = ("queued", "in_progress")
PRUNE_EVERY_S = 600.0
MAX_BYTES = 4 << 30
"""Size of the file above which the oldest responses are deleted before their time."""
MAX_TURNS, MAX_INPUT_BYTES = 1000, 16 << 20
"""Responses of one conversation that are read back, and bytes of their input: more fits no context."""
GRACE_S = 10.0
"""Seconds after the deadline of a response that runs in the background: then its process has died."""
T = TypeVar("T")


class Stored(NamedTuple):
    """One stored response."""

    id: str
    response: dict[str, Any]
    input: list[Item]
    previous: str | None
    running: bool
    input_bytes: int = 0


class ResponseStore(Protocol):
    """All methods raise StorageFull, or Unavailable where the store does not answer."""

    async def close(self) -> None:
        """Release it; nothing is asked of it any more."""

    async def save(
        self,
        tenant: str,
        response: dict[str, Any],
        input: Sequence[Item],
        *,
        deadline: float = 0.0,
        events: Iterable[dict[str, Any]] = (),
    ) -> bool:
        """Write a response as it stands. Return False if it was deleted or cancelled meanwhile.

        ``deadline``: unix seconds by which a running one has ended. ``events``: new ones, to be kept.
        """

    async def found(self, tenant: str, id: str) -> Stored:
        """Return a response. Raises NotFound."""

    async def conversation(self, tenant: str, id: str) -> list[Item]:
        """Return the items of a conversation, up to the output of this response. Raises NotFound."""

    async def items(self, tenant: str, ids: Sequence[str]) -> dict[str, Item]:
        """Return those items of stored responses that there are, by id."""

    async def newest(self, tenant: str, after: str | None, limit: int) -> list[dict[str, Any]]:
        """Return stored responses, newest first. Raises NotFound."""

    async def events(self, id: str, after: int) -> list[bytes]:
        """Return the kept events of a response with higher numbers, as JSON."""

    async def delete(self, tenant: str, id: str) -> None:
        """Delete a response. Raises NotFound."""

    async def cancel(self, tenant: str, id: str) -> Stored:
        """Cancel a response that runs in the background, on whichever process. Raises NotFound."""


class SqliteResponses:
    """A ``ResponseStore``. All methods run on one thread of its own."""

    def __init__(self, path: Path, keep_s: float) -> None:
        """Raises OpenToOthers where other users may read it, OSError or sqlite3.Error where it cannot be
        used."""
        self._path, self._keep_s = path, keep_s
        make_private("the responses file", path)
        self._db = sqlite3.connect(path, timeout=30, isolation_level=None, check_same_thread=False)
        pragmas = "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA foreign_keys = ON;"
        self._db.executescript(f"{pragmas} PRAGMA auto_vacuum = INCREMENTAL; {SCHEMA}")
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
            db.executemany("INSERT OR IGNORE INTO items VALUES (?, ?, ?)", items)
            db.executemany("INSERT INTO events VALUES (?, ?, ?)", kept)
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
            f"WHERE tenant = ? AND items.id IN ({', '.join('?' * len(ids))})"
        )
        own = [item_key(tenant, id) for id in ids]
        rows = await self._call(lambda db: db.execute(query, (tenant, *own)).fetchall())
        return {item["id"]: item for item in (orjson.loads(row[0]) for row in rows)}

    async def newest(self, tenant: str, after: str | None, limit: int) -> list[dict[str, Any]]:
        def read(db: sqlite3.Connection) -> list[dict[str, Any]]:
            before = _found(db, tenant, after, "after").response["created_at"] + 1.0 if after else 1e12
            rows = db.execute(
                "SELECT response FROM responses WHERE tenant = ? AND created < ? AND id != ? "
                "ORDER BY created DESC LIMIT ?",
                (tenant, before, after or "", limit),
            )
            return [orjson.loads(row[0]) for row in rows]

        return await self._call(read)

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
            query = "UPDATE responses SET status = ?, response = ? WHERE id = ? AND status IN (?, ?)"
            db.execute(query, ("cancelled", orjson.dumps(response), id, *RUNNING))
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
        self._db.execute("BEGIN IMMEDIATE")
        try:
            if (now := time.time()) > self._prune_at:
                self._prune(now)
            result = work(self._db)
            self._db.execute("COMMIT")
            return result
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def _prune(self, now: float) -> None:
        """Delete what is too old; the oldest tenth where the file is too large."""
        self._prune_at = now + PRUNE_EVERY_S
        self._db.execute("DELETE FROM responses WHERE created < ?", (now - self._keep_s,))
        (pages,), (size,) = (
            self._db.execute(f"PRAGMA {name}").fetchone() for name in ("page_count", "page_size")
        )
        if pages * size > MAX_BYTES:
            (count,) = self._db.execute("SELECT COUNT(*) FROM responses").fetchone()
            query = "DELETE FROM responses WHERE id IN (SELECT id FROM responses ORDER BY created LIMIT ?)"
            self._db.execute(query, (count // 10 + 1,))


def stored_of(
    id: str, response: str | bytes, input: str | bytes, previous: str | None, status: str, deadline: float
) -> Stored:
    """Return a response as it lies in a store. One that has not ended in time has failed."""
    found = orjson.loads(response)
    if status in RUNNING and time.time() > deadline + GRACE_S:
        status = "failed"
        message = "The server was stopped before the response was complete."
        found |= {"status": status, "error": {"code": "server_error", "message": message}}
    return Stored(id, found, orjson.loads(input), previous, status in RUNNING, len(input))


def item_key(tenant: str, id: str) -> str:
    """Return the key of an item: its id may be a client's own, and another tenant's, too."""
    return f"{len(id)}:{id}:{tenant}"


def not_found(id: str, param: str) -> NotFound:
    """Return the error where a tenant has no such response."""
    message = f"{param}: there is no stored response {id!r}; it may have expired, or was not to be stored"
    return NotFound(message, param=param)


def _found(db: sqlite3.Connection, tenant: str, id: str, param: str) -> Stored:
    """Return a tenant's response. Raises NotFound."""
    query = "SELECT response, input, previous, status, deadline FROM responses WHERE id = ? AND tenant = ?"
    row = db.execute(query, (id, tenant)).fetchone()
    if row is None:
        raise not_found(id, param)
    return stored_of(id, *row)
