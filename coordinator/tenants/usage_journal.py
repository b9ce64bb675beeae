"""A process's usage records until the database has them: a file that outlives the process.

    {"began": [...]}   a request is admitted: its record so far
    {"ended": [...]}   it is over: its whole record
    {"at": seconds}    everything before this was on disk by then

Lines of one turn of the event loop are one write, which the kernel keeps if the process is then killed; a
process that is killed within a turn loses that turn's lines. While the disk is full nothing is written here;
the owner keeps its records in memory. A host that goes down can lose the lines after the last ``at``, which
is at most a second old. The owner of a journal holds a lock on it, which ends with its process.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TypeAlias

import orjson

from ..full_disk import is_full
from .usage_record import FIELDS, LOST, UsageRecord

_log = logging.getLogger(__name__)
Soon: TypeAlias = Callable[[Callable[[], None]], object]
"""Puts a call off to the end of the event loop's turn."""


def at_once(write: Callable[[], None]) -> None:
    """A ``Soon`` where there is no loop."""
    write()


class UsageJournal:
    """One file, from its first line until ``remove``. A full disk leaves it without a file until there is
    space."""

    def __init__(self, path: Path, soon: Soon = at_once) -> None:
        """Open the file. Raises OSError, except for a full disk."""
        self.path = path
        self._soon = soon
        self._lines: list[tuple[bytes, UsageRecord]] = []  # to be written at the end of the turn
        self._fd = -1  # none yet
        self._torn = False  # the last line is not whole
        self.num_bytes = 0
        try:
            self._open()
        except OSError as error:
            if not is_full(error):
                raise
            _log.error(
                "there is no space for the usage journal %s; records are in memory alone until there is", path
            )

    def began(self, record: UsageRecord) -> None:
        self._note(b"began", record)

    def ended(self, record: UsageRecord) -> None:
        self._note(b"ended", record)

    def sync(self, now: float) -> None:
        """Everything so far is on disk when this returns. May be called on another thread."""
        if self._fd >= 0:
            os.fsync(self._fd)
            self._write(b'{"at":%b}\n' % orjson.dumps(now))

    def remove(self) -> None:
        """The database has all of it."""
        self._lines.clear()
        if self._fd >= 0:
            self.path.unlink()
            os.close(self._fd)

    def _note(self, what: bytes, record: UsageRecord) -> None:
        self._lines.append((what, record))
        if len(self._lines) == 1:
            self._soon(self.flush)

    def flush(self) -> None:
        """Write this turn's lines. Raises OSError; then the journal has lost them."""
        lines, self._lines = self._lines, []
        if lines:
            if self._fd < 0:
                self._open()
            self._write(
                b"".join([b'{"%b":%b}\n' % (what, orjson.dumps(tuple(record))) for what, record in lines])
            )

    def _open(self) -> None:
        # under its own name it would be taken for one that was left behind
        unlocked = self.path.with_name(f".{self.path.name}")
        fd = os.open(unlocked, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            unlocked.rename(self.path)
        except OSError:
            os.close(fd)
            unlocked.unlink(missing_ok=True)
            raise
        self._fd = fd

    def _write(self, lines: bytes) -> None:
        lines = b"\n" + lines if self._torn else lines
        try:
            written = os.write(self._fd, lines)
        except OSError as error:
            error.filename = str(self.path)
            raise
        self.num_bytes += written
        self._torn = written != len(lines)
        if self._torn:  # the last bytes of a disk
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))


@dataclass(slots=True)
class Left:
    """What processes that ended without a farewell have left. ``ended_at``: when the last of their journals
    was written to."""

    paths: list[Path] = field(default_factory=list)
    ended: list[UsageRecord] = field(default_factory=list)
    running: dict[str, UsageRecord] = field(default_factory=dict)
    ended_at: float = 0.0

    @property
    def lost(self) -> list[UsageRecord]:
        """Those that were running, and ended in no journal."""
        ended = {record.id for record in self.ended}
        return [record for id, record in self.running.items() if id not in ended]

    def remove(self) -> None:
        """The database has all of it."""
        for path in self.paths:
            path.unlink()


@contextmanager
def left_behind(folder: Path, stem: str) -> Iterator[Left]:
    """All journals whose owners are gone, together: a request may have begun in one and ended in the next.
    One process at a time reads them; any other finds nothing meanwhile."""
    left = Left()
    with ExitStack() as files:
        if _locked(files.enter_context((folder / f".{stem}recovery").open("wb"))):
            for path in sorted(folder.glob(f"{stem}*")):
                if _locked(files.enter_context(path.open("rb"))):
                    read(path, left)
        yield left


def _locked(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False  # its owner lives
    return True


def read(path: Path, left: Left) -> None:
    """Adds a journal's contents; a line that was cut off is none."""
    left.paths.append(path)
    left.ended_at = max(left.ended_at, path.stat().st_mtime)
    for line in path.read_bytes().splitlines():
        try:
            entry = orjson.loads(line)
            if "began" in entry:
                record = _record(entry["began"])
                left.running[record.id] = record._replace(status=LOST)
            elif "ended" in entry:
                record = _record(entry["ended"])
                left.running.pop(record.id, None)
                left.ended.append(record)
        except (orjson.JSONDecodeError, TypeError, ValueError):
            continue


def journal_path(folder: Path, stem: str, number: int) -> Path:
    """A name that no other process of this host uses, now or before."""
    return folder / f"{stem}{time.time_ns():x}-{os.getpid()}-{number}"


def _record(values: list[object]) -> UsageRecord:
    if len(values) != len(FIELDS):
        raise ValueError(f"{len(values)} fields, not {len(FIELDS)}")
    return UsageRecord(*values)  # type: ignore[arg-type]
