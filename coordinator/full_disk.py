"""What a full disk looks like from here: the operating system's errors and SQLite's."""

from __future__ import annotations

import errno
import sqlite3

FULL = (errno.ENOSPC, errno.EDQUOT)
SQLITE_FULL = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)
"""SQLite reports a write-ahead log whose index finds no space as "disk I/O error", and a missing inode as
"unable to open"."""


def is_full(error: BaseException) -> bool:
    """Whether it may be gone once there is space: other settings would not help."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", 0) & 0xFF in SQLITE_FULL
    return isinstance(error, OSError) and error.errno in FULL
