"""Runs batches: a few of their requests at a time, behind everybody else's, and again after a restart what
was not answered before."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import sqlite3
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from ..background import Spawn, unwatched
from ..errors import StorageFull
from ..full_disk import is_full
from ..generate.plan import ON_TIMEOUT_HEADER
from ..listeners import ListenerFailures
from ..tenants.limits import Account
from ..tenants.tenancy import Directory
from .asking import Answer, Asking
from .lines import Line, output_line, read_lines, unanswered_line, used_by
from .store import BatchStore, Status, StoredBatch

T = TypeVar("T")
LOOK_EVERY_S = 1.0  # for what other processes have put there
PRUNE_EVERY_S = 3600.0
WAIT_S = 1.0  # before a request without room is tried again, if the answer names no time
MAX_TIMEOUTS = 10  # of one request
AGAIN = (429, 503, 504)
NO_KEY = "The API key of this batch was revoked or has expired; submit what is left with a key that opens."
NOTHING: Mapping[str, Any] = {}
_log = logging.getLogger(__name__)


class BatchOptions(NamedTuple):
    """The file of the batches, and the number of their requests that run at a time."""

    path: Path
    max_running: int = 16
    keep_s: float = 30 * 86_400.0
    """Age at which files, and batches that are over, are deleted."""


class BatchRunner:
    """``start`` and ``stop`` in the loop that serves. Of several processes with one file, the first runs the
    batches."""

    def __init__(
        self,
        options: BatchOptions,
        asking: Asking,
        directory: Directory,
        failures: ListenerFailures | None = None,
    ) -> None:
        """Raises OSError or sqlite3.Error where the file cannot be used."""
        self._path, self._max_running, self._keep_s = options
        self._asking, self._directory = asking, directory
        self._store = BatchStore(self._path)
        self._prune_at = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._changed = asyncio.Event()
        self._running: dict[tuple[str, int], asyncio.Task[None]] = {}
        self.task: asyncio.Task[None] | None = None
        self._lock: IO[bytes] | None = None
        self.failures = failures or ListenerFailures()

    async def call(self, work: Callable[[BatchStore], T]) -> T:
        """Something done with the store, on its thread. Raises StorageFull."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work, self._store)
        except sqlite3.Error as error:
            if is_full(error):
                raise StorageFull(f"the batch file {self._path}") from error
            raise

    def wake(self) -> None:
        """Something has changed in the store."""
        self._changed.set()

    def start(self, spawn: Spawn = unwatched) -> None:
        self.task = spawn("batches", self._run())

    async def stop(self) -> None:
        """What runs is given up; it will run again."""
        for task in (self.task, *self._running.values()):
            if task is not None:
                task.cancel()
        await asyncio.gather(
            *(task for task in (self.task, *self._running.values()) if task is not None),
            return_exceptions=True,
        )
        self._thread.shutdown()
        self._store.close()
        if self._lock is not None:
            self._lock.close()

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                if self._is_ours():
                    await self._advance()
            except Exception as error:
                self.failures.note("running batches", error)
            with contextlib.suppress(TimeoutError):
                # wait_for() may swallow stop()'s cancellation (Python 3.11)
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()

    def _is_ours(self) -> bool:
        """Whether this process holds the lock, which ends with it."""
        if self._lock is None:
            lock = self._path.with_name(self._path.name + ".lock").open("ab")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                lock.close()
                return False
            self._lock = lock
        return True

    async def _prune(self, now: float) -> None:
        """What is older than it is to be kept, once an hour."""
        if now >= self._prune_at:
            self._prune_at = now + PRUNE_EVERY_S
            if number := await self.call(lambda store: store.prune(now - self._keep_s)):
                _log.info("%d files and batches were older than they are to be kept, and are deleted", number)

    async def _advance(self) -> None:
        await self._prune(time.time())
        for batch in await self.call(BatchStore.open_batches):
            if batch.status == "validating":
                await self.call(partial(_validate, batch=batch))
            elif batch.status == "cancelling":
                await self._end(
                    batch,
                    "cancelled",
                    "batch_cancelled",
                    "The batch was cancelled before this request was run.",
                )
            elif time.time() >= batch.details["expires_at"]:
                await self._end(
                    batch, "expired", "batch_expired", "The batch expired before this request was run."
                )
            elif self._account(batch) is None:
                await self._end(batch, "failed", "invalid_api_key", NO_KEY)
            elif not await self.call(partial(_has_open_lines, batch=batch)):
                await self.call(partial(_finish, batch=batch, status="completed"))
        await self._fill()

    async def _fill(self) -> None:
        """Start requests, up to the bound."""
        limit = self._max_running + len(self._running)
        found = await self.call(lambda store: store.open_lines(None, limit))
        for batch_id, line in found:
            if len(self._running) >= self._max_running:
                return
            key = (batch_id, line.number)
            if key not in self._running:
                self._running[key] = asyncio.create_task(self._answer(batch_id, line))

    async def _answer(self, batch_id: str, line: Line) -> None:
        try:
            batch = await self.call(lambda store: store.batch(None, batch_id))
            assert batch is not None, "its line is there"
            answer = await self._ask_until_answered(batch, line)
            request_id = dict(answer.headers).get(b"x-request-id", b"").decode()
            output = output_line(batch_id, line, answer.status, answer.body, request_id)
            used = used_by(answer.status, answer.body)
            await self._keep(lambda store: store.answer(batch_id, line.number, answer.status, output, used))
        except Exception as error:
            self.failures.note("running batches", error)
        finally:
            del self._running[batch_id, line.number]
            self.wake()

    async def _keep(self, work: Callable[[BatchStore], None]) -> None:
        """An answer is computed and metered once: it waits here for space."""
        while True:
            try:
                return await self.call(work)
            except StorageFull as error:
                self.failures.note("running batches", error)
            await asyncio.sleep(LOOK_EVERY_S)

    async def _ask_until_answered(self, batch: StoredBatch, line: Line) -> Answer:
        """Ask again, after a wait, while there is no room, no worker, a limit or a timeout; by the key's
        present account."""
        num_timeouts = 0
        while True:
            if (account := self._account(batch)) is None:
                await asyncio.sleep(WAIT_S)  # the batch is about to be ended, and this task with it
                continue
            # at last a part is better than nothing
            headers = {ON_TIMEOUT_HEADER: b"error"} if num_timeouts < MAX_TIMEOUTS else {}
            answer = await self._asking.ask(batch.details["endpoint"], line.body, account, headers)
            num_timeouts += answer.status == 504
            if answer.status not in AGAIN or num_timeouts > MAX_TIMEOUTS:
                return answer
            wait = dict(answer.headers).get(b"retry-after", b"")
            await asyncio.sleep(float(wait) if wait.isdigit() else WAIT_S)

    def _account(self, batch: StoredBatch) -> Account | None:
        """Return its key's present account, in class batch; None if the key is no longer valid."""
        account = self._directory.account_of_key(batch.key_id)
        return None if account is None else account.model_copy(update={"priority_class": "batch"})

    async def _end(self, batch: StoredBatch, status: Status, code: str, message: str) -> None:
        """Before all of it is answered."""
        mine = [task for (batch_id, _), task in self._running.items() if batch_id == batch.id]
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)

        def end(store: BatchStore) -> None:
            while found := store.open_lines(batch.id, 1000):
                for _, line in found:
                    store.answer(batch.id, line.number, 0, unanswered_line(batch.id, line, code, message))
            failure = {"code": code, "line": None, "message": message, "param": None}
            _finish(
                store,
                batch,
                status,
                {"errors": {"object": "list", "data": [failure]}} if status == "failed" else {},
            )

        await self.call(end)


