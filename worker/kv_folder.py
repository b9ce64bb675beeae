"""Blobs of the KV store as files below a folder.

Each is written under another name first, so that no reader sees a part of one. When the folder is over its
limit, or its disk is full, what was written or read longest ago is removed first, of all models.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path

from ..engine.errors import KVStoreError

DEFAULT_GIB = 10
_BLOB = re.compile(r"[0-9a-f]{32}(\.[0-9a-f]+)?")  # or one that is being written


class KVFolder:
    """See ``kv_store.Storage``. One thread writes."""

    num_readers, num_writers = 4, 1
    group_bytes = 2 << 20  # a loop copies them in 0.2 ms
    ahead, max_known = 4, 0

    def __init__(self, root: Path, max_bytes: int) -> None:
        """``max_bytes``: of the whole folder."""
        self._root, self._max_bytes = root, max_bytes
        self._num_untrimmed = 0

    def __str__(self) -> str:
        return str(self._root)

    def open(self, folder: str) -> None:
        try:
            (self._root / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror
            raise KVStoreError(f"--kv-store {self._root}: {reason}; give a folder to write to") from None

    def get(self, name: str, num_bytes: int) -> bytes | None:
        path = self._root / name
        try:
            blob = path.read_bytes()
        except FileNotFoundError:
            return None
        with suppress(OSError):  # it may be read only
            os.utime(path)
        return blob

    def touch(self, name: str) -> bool:
        with suppress(FileNotFoundError):
            os.utime(self._root / name)
            return True
        return False

    def put(self, name: str, blob: bytes) -> None:
        path = self._root / name
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(12)}")
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            try:
                unfinished.write_bytes(blob)
                unfinished.rename(path)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.trim(is_full=True)
            raise
        self._num_untrimmed += len(blob)
        if self._num_untrimmed > self._max_bytes // 64:
            self.trim()

    def remove(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Nothing: a call of the system cannot be ended."""

    def trim(self, is_full: bool = False) -> None:
        """Remove the oldest files of all models until an eighth of the limit is free; ``is_full``: an eighth
        of them."""
        self._num_untrimmed, files = 0, []
        with suppress(OSError):  # a folder has gone
            for path in self._root.glob("kv-*/??/*"):
                with suppress(OSError):  # another worker has removed it
                    if _BLOB.fullmatch(path.name):
                        status = path.stat()
                        files.append((status.st_mtime, status.st_size, path))
        held = sum(size for _, size, _ in files)
        limit = held if is_full else self._max_bytes
        if held < limit or not files:
            return
        excess = held - limit + limit // 8
        for _, size, path in sorted(files):
            if excess <= 0:
                break
            with suppress(OSError):
                path.unlink(missing_ok=True)
                excess -= size
