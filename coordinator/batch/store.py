"""Batches and their requests in SQLite. One file serves all coordinators of a host; each answered request is
there for good at once."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from ..stored_bytes import check_room, transaction
from .files import PART_BYTES, WHAT, FileStore, page_of
from .lines import Line, Used, unanswered_line

Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
NOTHING = Used()
OPEN: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")
_OPEN = f"status IN ({', '.join(map(repr, OPEN))})"
_LINE = "SELECT number, custom_id, body FROM lines WHERE batch = ? AND number = ?"
_NEXT_LINE = "SELECT number FROM lines WHERE batch = ? AND status IS NULL ORDER BY number LIMIT ?"
ENDING = ("ending", "files", "moved")
"""Details that a batch has for its end, which are no client's."""
LINES_AT_ONCE = 1000
PRUNED_AT_ONCE = 10


class Ending(NamedTuple):
    """How a batch ends, and what its unanswered requests get."""

    status: Status
    code: str = ""
    message: str = ""


class StoredBatch(NamedTuple):
    """``details``: what OpenAI's object has beside id, status and counts. ``key_id``: of the key that pays;
    0: none was asked for."""

    id: str
    status: Status
    details: dict[str, Any]
    key_id: int
    tenant: str


class Counts(NamedTuple):
    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchStore(FileStore):
    """Beside the files, batches and their lines."""

    def add_batch(
        self, tenant: str, key_id: int, details: dict[str, Any], now: float, max_bytes: int | None = None
    ) -> StoredBatch:
        """Raises StorageLimitReached: a batch counts as much as its input file until that has been read."""
        batch = StoredBatch(f"batch_{secrets.token_hex(12)}", "validating", details, key_id, tenant)
        row = (batch.id, tenant, now, key_id, batch.status, orjson.dumps(details), details["input_file_id"])
        with transaction(self._db):
            self._db.execute(
                "INSERT INTO batches (id, tenant, created, key_id, status, details, bytes) VALUES"
                " (?, ?, ?, ?, ?, ?, coalesce((SELECT num_bytes FROM files WHERE id = ?), 0))",
                row,
            )
            check_room(self._db, tenant, 0, max_bytes, WHAT)
        return batch

    def batch(self, tenant: str | None, id: str) -> StoredBatch | None:
        """Return a batch; ``tenant`` None: of any tenant."""
        query = f"{_BATCH} AND id = ? AND tenant = coalesce(?, tenant)"
        row = self._db.execute(query, (id, tenant)).fetchone()
        return None if row is None else _batch(row)

    def batches(self, tenant: str, after: str | None, limit: int) -> list[StoredBatch]:
        """Return one more than ``limit``, where there is more; newest first."""
        return [_batch(row) for row in page_of(self._db, "batches", _BATCH, (), tenant, after, limit)]

    def change(
        self, id: str, status: Status, details: Mapping[str, Any], only_from: Collection[str] = OPEN
    ) -> StoredBatch | None:
        """A new status and new details; None, and nothing happens, where the batch is in none of
        ``only_from``."""
        with transaction(self._db):
            batch = self.batch(None, id)
            if batch is None or batch.status not in only_from:
                return None
            changed = batch._replace(status=status, details={**batch.details, **details})
            self._db.execute(
                "UPDATE batches SET status = ?, details = ? WHERE id = ?",
                (status, orjson.dumps(changed.details), id),
            )
            return changed

    def prune(self, before: float, left_before: float = 0.0) -> bool:
        """Delete something of an ended batch made before ``before``, of an older file that no open batch
        needs, or of one begun before ``left_before`` that is not whole. Return whether there was any."""
        query = f"SELECT id FROM batches WHERE created < ? AND NOT {_OPEN} LIMIT 1"
        if (batch := self._db.execute(query, (before,)).fetchone()) is not None:
            if not self.delete_lines(*batch):
                with transaction(self._db):
                    self._db.execute("DELETE FROM used WHERE batch = ?", batch)
                    self._db.execute("DELETE FROM batches WHERE id = ?", batch)
            return True
        used = f"SELECT json_extract(details, '$.input_file_id') FROM batches WHERE {_OPEN}"
        made = f"SELECT value FROM batches, json_each(details, '$.files') WHERE {_OPEN}"
        old = f"created < iif(purpose = '', max(?1, ?2), ?1) AND id NOT IN ({used} UNION {made})"
        query = f"SELECT tenant, id, num_bytes FROM files WHERE {old} LIMIT {PRUNED_AT_ONCE}"
        files = self._db.execute(query, (before, left_before)).fetchall()
        for tenant, id, num_bytes in files:
            self.hide_file(tenant, id)
            while self.drop_part(id):
                if num_bytes > PART_BYTES:
                    return True  # its other parts are the next calls'
        return bool(files)

    # --- whose turn it is --------------------------------------------------------------------------

    def payers(self) -> list[tuple[str, int]]:
        """Return the tenants and keys of all batches in progress."""
        query = "SELECT DISTINCT tenant, key_id FROM batches WHERE status = 'in_progress'"
        return self._db.execute(query).fetchall()

    def next_line(
        self, payer: tuple[str, int], after: str, running: Collection[tuple[str, int]]
    ) -> tuple[str, Line] | None:
        """Return a request of a payer's that is neither answered nor ``running``: of the batch after the one
        with the id ``after``, so that its batches take turns."""
        query = (
            "SELECT id FROM batches WHERE status = 'in_progress' AND tenant = ? AND key_id = ? AND id {} ?"
            " ORDER BY id"
        )
        for beyond in (">", "<="):
            for (batch,) in self._db.execute(query.format(beyond), (*payer, after)):
                num_running = sum(id == batch for id, _ in running)
                for (number,) in self._db.execute(_NEXT_LINE, (batch, num_running + 1)).fetchall():
                    if (batch, number) not in running:
                        return batch, Line(*self._db.execute(_LINE, (batch, number)).fetchone())
        return None

    def overdue(self, now: float, keys: Collection[int], tenants: Collection[str]) -> list[StoredBatch]:
        """Return batches in progress whose time is over, all of these keys, and the newest of each of these
        tenants."""
        newest = """SELECT (SELECT id FROM batches WHERE status = 'in_progress' AND tenant = value
            ORDER BY created DESC LIMIT 1) FROM json_each(?)"""
        query = f"""{_BATCH} AND status = 'in_progress' AND (json_extract(details, '$.expires_at') <= ?
            OR key_id IN (SELECT value FROM json_each(?)) OR id IN ({newest}))"""
        values = (now, orjson.dumps(list(keys)).decode(), orjson.dumps(list(tenants)).decode())
        return [_batch(row) for row in self._db.execute(query, values)]

    def tenants_at_work(self) -> list[str]:
        """Return the tenants that have a batch to be validated or ended."""
        query = f"SELECT DISTINCT tenant FROM batches WHERE {_OPEN} AND status <> 'in_progress'"
        return [tenant for (tenant,) in self._db.execute(query)]

    def next_work(self, tenant: str) -> StoredBatch | None:
        """Return a tenant's oldest batch that is to be validated or ended."""
        query = f"{_BATCH} AND {_OPEN} AND status <> 'in_progress' AND tenant = ? ORDER BY created LIMIT 1"
        row = self._db.execute(query, (tenant,)).fetchone()
        return None if row is None else _batch(row)

    # --- their requests --------------------------------------------------------------------------

    def add_lines(self, batch: str, lines: Sequence[Line]) -> None:
        """Again after a restart: those that are there stay as they are."""
        rows = [(batch, line.number, line.custom_id, line.body) for line in lines]
        with transaction(self._db):
            self._db.executemany(
                "INSERT OR IGNORE INTO lines (batch, number, custom_id, body) VALUES (?, ?, ?, ?)", rows
            )

    def delete_lines(self, batch: str) -> bool:
        """Delete some of them. Return whether there were any."""
        some = "SELECT number FROM lines WHERE batch = ?1 LIMIT ?2"
        query = f"DELETE FROM lines WHERE batch = ?1 AND number IN ({some})"
        return self._db.execute(query, (batch, LINES_AT_ONCE)).rowcount > 0

    def validated(self, id: str, status: Status, details: Mapping[str, Any], num_bytes: int) -> None:
        """Count its lines as this many bytes, and run them or not: unless it is cancelled."""
        with transaction(self._db):
            self._db.execute("UPDATE batches SET bytes = ? WHERE id = ?", (num_bytes, id))
            self.change(id, status, details, ("validating",))

    def answer(self, batch: str, line: Line, status: int, output: bytes, used: Used = NOTHING) -> None:
        """For good: its body is needed no more, and the last answer ends the batch. A second answer changes
        nothing."""
        query = """UPDATE lines SET status = ?, output = ?, body = x''
            WHERE batch = ? AND number = ? AND status IS NULL"""
        with transaction(self._db):
            if not self._db.execute(query, (status, output, batch, line.number)).rowcount:
                return
            more = len(output) - len(line.body)
            self._db.execute("UPDATE batches SET bytes = bytes + ? WHERE id = ?", (more, batch))
            if used != NOTHING:
                self._db.execute(_ADD_USED, (batch, *used))
            if self._db.execute(_NEXT_LINE, (batch, 1)).fetchone() is None:
                self.change(batch, "finalizing", {"finalizing_at": int(time.time())}, ("in_progress",))

    def finalize_answered(self) -> None:
        """End batches that are all answered: an earlier version left that to a second look."""
        self._db.execute(
            "UPDATE batches SET status = 'finalizing' WHERE status = 'in_progress' AND NOT EXISTS"
            " (SELECT 1 FROM lines WHERE batch = id AND lines.status IS NULL)"
        )

    def begin_ending(self, batch: StoredBatch) -> None:
        """Begin the output file and the error file; no client sees them before ``end_batch``."""
        names = [f"{batch.id}_{name}.jsonl" for name in ("output", "error")]
        with transaction(self._db):
            files = [self.begin_file(batch.tenant, name, time.time()) for name in names]
            self.change(batch.id, batch.status, {"files": files})

    def move_answers(self, id: str, end: Ending) -> bool:
        """Move a part's worth of lines into the two files: of those answered with 200, and of all others.
        Return whether there were any."""
        query = "SELECT number, custom_id, body, status, output FROM lines WHERE batch = ? ORDER BY number"
        with transaction(self._db):
            batch = self.batch(None, id)
            assert batch is not None, "an open batch is not pruned"
            moved, last, num_bytes = (list[bytes](), list[bytes]()), 0, 0
            for last, custom_id, body, status, output in self._db.execute(query, (id,)):
                if status is None:
                    output = unanswered_line(id, Line(last, custom_id, body), end.code, end.message)
                    num_bytes += len(body) - len(output)
                moved[status != 200].append(output + b"\n")
                num_bytes += len(output)
                if num_bytes >= PART_BYTES or len(moved[0]) + len(moved[1]) == LINES_AT_ONCE:
                    break
            for file, outputs in zip(batch.details["files"], moved, strict=True):
                if outputs:
                    self._append(file, b"".join(outputs))
            self._db.execute("DELETE FROM lines WHERE batch = ? AND number <= ?", (id, last))
            self._db.execute("UPDATE batches SET bytes = bytes - ? WHERE id = ?", (num_bytes, id))
            before = Counts(*batch.details.get("moved", ()))
            counts = before.completed + len(moved[0]), before.failed + len(moved[1])
            self.change(id, batch.status, {"moved": [sum(counts), *counts]})
            return last > 0

    def end_batch(self, id: str, status: Status, details: Mapping[str, Any]) -> None:
        """Let clients see that it is over, and its files; an empty file is deleted."""
        with transaction(self._db):
            batch = self.batch(None, id)
            assert batch is not None, "an open batch is not pruned"
            query = "UPDATE files SET purpose = 'batch_output' WHERE id = ? AND num_bytes > 0"
            made = {}
            for field, file in zip(("output_file_id", "error_file_id"), batch.details["files"], strict=True):
                if self._db.execute(query, (file,)).rowcount:
                    made[field] = file
                else:
                    self._db.execute("DELETE FROM files WHERE id = ?", (file,))
            self.change(id, status, {**details, **made})
            self._db.execute("UPDATE batches SET bytes = 0 WHERE id = ?", (id,))

    def counts(self, batch: str) -> Counts:
        query = """SELECT details, count(number), coalesce(sum(lines.status = 200), 0),
            coalesce(sum(lines.status <> 200), 0) FROM batches LEFT JOIN lines ON batch = id WHERE id = ?"""
        details, *counts = self._db.execute(query, (batch,)).fetchone()
        moved = orjson.loads(details or b"{}").get("moved", Counts())
        return Counts(*map(sum, zip(counts, moved, strict=True)))

    def used(self, batch: str) -> Used:
        """By all of its requests that are answered."""
        query = "SELECT prompt, cached, completion, reasoning FROM used WHERE batch = ?"
        row = self._db.execute(query, (batch,)).fetchone()
        return Used(*row) if row is not None else NOTHING


_ADD_USED = """INSERT INTO used VALUES (?, ?, ?, ?, ?) ON CONFLICT (batch) DO UPDATE SET
    prompt = prompt + excluded.prompt, cached = cached + excluded.cached,
    completion = completion + excluded.completion, reasoning = reasoning + excluded.reasoning"""
_BATCH = "SELECT id, status, details, key_id, tenant FROM batches WHERE true"


def _batch(row: Any) -> StoredBatch:
    return StoredBatch(row[0], row[1], orjson.loads(row[2]), row[3], row[4])
