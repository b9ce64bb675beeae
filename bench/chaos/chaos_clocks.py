"""Wall clocks of a chaos run's processes, which jump while they run: a small preloaded library
(``wall_clock.c``) adds an offset to each.

Only the time of day jumps: monotonic clocks of a host never do.
"""

from __future__ import annotations

import ctypes
import random
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

JUMPS_S = (3, 30, 3600, 86_400, 365 * 86_400)
"""Each forth and back, from the right time."""


def missing() -> str:
    """What this machine lacks, as a sentence; empty where clocks can be set."""
    return "" if shutil.which("cc") else "there is no C compiler 'cc' (Debian package gcc)"


class Clocks:
    """One wall clock for each process; all are right at first."""

    def __init__(self, folder: Path, processes: Iterable[str]) -> None:
        """Raises CalledProcessError where the library cannot be made."""
        folder.mkdir()
        self._folder, self._library = folder, folder / "wall_clock.so"
        source = Path(__file__).with_name("wall_clock.c")
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(self._library), str(source)], check=True)
        for name in processes:
            self._file(name).write_bytes(struct.pack("q", 0))

    def environ(self, process: str = "") -> dict[str, str]:
        """For a program before its start; without a name for one that forks others, each of which calls its
        ``own``."""
        preload = {"LD_PRELOAD": str(self._library)}
        return {**preload, "WALL_CLOCK": str(self._file(process))} if process else preload

    def own(self, process: str) -> Callable[[], None]:
        """What a forked process calls."""
        return partial(_own, str(self._file(process)))

    def jump(self, processes: Iterable[str], draw: random.Random) -> int:
        """Set the clocks to a random offset from the right time, in seconds, and return it."""
        offset = draw.choice(JUMPS_S) * draw.choice((-1, 1))
        for name in processes:
            with self._file(name).open("rb+", buffering=0) as file:
                file.write(struct.pack("q", offset))
        return offset

    def _file(self, process: str) -> Path:
        return self._folder / process


def _own(path: str) -> None:
    if ctypes.CDLL(None).wall_clock(path.encode()):
        raise OSError(f"cannot map the clock {path}")