def _validate(store: BatchStore, batch: StoredBatch) -> None:
    content = store.content(batch.tenant, batch.details["input_file_id"])
    lines, errors = read_lines(content or b"", batch.details["endpoint"])
    if errors:
        failures = {"object": "list", "data": [error.as_dict() for error in errors]}
        store.change(batch.id, "failed", {"errors": failures, "failed_at": int(time.time())}, ("validating",))
        return
    store.add_lines(batch.id, lines)
    store.change(batch.id, "in_progress", {"in_progress_at": int(time.time())}, ("validating",))


def _has_open_lines(store: BatchStore, batch: StoredBatch) -> bool:
    return bool(store.open_lines(batch.id, 1))


def _finish(store: BatchStore, batch: StoredBatch, status: Status, more: Mapping[str, Any] = NOTHING) -> None:
    """Writes the files. After a crash in between it is done again, and a file may lie there twice."""
    if status == "completed":
        store.change(batch.id, "finalizing", {"finalizing_at": int(time.time())}, ("in_progress",))
    tenant, made = batch.tenant, {}
    for field, good in (("output_file_id", True), ("error_file_id", False)):
        if content := store.outputs(batch.id, good=good):
            made[field] = store.add_file(
                tenant, f"{batch.id}_{field[:-8]}.jsonl", "batch_output", content, time.time()
            ).id
    store.change(batch.id, status, {**more, **made, f"{status}_at": int(time.time())})
