"""Packed weights, in memory on huge pages, and in a file from which the next start takes them.

Packing reads and writes every weight, and fresh huge pages can cost a virtual machine seconds for each GiB. A
later start maps the file instead, and a thread then moves the mapped weights to huge pages while they are
already in use.

The file holds what was packed, in the order in which it was asked for, then a footer (JSON: sizes, checksum)
and the footer's length. Its name is a key over all that decides its content, so that a file of another
model, type or build is never found; the checksum finds damage. Files are replaced by renaming, never written
in place: a worker may have mapped them.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path

import torch
import xxhash
from torch import Tensor

from .huge_pages import ALIGNMENT, HugePageArena, map_file, move_to_huge_pages, warn_of_small_pages

LEAST_BYTES = 64 << 20  # below, packing takes no time
KEPT_MODELS = 3  # in one folder: one model in several types, or several models
SUFFIX = ".packed"
FORMAT = 1
LENGTH_BYTES = 8
_log = logging.getLogger(__name__)


class PackedWeights:
    """``filled`` for each weight in a fixed order, then ``finish``. ``paths``: the first of these files that
    is there is read; the first that can be written is. None: nothing is kept."""

    def __init__(self, paths: Sequence[Path] = (), num_threads: int = 1) -> None:
        """``num_threads``: that pack."""
        self.num_threads = num_threads
        self._paths, self._arena = paths, HugePageArena()
        self._given: list[Tensor] = []  # uint8
        self._fresh = False  # some are not in the file
        there = [path for path in paths if path.exists()]
        self._mapped, self._sizes = _read(there[0]) if there else (torch.empty(0), [])
        self._starts = list(accumulate(self._sizes, initial=0))

    def filled(self, count: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        """[count] of a weight that ``fill`` packs into zeroed memory, unless the file has it. What ``fill``
        raises leaves all as it was."""
        i, num_bytes = len(self._given), count * dtype.itemsize
        if self.has(num_bytes):
            memory = self._mapped[self._starts[i] : self._starts[i + 1]]
        else:
            memory = self._arena.empty(_aligned(num_bytes), torch.uint8)
            try:
                fill(memory[:num_bytes].view(dtype))
            except BaseException:
                self._arena.take_back(memory)
                raise
            self._fresh = True
        self._given.append(memory)
        return memory[:num_bytes].view(dtype)

    def has(self, num_bytes: int) -> bool:
        """Whether the next weight is in the file, in this size."""
        i = len(self._given)
        return not self._fresh and self._sizes[i : i + 1] == [_aligned(num_bytes)]

    def finish(self) -> threading.Thread | None:
        """All weights were asked for: a thread writes the file, or moves what was mapped to huge pages."""
        if not self._paths or sum(weight.nbytes for weight in self._given) < LEAST_BYTES:
            return None
        thread = threading.Thread(target=self._settle, name="packed-weights", daemon=True)
        thread.start()
        return thread

    def _settle(self) -> None:
        if not self._fresh:
            move_to_huge_pages(self._mapped)
        warn_of_small_pages(self._given)
        if self._fresh:
            self._keep()

    def _keep(self) -> None:
        for path in self._paths:
            try:
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._write(path)
                return
            except BlockingIOError:  # another worker that starts writes the same
                return
            except OSError as error:
                _log.info("packed weights are not kept in %s: %s", path, error.strerror or error)
                with suppress(OSError):
                    path.with_suffix(".part").unlink(missing_ok=True)

    def _write(self, path: Path) -> None:
        """Raises OSError."""
        part = path.with_suffix(".part")
        num_bytes = sum(weight.nbytes for weight in self._given)
        space = os.statvfs(part.parent)
        if 2 * num_bytes > space.f_bavail * space.f_frsize:
            raise OSError(f"{2 * num_bytes:,} bytes of free space are wanted")
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600), "wb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.truncate(0)
            digest = xxhash.xxh3_128()
            for weight in self._given:
                view = weight.numpy().data
                digest.update(view)
                while view:
                    view = view[file.write(view) :]
            sizes = [weight.nbytes for weight in self._given]
            footer = json.dumps({"sizes": sizes, "checksum": digest.hexdigest()}).encode()
            file.write(footer + len(footer).to_bytes(LENGTH_BYTES, "little"))
            part.rename(path)
        _log.info("packed weights kept in %s (%.2f GiB) for the next start", path, num_bytes / 2**30)
        by_age = sorted(path.parent.glob(f"*{SUFFIX}"), key=lambda kept: -kept.stat().st_mtime)
        newest = list(dict.fromkeys(_model_of(kept) for kept in by_age))[:KEPT_MODELS]
        for old in by_age:
            if _model_of(old) not in newest:
                old.unlink(missing_ok=True)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _model_of(kept: Path) -> str:
    return kept.stem.partition("-")[0]


def kept_files(model: Path, *identity: object, part: str = "") -> list[Path]:
    """The files that may keep the packed weights of a model, or a ``part`` of it: in its folder, or else in
    the user's cache. ``identity``: what decides their content beside the build of the kernels."""
    try:
        from . import _cpu
    except ImportError:
        return []
    build = xxhash.xxh3_128_hexdigest(Path(_cpu.__file__).read_bytes())
    key = xxhash.xxh3_128_hexdigest(repr((FORMAT, build, _cpu.instruction_sets(), *identity)).encode())
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = f"{key}{part and f'-{part}'}{SUFFIX}"
    return [folder / name for folder in (model / ".splitserve", cache / "splitserve" / "packed")]


def _read(path: Path) -> tuple[Tensor, list[int]]:
    """The weights of a file, mapped, and their sizes in bytes; none where there is no file or it is
    damaged."""
    try:
        with path.open("rb") as file:
            file.seek(-LENGTH_BYTES, os.SEEK_END)
            end = file.tell()
            length = int.from_bytes(file.read(), "little")
            file.seek(max(0, end - length))
            footer = json.loads(file.read(min(length, end)))
            sizes = [int(size) for size in footer["sizes"]]
            if min(sizes) < 0 or sum(sizes) != end - length:
                raise ValueError("its length is not that of its weights")
            memory = map_file(file.fileno(), sum(sizes))
        if xxhash.xxh3_128_hexdigest(memory.numpy().data) != footer["checksum"]:
            raise ValueError("the checksum does not match")
        os.utime(path)
    except FileNotFoundError:
        return torch.empty(0), []
    except (OSError, ValueError, LookupError, TypeError) as error:
        _log.warning("%s cannot be used (%s): the weights are packed and kept again", path, error)
        return torch.empty(0), []
    return memory, sizes
