"""A disk of a megabyte that a test fills and empties: a file system of its own, which root alone may
mount."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


class SmallDisk:
    """``path`` is its root."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._filler = path / "filler"

    def fill(self, leave: int = 0) -> None:
        """Nothing but ``leave`` bytes of the last page stays free."""
        with self._filler.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        if leave:
            with self._filler.open("rb+") as file:
                file.truncate(self._filler.stat().st_size - leave)

    def free(self) -> None:
        self._filler.unlink()


@contextmanager
def small_disk(path: Path) -> Iterator[SmallDisk]:
    """Skips the test where it cannot be mounted."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"a disk of its own cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)
