"""Files with secrets, prompts or answers: made with mode 0600, whatever the umask, and refused where other
users may open them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path


class OpenToOthers(OSError):
    """A file that must be private is not. The message has the command that mends it."""


def is_open_to_others(status: os.stat_result) -> bool:
    """Whether group or others may do anything with a file. A file of root's may be read by the group: so an
    orchestrator mounts a secret for a process that is not root (Kubernetes' ``fsGroup``)."""
    allowed = stat.S_IRGRP if status.st_uid == 0 != os.geteuid() else 0
    return bool(status.st_mode & (stat.S_IRWXG | stat.S_IRWXO) & ~allowed)


def require_private(what: str, paths: Iterable[Path]) -> None:
    """Raises OpenToOthers if one of those that exist is open to others. ``what`` names them: "the admin
    key"."""
    wrong = [path for path in paths if path.exists() and is_open_to_others(path.stat())]
    if wrong:
        mode = stat.S_IMODE(wrong[0].stat().st_mode)
        raise OpenToOthers(
            f"{what} {wrong[0]} is open to other users (mode {mode:04o}); run: chmod 600 "
            f"{' '.join(map(str, wrong))}"
        )


def make_private(what: str, path: Path) -> None:
    """Makes an empty file of mode 0600 where there is none, for a library that opens files by name. Raises
    OpenToOthers or OSError.

    SQLite gives ``-wal`` and ``-shm`` the mode of the database itself.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        require_private(what, [path, path.with_name(f"{path.name}-wal"), path.with_name(f"{path.name}-shm")])


def write_private(path: Path, text: str) -> None:
    """Writes a file anew with mode 0600: what stood there before is replaced in one step."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with open(new, "x", encoding="utf-8", opener=private) as file:
        file.write(text)
    new.replace(path)


def private(path: str, flags: int) -> int:
    """An ``opener`` for ``open``: what it makes has mode 0600."""
    return os.open(path, flags, 0o600)
