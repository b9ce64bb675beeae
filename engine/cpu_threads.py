"""The threads of a CPU worker: how many compute, and on which cores.

Threads of one product wait for each other, so several on one core take many times as long as one alone. A
worker therefore counts the cores that other workers of this host have claimed, and binds its threads to cores
of its own. A lone thread waits for none: the scheduler places it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .device import cgroups

AUTO: Literal["auto"] = "auto"


@dataclass(frozen=True, slots=True)
class CpuThreads:
    """``count``: of each of ``ranks``. ``cores``: one for each thread, rank 0 first, as long as there
    are. ``own``: no other worker has claimed them."""

    count: int
    cores: tuple[int, ...]
    own: bool
    reason: str
    loading: int = 1  # for the start alone: this worker's part of the cores that are left
    ranks: int = 1

    @property
    def bound(self) -> tuple[int, ...]:
        """The cores to bind threads to; empty: the scheduler places them."""
        return self.cores if self.count * self.ranks > 1 and self.own else ()

    def of_rank(self, number: int) -> CpuThreads:
        """The threads of one rank; ranks load one after the other, each on all of the worker's cores."""
        return replace(self, cores=self.cores[number * self.count : (number + 1) * self.count])

    def __str__(self) -> str:
        """``2 threads bound to cores 0 and 1 (auto: 2 of 2 cores are left)``"""
        threads = "1 thread" if self.count == 1 else f"{self.count} threads"
        threads += f" for each of {self.ranks} ranks" * (self.ranks > 1)
        where = f" bound to cores {', '.join(map(str, self.bound))}" if self.bound else ""
        return f"{threads}{where} ({self.reason})"


def choose_threads(
    asked: int | Literal["auto"],
    cores: Sequence[int],
    quota: float,
    taken: Collection[int],
    absent: int,
    ranks: int = 1,
) -> CpuThreads:
    """The threads of a worker that may run on ``cores`` for ``quota`` of them in all.

    ``asked``: for each rank; ``taken``: cores that other workers have claimed; ``absent``: workers of this
    cluster that will start here and share what is left.
    """
    free = [core for core in cores if core not in taken]
    usable = max(1, int(min(len(cores), quota)))
    left = max(0, min(len(free), usable - (len(cores) - len(free))))
    part = max(1, left // (1 + absent))
    count = max(1, part // ranks) if asked == AUTO else asked
    needed = count * ranks
    own = tuple([*free, *(core for core in cores if core in taken)][:needed])
    reason = f"{left} of {usable} cores are left on this host"
    if absent:
        reason += f", workers still to start: {absent}"
    if needed > left:
        reason += "; its threads share cores with other workers"
    reason = f"auto: {reason}" if asked == AUTO else f"asked; {reason}"
    return CpuThreads(count, own, needed + absent <= len(free), reason, max(part, needed), ranks)


def usable_cores() -> list[int]:
    """The cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))


def cpu_quota() -> float:
    """Cores that the cgroups of this process allow; infinite without a limit."""
    return min((_quota(folder, is_v2) for folder, is_v2 in cgroups("cpu")), default=float("inf"))


def _quota(folder: Path, is_v2: bool) -> float:
    try:
        if is_v2:
            limit, period = (folder / "cpu.max").read_text().split()
        else:
            limit, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(limit) / int(period) if int(limit) > 0 else float("inf")
    except (OSError, ValueError):  # no such cgroup, or "max"
        return float("inf")


@contextmanager
def new_threads_bound(cores: Sequence[int]) -> Iterator[None]:
    """Bind the threads that begin meanwhile to these cores, one each."""
    before = _threads()
    yield
    for thread, core in zip(sorted(_threads() - before), cores, strict=False):
        with suppress(OSError):  # it has ended, or may not run there any more
            os.sched_setaffinity(thread, {core})


def _threads() -> set[int]:
    return (
        {int(name) for name in os.listdir("/proc/self/task")} if Path("/proc/self/task").is_dir() else set()
    )
