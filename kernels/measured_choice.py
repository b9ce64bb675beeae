"""Which kernels multiply on this CPU: measured when first needed, kept in a file.

What is fastest cannot be read off a CPU's flags. The bfloat16 units of a Zen 4 core do twice the
multiply-adds of its float32 units, those of an Emerald Rapids core half. Four choices are made:

    instruction set   of the C++ kernels, for all row counts and shapes: they share one layout of the weights
    prefetching rows  from how many rows on products ask memory for weights ahead: the same bits either way
    coded weights     whether bfloat16 ones are read in 12.25 bits (cpu/coded.h): the same bits either way
    rows of oneDNN    by shape of a linear: from how many rows on oneDNN is faster (with AMX tiles it may be)

Tests run AMX's on played tiles; no CPU that has it has timed it yet. Exact mode leaves oneDNN out. The file
is keyed by the CPU, its flags, the build and torch; one that is damaged or another's is measured anew.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch

from . import _cpu

logger = logging.getLogger(__name__)

NEVER = 1 << 30  # rows
ROWS = (1, 8, 32, 128)  # that are measured; each stands for those up to the next
GAIN = 0.9  # oneDNN is taken where it needs at most this share of the time: it costs memory, and calls
ROUNDS = 5
ROUNDS_SECONDS = 0.05  # of one comparison; at least two rounds
CPUINFO = Path("/proc/cpuinfo")
CPU_FIELDS = ("vendor_id", "cpu family", "model", "model name", "stepping", "flags", "Features")


class KernelChoices:
    """The choices of one machine. ``path``: its file; None: nothing is remembered."""

    def __init__(self, path: Path | None, machine: str) -> None:
        self._path, self._machine = path, machine
        self.made = self._read()

    @staticmethod
    def of_this_machine() -> KernelChoices:
        machine = _machine()
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "splitserve"
        return _remembered(folder / f"kernels-{machine}.json", machine)

    def get(self, name: str, measure: Callable[[], int]) -> int:
        """The choice of this name; ``measure`` makes it where it is not yet known. Processes that start
        together measure one after the other and then agree."""
        if name not in self.made:
            with self._locked():
                self.made = self._read() | self.made
                if name not in self.made:
                    self.made[name] = measure()
                    self._write()
        return self.made[name]

    def _read(self) -> dict[str, int]:
        try:
            found = json.loads(self._path.read_text()) if self._path else {}
            if found and found["machine"] == self._machine:
                return {str(name): int(choice) for name, choice in found["choices"].items()}
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("kernels: %s is damaged (%r): measuring anew", self._path, error)
        return {}

    def _write(self) -> None:
        if self._path is None:
            return
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps({"machine": self._machine, "choices": self.made}, indent=1) + "\n")
        new.replace(self._path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the file's lock; remember nothing if its folder cannot be written."""
        try:
            if self._path is None:
                raise OSError("no file")
            self._path.parent.mkdir(parents=True, exist_ok=True)
            lock = self._path.with_suffix(".lock").open("w")
        except OSError:
            self._path = None
            yield
            return
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


@cache
def _remembered(path: Path, machine: str) -> KernelChoices:
    """One object a process: it agrees with itself where the file cannot be written."""
    return KernelChoices(path, machine)


def fastest(candidates: Sequence[Callable[[], object]]) -> list[float]:
    """Seconds of each candidate: the shortest of several rounds, in which they take turns; processor time of
    this thread, to which other processes add nothing."""
    clock = time.thread_time
    best = [float("inf")] * len(candidates)
    for run in candidates:
        run()
    began = clock()
    for done in range(ROUNDS):
        if done >= 2 and clock() - began > ROUNDS_SECONDS:
            break
        for i, run in enumerate(candidates):
            start = clock()
            run()
            best[i] = min(best[i], clock() - start)
    return best


def rows_of_onednn(own: Callable[[int], object], onednn: Callable[[int], object]) -> int:
    """Return the number of rows from which on oneDNN is faster; NEVER, or 0 for always."""
    limit = NEVER
    for rows in reversed(ROWS):
        runs: list[Callable[[], object]] = [partial(own, rows), partial(onednn, rows)]
        mine, theirs = fastest(runs)
        if theirs > GAIN * mine:
            return limit
        limit = rows
    return 0


@cache
def _machine() -> str:
    """Digest of the CPU, the build of the kernels and torch, on which the choices depend."""
    text = CPUINFO.read_text().partition("\n\n")[0] if CPUINFO.exists() else platform.processor()
    cpu = [line for line in text.splitlines() if line.partition(":")[0].strip() in CPU_FIELDS]
    build = Path(_cpu.__file__ or "").read_bytes()
    parts = [
        "\n".join(cpu).encode(),
        build,
        torch.__version__.encode(),
        str(_cpu.instruction_sets()).encode(),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
