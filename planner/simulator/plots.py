"""Draws a simulation's timeline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from .timeline import Timeline


def rows_by_pool(names: Sequence[str]) -> dict[str, list[int]]:
    """``names``: of workers, ``ROLE-POOL-NUMBER`` or, where a process may have both roles,
    ``ROLE-POOL-NUMBER:ROLE``. A pool is called by its role where no other one has it, else ``ROLE-POOL``."""
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        found.setdefault(name.rpartition("-")[0], []).append(row)
    roles = [pool.partition("-")[0] for pool in found]
    return {
        role if roles.count(role) == 1 else pool: rows
        for role, (pool, rows) in zip(roles, found.items(), strict=True)
    }


def draw_timeline(path: Path, timeline: Timeline) -> None:
    """Requests in the system, busy devices, KV caches, by pool; a PNG."""
    at = [s.at_s for s in timeline.samples]
    figure = Figure((12, 11))
    axes = figure.subplots(4, 1, sharex=True)
    axes[0].plot(at, [s.open for s in timeline.samples], label="in the system")
    axes[0].plot(at, [s.queued for s in timeline.samples], label="waiting in the coordinator")
    axes[0].set(ylabel="requests")
    for pool, chosen in rows_by_pool(timeline.names).items():
        for axis, value in ((1, "busy"), (2, "used"), (3, "running")):
            values = np.array([[getattr(s.workers[i], value) for i in chosen] for s in timeline.samples])
            (line,) = axes[axis].plot(at, values.mean(axis=1), label=pool)
            axes[axis].fill_between(
                at, values.min(axis=1), values.max(axis=1), alpha=0.2, color=line.get_color()
            )
    for axis, label in ((1, "busy share"), (2, "KV cache used"), (3, "sequences in steps, each")):
        axes[axis].set(ylabel=label, ylim=(0, None))
    for one in axes:
        one.legend(loc="upper right")
    axes[3].set(xlabel="seconds of the trace (line: mean of the pool; shade: least and most)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
