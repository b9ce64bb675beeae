"""The folders that keep models from elsewhere, or stand for them: filled once, by one process."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """An empty folder that becomes ``folder`` once it is filled."""
    part = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    part.mkdir()
    try:
        yield part
        os.rename(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Several processes of a host that want the same model fetch it once."""
    with folder.with_name(f"{folder.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cache_folder(source: Literal["s3", "gguf"] = "s3") -> Path:
    """Return the folder that keeps models from S3, or what stands for GGUF files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitserve" / source
