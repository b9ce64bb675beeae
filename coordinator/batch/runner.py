"""Runs batches: a few of their requests at a time, behind everybody else's, and again after a restart what
was not answered before."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar

from ..background import Spawn, unwatched
from ..errors import StorageFull, Unavailable
from ..full_disk import is_full
from ..listeners import ListenerFailures
from ..tenants.tenancy import Directory
from .asking import Asking
from .files import LEFT_BEHIND_S
from .line_runner import LineRunner, Payer
from .lines import LineError, LineReader
from .store import BatchStore, Ending, Status, StoredBatch

T = TypeVar("T")
LOOK_EVERY_S = 1.0  # for what other processes have put there
PRUNE_EVERY_S = 3600.0
PRUNES_AT_A_LOOK = 20
MAX_AT_WORK = 4
"""Batches that are validated or ended at a time."""
NO_KEY = Ending(
    "failed",
    "invalid_api_key",
    "The API key of this batch was revoked or has expired; submit what is left with a key that opens.",
)
NO_ROOM = Ending(
    "failed",
    "storage_limit_exceeded",
    "The answers would exceed what this tenant may store; delete files, then submit what is left.",
)
EXPIRED = Ending("expired", "batch_expired", "The batch expired before this request was run.")
ENDINGS = {
    "finalizing": Ending("completed"),
    "cancelling": Ending(
        "cancelled", "batch_cancelled", "The batch was cancelled before this request was run."
    ),
}


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
        self._path, self._keep_s, self._directory = options.path, options.keep_s, directory
        self._store = BatchStore(self._path)
        self._prune_at = self._look_at = 0.0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._changed = asyncio.Event()
        self._lines = LineRunner(self, asking, directory, options.max_running)
        self._working: dict[str, asyncio.Task[None]] = {}  # by tenant
        self._few = asyncio.Semaphore(MAX_AT_WORK)
        self.task: asyncio.Task[None] | None = None
        self._lock: IO[bytes] | None = None
        self.failures = failures or ListenerFailures()

    async def call(self, work: Callable[[BatchStore], T]) -> T:
        """Something done with the store, on its thread. Raises StorageFull, or Unavailable after ``stop``."""
        if self.task is not None and self.task.done():
            raise Unavailable("The server is shutting down.", retry_after_s=1)
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
        tasks = [*self._working.values(), *self._lines.tasks()]
        if self.task is not None:
            tasks.append(self.task)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
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
                async with asyncio.timeout(min(LOOK_EVERY_S, self._lines.rest_s())):
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

    async def _prune(self) -> None:
        """Delete what is older than it is to be kept, once an hour, a few at each look."""
        if time.monotonic() < self._prune_at:
            return
        self._prune_at, now = time.monotonic() + PRUNE_EVERY_S, time.time()
        await self.call(BatchStore.finalize_answered)
        prune = partial(BatchStore.prune, before=now - self._keep_s, left_before=now - LEFT_BEHIND_S)
        for _ in range(PRUNES_AT_A_LOOK):
            if not await self.call(prune):
                return
        self._prune_at = 0.0  # the rest at the next look

    async def _advance(self) -> None:
        await self._prune()
        payers = await self.call(BatchStore.payers)
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + LOOK_EVERY_S
            await self._end_overdue(payers)
        for tenant in await self.call(BatchStore.tenants_at_work):
            if tenant not in self._working:
                self._working[tenant] = asyncio.create_task(self._work(tenant))
        await self._lines.fill(payers)

    async def _end_overdue(self, payers: Sequence[Payer]) -> None:
        """End batches that expire, whose key has ended, or whose answers exceed what their tenant may
        store."""
        accounts = [self._directory.account_of_key(key_id) for _, key_id in payers]
        gone = {key_id for (_, key_id), account in zip(payers, accounts, strict=True) if account is None}
        bounds = {account.tenant: account.max_stored_bytes for account in accounts if account is not None}
        now, full = time.time(), await self.call(partial(_full, bounds=bounds))
        for batch in await self.call(lambda store: store.overdue(now, gone, full)):
            if now >= batch.details["expires_at"]:
                ending = EXPIRED
            elif batch.key_id in gone:
                ending = NO_KEY
            elif batch.tenant in full and batch.tenant not in self._working:
                ending = NO_ROOM  # one at a time: each that ends makes room
            else:
                continue
            details = {"ending": list(ending)}
            end = partial(BatchStore.change, id=batch.id, status="finalizing", details=details)
            await self.call(partial(end, only_from=("in_progress",)))

    async def _work(self, tenant: str) -> None:
        """Validate and end a tenant's batches, oldest first. Tenants take turns."""
        try:
            while True:
                async with self._few:
                    batch = await self.call(lambda store: store.next_work(tenant))
                    if batch is None:
                        break
                    await (self._validate(batch) if batch.status == "validating" else self._end(batch))
                self.wake()
        except Exception as error:
            self.failures.note("running batches", error)
        finally:
            del self._working[tenant]

    async def _validate(self, batch: StoredBatch) -> None:
        """Read a batch's requests from its file, part by part, while other work goes on."""
        content = partial(BatchStore.content, tenant=batch.tenant, id=batch.details["input_file_id"])
        reader, at, num_bytes, last = LineReader(batch.details["endpoint"]), 0, 0, False
        while not last and not reader.done:
            part = await self.call(partial(content, at=at))
            if part is None:
                reader.errors.append(LineError(None, "the input file was deleted", "invalid_file"))
                break
            lines = await asyncio.to_thread(reader.feed, part)
            await self.call(partial(BatchStore.add_lines, batch=batch.id, lines=lines))
            at, last = at + len(part), not part
            num_bytes += sum([len(line.body) + len(line.custom_id) for line in lines])
        status: Status = "failed" if reader.errors else "in_progress"
        details: dict[str, Any] = {f"{status}_at": int(time.time())}
        if reader.errors:
            while await self.call(lambda store: store.delete_lines(batch.id)):
                pass
            num_bytes = 0
            details["errors"] = {"object": "list", "data": [error.as_dict() for error in reader.errors]}
        await self.call(lambda store: store.validated(batch.id, status, details, num_bytes))

    async def _end(self, batch: StoredBatch) -> None:
        """Make its files, part by part; after a crash in between they go on where they were."""
        status, code, message = batch.details.get("ending") or ENDINGS[batch.status]
        await self._lines.forget(batch.id)
        if "files" not in batch.details:
            await self.call(partial(BatchStore.begin_ending, batch=batch))
        ending = Ending(status, code, message)
        while await self.call(lambda store: store.move_answers(batch.id, ending)):
            pass
        details: dict[str, Any] = {f"{status}_at": int(time.time())}
        if status == "failed":
            failure = {"code": code, "line": None, "message": message, "param": None}
            details["errors"] = {"object": "list", "data": [failure]}
        await self.call(lambda store: store.end_batch(batch.id, status, details))


def _full(store: BatchStore, bounds: Mapping[str, int | None]) -> set[str]:
    """Return the tenants that have stored more than they may."""
    return {tenant for tenant, most in bounds.items() if most is not None and store.stored(tenant) > most}
