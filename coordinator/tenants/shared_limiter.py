"""Limits that all coordinator processes of a host hold to together: the buckets lie in a file that they map
into memory.

One row of doubles for each key and each tenant: the numbers of ``buckets.py``, then one column for each
process with its open streams. An admission is a lock on the file, a few lines of arithmetic, an unlock: 10
us, and no process that could be down. The file outlives the processes. A process owns a column as long as it
lives, by a lock that the kernel releases: the streams of a killed one are dropped by the next process that
takes its column, or looks at it.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from ..background import Spawn, unwatched
from ..full_disk import is_full
from .buckets import NUM_FIELDS, Holder, Room, Shortage, admit, correct, settle
from .errors import TenantsFileError
from .limits import Account, Rows
from .tenancy import Admission, Answer

FIRST_COLUMN = 8
MAX_PROCESSES = 56
ROW_DOUBLES = FIRST_COLUMN + MAX_PROCESSES
ROW_BYTES = 8 * ROW_DOUBLES
STATE = struct.Struct(f"{NUM_FIELDS}d")
GROW_ROWS = 1024
END_OF_COLUMNS = 0  # in row 0, which is nobody's: the first column that was never owned
LOCK_TRIES = 50
_log = logging.getLogger(__name__)
LOCK_WAIT_S = 1e-4
EXCLUSIVE_AT_ONCE = fcntl.LOCK_EX | fcntl.LOCK_NB
ALONE = (
    "there is no space for the limits file %s: this process holds to limits by itself until it is "
    "started again"
)
FLOCK = "hhqqi4x"  # struct flock of fcntl(2)
COLUMN_LOCKS_AT = 1 << 40  # byte offsets far beyond the file's end: locks need no bytes


class SharedLimiter:
    """A ``Limiter``. Owns the file's mapping and one column of it."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises TenantsFileError."""
        self._clock = clock
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if not is_full(error):
                raise TenantsFileError(f"cannot use the limits file {path}: {error.strerror}") from None
            _log.error(ALONE, path)
            self._fd = os.memfd_create("limits", os.MFD_CLOEXEC)
        self._path, self._alone = path, False
        self._lock = _Lock(self._fd)
        self._column = self._claim_column(path)
        self._map: mmap.mmap
        self._view: memoryview[float] = memoryview(bytearray(8)).cast("d")
        self._num_rows = 0
        with self._lock:
            self._reach(0)
            self._view[END_OF_COLUMNS] = max(self._view[END_OF_COLUMNS], self._column + 1)
            for row in range(1, self._num_rows):
                self._view[row * ROW_DOUBLES + self._column] = 0.0

    def admit(self, account: Account, tokens: int, answer: Answer) -> None:
        rows = account.rows
        if not rows:
            answer(Admission(account, tokens, Room()))
            return
        with self._lock:
            holders = self._holders(rows)
            result = admit(holders, tokens, self._clock())
            if isinstance(result, Shortage) and result.what == "streams" and self._release_dead(rows):
                holders = self._holders(rows)
                result = admit(holders, tokens, self._clock())
            if isinstance(result, Room):
                self._store(rows, holders, 1.0)
        answer(Admission(account, tokens, result) if isinstance(result, Room) else result)

    def correct(self, admission: Admission, tokens: int, answer: Answer) -> None:
        rows, result = admission.account.rows, admission.room
        if rows:
            with self._lock:
                holders = self._holders(rows)
                found = correct(holders, admission.tokens, tokens, self._clock())
                self._store(rows, holders, -1.0 if isinstance(found, Shortage) else 0.0)
            if isinstance(found, Shortage):
                answer(found)
                return
            result = found
        answer(Admission(admission.account, tokens, result))

    def settle(self, admission: Admission, tokens: int) -> None:
        rows = admission.account.rows
        if rows:
            with self._lock:
                holders = self._holders(rows)
                settle(holders, admission.tokens, tokens, self._clock())
                self._store(rows, holders, -1.0)

    async def start(self, spawn: Spawn = unwatched) -> None:
        """It is ready as it is."""

    async def stop(self) -> None:
        self._view.release()
        self._map.close()
        os.close(self._fd)

    def _holders(self, rows: Rows) -> list[Holder]:
        """Copies: a list of floats is quicker to work on than shared memory."""
        holders: list[Holder] = []
        for row, limits in rows:
            if row >= self._num_rows:
                self._reach(row)
            view, at, num_streams = self._view, row * ROW_DOUBLES, 0
            if limits.max_streams is not None:
                num_streams = round(sum(view[at + FIRST_COLUMN : at + int(view[END_OF_COLUMNS])]))
            holders.append(Holder([*STATE.unpack_from(self._map, 8 * at)], limits, num_streams))
        return holders

    def _store(self, rows: Rows, holders: list[Holder], change: float) -> None:
        """Write the holders' numbers back, and add ``change`` to this process's streams."""
        for (row, _), (state, _, _) in zip(rows, holders, strict=True):
            at = row * ROW_DOUBLES
            STATE.pack_into(self._map, 8 * at, *state)
            self._view[at + self._column] = max(0.0, self._view[at + self._column] + change)

    def _reach(self, row: int) -> None:
        """Maps as many rows as there are, and makes more where this one is not among them."""
        if row < self._num_rows:
            return
        num_rows = max(os.fstat(self._fd).st_size // ROW_BYTES, (row // GROW_ROWS + 1) * GROW_ROWS)
        if not self._alone:
            try:
                # writing to a page without disk space would kill the process
                os.posix_fallocate(self._fd, 0, num_rows * ROW_BYTES)
            except OSError as error:
                if not is_full(error):
                    raise
                self._go_alone()
        if self._alone:
            os.ftruncate(self._fd, num_rows * ROW_BYTES)
        self._map = mmap.mmap(self._fd, num_rows * ROW_BYTES)  # the old one goes when nothing refers to it
        self._view = memoryview(self._map).cast("d")
        self._num_rows = num_rows

    def _go_alone(self) -> None:
        """Limits from now on in memory, as they were at the last look, and of this process alone."""
        _log.error(ALONE, self._path)
        self._alone = True
        memory = os.memfd_create("limits", os.MFD_CLOEXEC)
        os.write(memory, bytes(self._view.cast("B")))
        os.dup2(memory, self._fd, inheritable=False)
        os.close(memory)

    def _release_dead(self, rows: Rows) -> bool:
        """Drops what processes that have ended still hold of these rows; whether there was anything."""
        found = False
        for row, _ in rows:
            for column in range(FIRST_COLUMN, ROW_DOUBLES):
                at = row * ROW_DOUBLES + column
                if self._view[at] > 0 and column != self._column and not self._is_owned(column):
                    self._view[at], found = 0.0, True
        return found

    def _is_owned(self, column: int) -> bool:
        lock = fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, _column_lock(column))
        return bool(struct.unpack(FLOCK, lock)[0] != fcntl.F_UNLCK)

    def _claim_column(self, path: Path) -> int:
        for column in range(FIRST_COLUMN, ROW_DOUBLES):
            try:
                fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, _column_lock(column))
            except BlockingIOError:
                continue
            return column
        os.close(self._fd)
        raise TenantsFileError(
            f"{path}: {MAX_PROCESSES} coordinator processes hold to its limits already; no more can"
        )


class _Lock:
    """Others wait for microseconds. One that was stopped while it held the lock must not stop everybody:
    after some milliseconds we go on without it, and a limit may be off by a request."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> None:
        for _ in range(LOCK_TRIES):
            try:
                fcntl.flock(self._fd, EXCLUSIVE_AT_ONCE)
                break
            except BlockingIOError:
                time.sleep(LOCK_WAIT_S)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._fd, fcntl.LOCK_UN)


def _column_lock(column: int) -> bytes:
    return struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, COLUMN_LOCKS_AT + column, 1, 0)
