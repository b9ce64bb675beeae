"""A private folder of one run, and how commands on this host find a coordinator's address and admin key by
it.

    TMPDIR/splitserve-UID/          0700, ours
        run-XXXXXXXX/               one process's, for as long as it holds the lock
            lock
            coordinator-0.json      a ``Door``; one for each coordinator process
            admin.key, cluster.key, settings of `splitserve up`
        responses.sqlite        stored responses, without --responses-file

The lock ends with its process, also by kill -9: the next start removes what was left behind.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from ..transport.process.private_files import write_private
from .http.access.url import is_loopback

LOCK = "lock"
ADMIN_KEY = "admin.key"
RESPONSES = "responses.sqlite"
DOOR = "coordinator-{}.json"


class Door(BaseModel):
    """The addresses of a coordinator process of this host, and the file with its admin key."""

    model_config = ConfigDict(frozen=True, defer_build=True)

    url: str
    admin_url: str
    """URL of its admin port; ``url`` if it has none."""
    control_address: str
    admin_key_file: Path
    tls_cert: Path | None = None
    """By which it is known; None: it speaks plain HTTP."""

    def headers(self) -> dict[str, str]:
        """That show an operator. Raises OSError."""
        return {"authorization": f"Bearer {self.admin_key_file.read_text(encoding='utf-8').strip()}"}


class RunFolder:
    """Exists until ``close`` or until its process ends."""

    def __init__(self) -> None:
        """Raises OSError where the folder of all runs is not ours alone."""
        root = _root()
        root.mkdir(mode=0o700, exist_ok=True)
        _require_ours(root)
        _remove_left_behind(root)
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=root))
        self._lock = os.open(new / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = new.rename(root / new.name.replace(".new-", "run-"))

    def close(self) -> None:
        shutil.rmtree(self.path)
        os.close(self._lock)


def announce(folder: Path, number: int, door: Door) -> None:
    """Let commands on this host find coordinator process ``number``. Raises OSError."""
    write_private(folder / DOOR.format(number), door.model_dump_json())


def find_door(url: str) -> Door | None:
    """Return this user's coordinator on this host that has this URL, its own or its admin port's, or None.

    The caller must send the key to the door's own URLs: ``localhost`` may be another process's address.
    """
    asked = urlsplit(url)
    for door in _doors():
        for known in map(urlsplit, (door.url, door.admin_url)):
            if asked.port == known.port and (
                asked.hostname == known.hostname or is_loopback(asked.hostname or "")
            ):
                return door
    return None


def _doors() -> list[Door]:
    root, doors = _root(), []
    try:
        _require_ours(root)
    except OSError:
        return []
    for path in sorted(root.glob(f"run-*/{DOOR.format('*')}")):
        with contextlib.suppress(OSError, ValidationError):
            if _is_held(path.parent, "shared"):
                doors.append(Door.model_validate_json(path.read_bytes()))
    return doors


def _root() -> Path:
    return Path(tempfile.gettempdir()) / f"splitserve-{os.getuid()}"


def _require_ours(root: Path) -> None:
    status = root.lstat()
    if not root.is_dir() or root.is_symlink() or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(
            f"{root} must be a folder of yours with mode 0700; remove it, or set TMPDIR to a "
            "folder of your own"
        )


def _remove_left_behind(root: Path) -> None:
    """Folders of runs whose process has ended."""
    for path in root.glob("run-*"):
        if not _is_held(path, "exclusive"):
            shutil.rmtree(path, ignore_errors=True)


def _is_held(folder: Path, kind: Literal["shared", "exclusive"]) -> bool:
    """Whether a process holds the folder's lock."""
    try:
        with (folder / LOCK).open("rb") as lock:
            fcntl.flock(lock, (fcntl.LOCK_SH if kind == "shared" else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False
