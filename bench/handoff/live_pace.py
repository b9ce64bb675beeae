"""The machine's speed during a live run: the workers' logged steps beside their profile.

A profile is taken at one time and a live run at another; on a machine that others use too, or that gets warm,
the same step does not take the same time. A simulation's error is then partly the machine's. With the
measured speed only the simulator's own part is left.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from ...engine.latency_profile import Profile, StepRole
from ...engine.step_clock import StepClock
from ...engine.step_log import LoggedStep, StepLogError

WINDOW_S = 2.0


def stolen_share(before: Sequence[int], after: Sequence[int]) -> float:
    """Share of the wanted processor time between two readings of ``processor_times`` that the hypervisor gave
    to others."""
    user, nice, system, _, _, irq, softirq, steal = (
        b - a for a, b in zip(before[:8], after[:8], strict=True)
    )
    wanted = user + nice + system + irq + softirq + steal
    return steal / wanted if wanted > 0 else 0.0


def processor_times() -> list[int]:
    """Linux's counters of all processors since boot: user, nice, system, idle, iowait, irq, softirq,
    steal."""
    with open("/proc/stat", encoding="ascii") as file:
        return [int(value) for value in file.readline().split()[1:9]]


class LivePace:
    """How many times its modelled time a step took, by role and by when it began: the mean over ``WINDOW_S``;
    where there was no step of that role, that of the nearest window with one. 1 where there was none at
    all."""

    def __init__(self, steps: Iterable[LoggedStep], profile: Profile, began: float) -> None:
        """``steps`` from ``began`` on count (seconds of the host's monotonic clock)."""
        self._sums: dict[StepRole, dict[int, list[float]]] = {"prefill": {}, "decode": {}}
        for step in steps:
            if step.began >= began:
                sums = self._sums[step.role].setdefault(int((step.began - began) / WINDOW_S), [0.0, 0.0])
                sums[0] += step.seconds
                sums[1] += modelled_s(step, profile)

    def __call__(self, role: StepRole, at: float) -> float:
        """``at``: seconds since ``began``."""
        windows = self._sums[role]
        if not windows:
            return 1.0
        window = int(at / WINDOW_S)
        actual, modelled = windows.get(window) or windows[min(windows, key=lambda other: abs(other - window))]
        return actual / modelled if modelled > 0 else 1.0

    def summary(self) -> dict[str, dict[str, float]]:
        """By role: of all steps, and the tenth and ninetieth percentile of the windows."""
        found: dict[str, dict[str, float]] = {}
        for role, windows in self._sums.items():
            if windows:
                actual, modelled = np.sum(list(windows.values()), axis=0)
                low, high = np.percentile([a / m for a, m in windows.values() if m > 0], (10, 90))
                found[role] = {"mean": float(actual / modelled), "p10": float(low), "p90": float(high)}
        return found


def modelled_s(step: LoggedStep, profile: Profile) -> float:
    """Return the seconds of this step by the profile."""
    parts = [chunk.split("+") for chunk in step.chunks.split()]
    chunks = [(int(cached), int(new)) for cached, new in parts]
    return StepClock(profile, warns=False).mixed(chunks, step.num_seqs, step.num_context_tokens)


def read_step_logs(folder: Path) -> Iterator[LoggedStep]:
    """The steps of all files there, process by process. Raises StepLogError."""
    for path in sorted(folder.glob("*.csv")):
        try:
            with path.open(encoding="utf-8", newline="") as file:
                for row in csv.DictReader(file):
                    yield LoggedStep(
                        float(row["began"]),
                        float(row["seconds"]),
                        row["chunks"],
                        int(row["num_seqs"]),
                        int(row["num_context_tokens"]),
                    )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise StepLogError(f"{path} is no step log: {error!r}") from None
