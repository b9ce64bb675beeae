"""The machine's speed during a live run: the workers' logged steps beside their profile.

A profile is taken at one time and a live run at another; on a machine that others use too, or that gets warm,
the same step does not take the same time. A simulation's error is then partly the machine's. With the
measured speed only the simulator's own part is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...engine.latency_profile import Profile, StepRole
from ...engine.step_log import LoggedStep

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
                sums[1] += step.modelled_s(profile)

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
